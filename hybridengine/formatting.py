"""Human-readable bytes and seconds, in ASCII."""

from __future__ import annotations

import math

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float) -> str:
    """Return bytes in binary units with one decimal: 1536 -> "1.5 KiB", 0 -> "0 B"."""
    if not math.isfinite(num_bytes):
        return str(num_bytes)
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if round(size) < 1024:
        return f"{sign}{round(size)} B"
    size /= 1024
    units = iter(_BYTE_UNITS[1:])
    unit = next(units)
    # 1023.96 would print as 1024.0.
    while round(size, 1) >= 1024 and unit != _BYTE_UNITS[-1]:
        size, unit = size / 1024, next(units)
    return f"{sign}{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration with about three digits: "4 ms", "1.25 s", "48.3 s", "2 min 05 s", "1 h 02 min"."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if round(seconds * 1000) < 100:
        return f"{round(seconds * 1000)} ms"
    if round(seconds, 2) < 10:
        return f"{seconds:.2f} s"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, rest_min = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest_min:02d} min"
