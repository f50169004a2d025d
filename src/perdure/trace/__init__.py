"""A run as people see it: read from its journal, shown as a timeline, a Chrome trace and a picture.

Nothing here runs an engine or knows a tensor; a journal is all it needs.
"""
