"""W3C trace context of jobs: which trace a job belongs to, and the ids of its spans.

Ids are derived from the job's id, so that the engine, its workers and a restarted engine name the
same spans without telling each other. A caller's `traceparent` decides the trace; without one, a
job begins a trace of its own.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from msgspec import Struct

from penstock.core.job import JobRequest, chain_of

_FORMAT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceParent(Struct, frozen=True, gc=False):
    """The header `traceparent`: a span of a trace, as hexadecimal digits."""

    trace_id: str
    span_id: str
    sampled: bool = True

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"

    @classmethod
    def parse(cls, text: str) -> TraceParent | None:
        """None for what is not valid, which receivers must ignore."""
        found = _FORMAT.fullmatch(text)
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if (
            version == "ff"
            or (version == "00" and more)
            or not (int(trace_id, 16) and int(span_id, 16))
        ):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def caller_span(request: JobRequest) -> TraceParent | None:
    """The span within which the job was submitted."""
    return TraceParent.parse(request.traceparent) if request.traceparent else None


def job_span(request: JobRequest) -> TraceParent:
    """The span of a whole job, from its acceptance to its end."""
    return _span(request, "")


def attempt_span(request: JobRequest, attempt: int) -> TraceParent:
    """The span of one attempt: what the job's own code is a child of."""
    return _span(request, f"attempt:{attempt}")


def part_span(request: JobRequest, part: str) -> TraceParent:
    """The span of a named part of a job: a wait, a stage."""
    return _span(request, f"part:{part}")


def _span(request: JobRequest, part: str) -> TraceParent:
    caller = caller_span(request)
    trace_id = caller.trace_id if caller else _digits(f"trace:{chain_of(request)}", 16)
    span_id = _digits(f"span:{request.job_id}:{part}", 8)
    return TraceParent(trace_id, span_id, caller.sampled if caller else True)


def _digits(text: str, size: int) -> str:
    return blake2b(text.encode(), digest_size=size).hexdigest()
