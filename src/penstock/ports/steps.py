"""`ctx.step`: pieces of work whose results are kept as checkpoints.

An attempt that follows one whose worker was lost gets the results back, and the failures. A retry
gets the results of the try before it: they are copied to it, so that the next one finds them too.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import typing
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, overload

from msgspec.structs import replace

from penstock import values
from penstock.core.errors import InvalidRequest, PenstockError, StepFailed
from penstock.core.job import Cancelled, JobRequest, Retry
from penstock.core.ledger import Step
from penstock.core.trace import attempt_span

P = ParamSpec("P")
T = TypeVar("T")
Place = tuple[str, int]

_PREFIX = "step:"
_BEFORE: Place = (_PREFIX, 0)
"""Where its rows begin, in the order of names."""
_MAX_NAME = 150
_MAX_ERROR = 4000
_OK, _FAILED = "ok", "failed"


class _Memory:
    """What is kept of one job's steps, as far as this attempt knows."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.rows: dict[Place, Step] | None = None
        self.lock = threading.Lock()
        self.async_lock = asyncio.Lock()

    def place(self, name: str) -> Place:
        with self.lock:
            self.numbers[name] += 1
            return (_PREFIX + name, self.numbers[name])


class RunsSteps:
    """The part of a Context that runs steps."""

    attempt: Any
    request: Any

    @property
    def traceparent(self) -> str:
        """W3C trace context of this attempt, for calls to other systems."""
        return str(attempt_span(self.request, self.attempt))

    if typing.TYPE_CHECKING:

        async def checkpoint(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None: ...
        def checkpoint_sync(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None: ...
        def steps(
            self, name: str | None = None, *, after: Place | None = None, previous: bool = False
        ) -> AsyncIterator[Step]: ...
        def steps_sync(
            self, name: str | None = None, *, after: Place | None = None, previous: bool = False
        ) -> Iterator[Step]: ...

    @overload
    def step(
        self,
        name: str,
        fn: Callable[P, Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def step(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `fn`, or give back what it returned in an earlier attempt or try of this job."""
        if not 0 < len(name) <= _MAX_NAME:
            raise InvalidRequest("name", f"must be text of 1 to {_MAX_NAME} characters")
        if not inspect.iscoroutinefunction(fn) and asyncio._get_running_loop() is not None:
            raise InvalidRequest(
                "fn",
                f"step {name!r} is a plain function in async code and would block the event loop",
                hint="make it 'async def', or use 'await asyncio.to_thread(ctx.step, name, fn)'",
            )
        memory: _Memory = self.__dict__.setdefault("_memory", _Memory())
        place = memory.place(name)
        if inspect.iscoroutinefunction(fn):
            return self._run_async(memory, place, fn, args, kwargs)
        return self._run_sync(memory, place, fn, args, kwargs)

    def _run_sync(
        self, memory: _Memory, place: Place, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if memory.rows is None:
            with memory.lock:
                if memory.rows is None:
                    own = _named(self.steps_sync(after=_BEFORE) if self.attempt > 1 else ())
                    before = (
                        self.steps_sync(after=_BEFORE, previous=True) if self._is_retry() else ()
                    )
                    inherited = _inherited(own, _named(before))
                    if inherited:
                        self.checkpoint_sync(inherited)
                    memory.rows = _by_place([*own, *inherited])
        row = memory.rows.get(place)
        if row is None:
            try:
                row = _success(place, fn(*args, **kwargs))
            except Exception as error:
                if (failure := _failure(place, error)) is not None:
                    with suppress(PenstockError):
                        self.checkpoint_sync([failure])
                raise
            self.checkpoint_sync([row])
        return _value(row, fn)

    async def _run_async(
        self, memory: _Memory, place: Place, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if memory.rows is None:
            async with memory.async_lock:
                if memory.rows is None:
                    own = await _anamed(self.steps(after=_BEFORE)) if self.attempt > 1 else []
                    before: list[Step] = []
                    if self._is_retry():
                        before = await _anamed(self.steps(after=_BEFORE, previous=True))
                    inherited = _inherited(own, before)
                    if inherited:
                        await self.checkpoint(inherited)
                    memory.rows = _by_place([*own, *inherited])
        row = memory.rows.get(place)
        if row is None:
            try:
                row = _success(place, await fn(*args, **kwargs))
            except Exception as error:
                if (failure := _failure(place, error)) is not None:
                    with suppress(PenstockError):
                        await self.checkpoint([failure])
                raise
            await self.checkpoint([row])
        return _value(row, fn)

    def _is_retry(self) -> bool:
        request: JobRequest = self.request
        return request.first_try is not None


def _named(rows: Iterable[Step]) -> list[Step]:
    found: list[Step] = []
    for row in rows:
        if not row.name.startswith(_PREFIX):
            break
        found.append(row)
    return found


async def _anamed(rows: AsyncIterator[Step]) -> list[Step]:
    found: list[Step] = []
    async for row in rows:
        if not row.name.startswith(_PREFIX):
            break
        found.append(row)
    return found


def _by_place(rows: Iterable[Step]) -> dict[Place, Step]:
    return {(row.name, row.n): row for row in rows}


def _inherited(own: Iterable[Step], before: Iterable[Step]) -> list[Step]:
    """The results of the try before, as far as this one does not have them."""
    known = _by_place(own)
    return [
        replace(row, at=0.0)
        for row in before
        if row.outcome == _OK and (row.name, row.n) not in known
    ]


def _success(place: Place, value: Any) -> Step:
    name, n = place
    output = values.encode(value, f"the result of step {name.removeprefix(_PREFIX)!r}").decode()
    return Step(name, n, outcome=_OK, output=output)


def _failure(place: Place, error: Exception) -> Step | None:
    if isinstance(error, Cancelled | Retry | StepFailed):
        return None
    said = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
    return Step(*place, outcome=_FAILED, error=said[:_MAX_ERROR])


def _value(row: Step, fn: Callable[..., Any]) -> Any:
    name = row.name.removeprefix(_PREFIX)
    if row.outcome != _OK:
        raise StepFailed(f"step {name!r} failed in attempt {row.attempt}: {row.error}")
    reader = values.PLAIN
    with suppress(Exception):  # a name that can't be resolved, or a type that can't be read
        kind = typing.get_type_hints(fn).get("return", Any)
        reader = values.PLAIN if kind in (Any, type(None)) else values.Reader(kind)
    return reader.read(row.output.encode(), field=f"the result of step {name!r}")
