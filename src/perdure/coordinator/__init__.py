"""Many replicas behind one coordinator: which of them computes a request, and what becomes of it when one is lost.

Decided by pure objects that get messages and the time as arguments; `wire` and `service` alone know sockets.
"""
