"""Amounts in words, the same wherever people read them."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def in_units(num_bytes: int) -> str:
    """A size for people, in the largest unit of which there is at least one."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} bytes"
