"""Plain frozen values that cross boundaries: requests, settings, plans, results, configuration, errors.

Nothing here knows a tensor, a thread, a clock or a socket, and this package imports no other of perdure's.
"""
