"""The job that is running here, for code that was not handed its Context.

A context variable holds it, so that it is right in tasks, in threads of ours, and in
whatever a job awaits.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from hashlib import blake2b
from heapq import heappop, heappush
from weakref import WeakKeyDictionary

from penstock.core.errors import JobEnded, Misconfigured
from penstock.core.job import child_key
from penstock.ports.executor import Context, WaitContext

running: ContextVar[Context | None] = ContextVar("penstock_job", default=None)


def current() -> Context:
    """The Context of the job that is running here."""
    ctx = running.get()
    if ctx is None:
        raise Misconfigured(
            "no job is running here",
            hint="penstock.current() works inside a job, and not in threads it starts by itself",
        )
    return ctx


def current_span() -> str | None:
    """The `traceparent` of the OpenTelemetry span that is current here, if the program has one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"


_UNTRACED = nullcontext()


def traced(ctx: Context) -> AbstractContextManager[None]:
    """Spans that the program begins within are children of the attempt's span."""
    return _traced(ctx) if "opentelemetry.trace" in sys.modules else _UNTRACED


@contextmanager
def _traced(ctx: Context) -> Generator[None]:
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = context.attach(
        TraceContextTextMapPropagator().extract({"traceparent": ctx.traceparent})
    )
    try:
        yield
    finally:
        context.detach(token)


def is_being_cancelled() -> bool:
    """Whether a CancelledError is meant for this task, and not raised by a job's own code."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def waiting(jobs: Sequence[str]) -> Generator[None]:
    """Inside a job: hold no slot while its thread waits for these jobs.

    A wait that is broken off, as by a timeout, does not wait for a slot: the jobs may have it.
    """
    waits = _waits()
    if waits is None or asyncio._get_running_loop() is not None:
        yield
        return
    waits.begin(jobs)
    try:
        yield
    except JobEnded:
        waits.end_sync(jobs)
        raise
    except BaseException:
        waits.leave(jobs)
        raise
    waits.end_sync(jobs)


@asynccontextmanager
async def awaiting(jobs: Sequence[str]) -> AsyncIterator[None]:
    """Inside a job: hold no slot while its code awaits these jobs."""
    waits = _waits()
    if waits is None:
        yield
        return
    waits.begin(jobs)
    try:
        yield
    except JobEnded:
        await waits.end(jobs)
        raise
    except BaseException:
        waits.leave(jobs)
        raise
    await waits.end(jobs)


def _waits() -> WaitContext | None:
    ctx = running.get()
    return None if ctx is None else getattr(ctx, "waits", None)


class ChildKeys:
    """The keys of what one attempt submits.

    An attempt that runs again after its worker was lost asks for the same work, in whatever
    order, and gets the same keys: those of equal work are numbered, and equal children are
    interchangeable. A number whose submission failed is used again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[bytes, int] = {}
        self._unused: dict[bytes, list[int]] = {}

    def take(self, chain: str, topic: str, payload: bytes) -> str:
        digest = blake2b(f"{topic}\0".encode() + payload, digest_size=16).digest()
        with self._lock:
            if unused := self._unused.get(digest):
                number = heappop(unused)
            else:
                number = self._last[digest] = self._last.get(digest, 0) + 1
        return child_key(chain, digest, number)

    def give_back(self, key: str) -> None:
        """The submission under this key failed, or nobody knows: it is asked for again."""
        _, digest, number = key.rsplit(":", 2)
        with self._lock:
            heappush(self._unused.setdefault(bytes.fromhex(digest), []), int(number))


_child_keys: WeakKeyDictionary[Context, ChildKeys] = WeakKeyDictionary()


def child_keys(ctx: Context) -> ChildKeys:
    """Those of the attempt that this is the context of, or of a part of it."""
    ctx = getattr(ctx, "attempt_context", ctx)
    keys = _child_keys.get(ctx)
    return _child_keys.setdefault(ctx, ChildKeys()) if keys is None else keys
