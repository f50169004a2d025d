"""Executing plans: packing, keys and values, device rows, sampling. Knows nothing of why a plan is as it is.

This file and `base` import no torch, so that what only needs the interface does not pull it.
"""
