"""Sizes as people write them."""

import re

from quantforge.errors import UsageError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)}


def parse_size(size: str | int) -> int:
    """Bytes in a size such as ``5GB`` (10^9), ``500 MiB`` (2^20) or ``1000``; raises UsageError on anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(found[2].upper()) if found else None
    size_bytes = int(float(found[1]) * unit) if found and unit else 0
    if size_bytes < 1:
        raise UsageError(f"a size is a positive number with a unit, such as 5GB or 500MiB; got {size!r}")
    return size_bytes


def size_label(size_bytes: int) -> str:
    """``33.6 MB``, ``171.8 GB``: powers of ten, in the largest unit of which there is one, MB at least."""
    power = next((power for power in (4, 3) if size_bytes >= 1000**power), 2)
    return f"{size_bytes / 1000**power:,.1f} {'KMGT'[power - 1]}B"
