"""Durations, sizes and rates as people write them. Each refusal says what to write."""

from __future__ import annotations

import re

from penstock.core.verdict import Rate

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_BYTES = _DECIMAL | _BINARY
_NUMBER_AND_UNIT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]+)", re.ASCII)
_RATE = re.compile(r"(\d{1,9})\s*/\s*(\d{1,15}(?:\.\d{1,9})?)?\s*([a-z]+)", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds. Raises ValueError."""
    found = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if found is None or found[2] not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration; write 500ms, 30s, 10m, 2h, 7d or 1w")
    return float(found[1]) * _SECONDS[found[2]]


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError."""
    found = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if found is None or found[2].lower() not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write 64KiB, 512MiB, 2GiB or 500MB")
    return round(float(found[1]) * _BYTES[found[2].lower()])


def parse_rate(text: str) -> Rate:
    """So many in a time, as `10/m` or `5/30s`. Raises ValueError."""
    found = _RATE.fullmatch(text.strip())
    if found is None or found[3] not in _SECONDS:
        raise ValueError(f"{text!r} is not a rate; write 10/s, 10/m, 10/h, 10/d or 5/30s")
    rate = Rate(int(found[1]), float(found[2] or 1) * _SECONDS[found[3]])
    if not rate.count or not rate.per:
        raise ValueError(f"{text!r} lets nothing through, or everything; both numbers are above 0")
    return rate


def say_duration(seconds: float) -> str:
    """As `parse_duration` reads it, in the largest unit that fits."""
    unit = next((u for u in ("d", "h", "m") if seconds and not seconds % _SECONDS[u]), "s")
    return f"{seconds / _SECONDS[unit]:.12g}{unit}"


def say_size(count: int) -> str:
    """As `parse_size` reads it, in the largest unit that fits."""
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if not count % _BYTES[u.lower()]), "B")
    return f"{count // _BYTES[unit.lower()]}{unit}"
