"""Times, sizes, counts and ids in few characters. Pure."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.job import Job
    from penstock.ports.engine_api import JobTotal

SHORT = 8
"""Characters of a generated id that are shown: its end, as ids made in turn begin alike."""

_GENERATED = re.compile(r"[0-9a-hjkmnp-tv-z]{26}")


class Whole(str):
    """A cell of a table that is never cut short."""

    __slots__ = ()


class Number(Whole):
    """One that is aligned to the right."""

    __slots__ = ()


def short_id(job_id: str) -> str:
    """The end of a generated id, which is enough to name it; other ids as they are."""
    return job_id[-SHORT:] if _GENERATED.fullmatch(job_id) else job_id


def span(seconds: float) -> Number:
    """A duration: 0.4 ms, 312 ms, 4.2 s, 3m 12s, 5h 03m, 12d 4h."""
    if seconds < 0.01:
        return Number(f"{max(0.0, seconds) * 1000:.1f} ms")
    if seconds < 1:
        return Number(f"{seconds * 1000:.0f} ms")
    if seconds < 10:
        return Number(f"{seconds:.1f} s")
    whole = round(seconds)
    if whole < 60:
        return Number(f"{whole} s")
    if whole < 3600:
        return Number(f"{whole // 60}m {whole % 60:02}s")
    if whole < 86_400:
        return Number(f"{whole // 3600}h {whole % 3600 // 60:02}m")
    return Number(f"{whole // 86_400}d {whole % 86_400 // 3600}h")


def run_time(job: Job, now: float) -> Number | None:
    """How long a job that was started ran, or has been running; as its worker measured it."""
    if job.started_at is None:
        return None
    if job.result is not None and job.result.execution_ms is not None:
        return span(job.result.execution_ms / 1000)
    return span((job.finished_at or now) - job.started_at)


def moment(at: float, now: float) -> Whole:
    """A time: of day if it is today's, with its date if not."""
    then, today = dt.datetime.fromtimestamp(at), dt.datetime.fromtimestamp(now)
    if then.date() == today.date():
        return Whole(f"{then:%H:%M:%S}.{then.microsecond // 1000:03}")
    return Whole(f"{then:%Y-%m-%d %H:%M:%S}")


def size(count: float) -> Number:
    """Bytes: 0 B, 900 B, 1.5 KiB, 270.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return Number(f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}")
        count /= 1024
    return Number(f"{count:.1f} TiB")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def total(found: JobTotal) -> str:
    """How many jobs there are."""
    return f"{'' if found.exact else 'at least '}{plural(found.count, 'job')}"


def pairs(given: Mapping[str, str]) -> str:
    """Labels and the like: a=1 b=2."""
    return " ".join(f"{key}={value}" for key, value in sorted(given.items()))


def layers(text: str) -> str:
    """Layers of a model: `layer 0` for 0-0, `layers 1-14`; what is no range as it is."""
    first, dash, last = text.partition("-")
    if not first.isdecimal():
        return text
    return f"layer {first}" if not dash or first == last else f"layers {text}"
