"""Bytes, for people."""

from __future__ import annotations

UNITS = ("bytes", "KiB", "MiB", "GiB")


def size(count: float) -> str:
    """Return a number of bytes in words: 512 bytes, 1.5 KiB, 13.2 GiB."""
    number = float(count)
    for unit in UNITS:
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
