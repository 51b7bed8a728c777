"""Waiting for many jobs at once: `gather`, `as_completed`, `first_completed`.

The engine is asked about a set of ids, not about each job: one call for every few thousand, which
answers with those that have ended meanwhile. Inside a job and outside it is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, cast, overload

from penstock.app.client import EngineCalls, JobHandle, Outcome, at_hand, outcome_of
from penstock.core.errors import InvalidRequest, JobEnded, WaitTimedOut
from penstock.ports.engine_api import MAX_WAITED, Ended, EngineApi
from penstock.values import ResultOf

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

_BATCH = 1_000
"""Ends after which the engine answers a caller who waits for all: so many records it holds for
him."""
_READS = 16
"""Large results that are read at the same time."""


# -- all ------------------------------------------------------------------------------------------


class GatherOptions(TypedDict, total=False):
    return_exceptions: Literal[False]
    timeout: float | None


@overload
def gather(a: JobHandle[A], /, **options: Unpack[GatherOptions]) -> tuple[A]: ...
@overload
def gather(
    a: JobHandle[A], b: JobHandle[B], /, **options: Unpack[GatherOptions]
) -> tuple[A, B]: ...
@overload
def gather(
    a: JobHandle[A], b: JobHandle[B], c: JobHandle[C], /, **options: Unpack[GatherOptions]
) -> tuple[A, B, C]: ...
@overload
def gather(
    a: JobHandle[A],
    b: JobHandle[B],
    c: JobHandle[C],
    d: JobHandle[D],
    /,
    **options: Unpack[GatherOptions],
) -> tuple[A, B, C, D]: ...
@overload
def gather(*handles: JobHandle[T], **options: Unpack[GatherOptions]) -> list[T]: ...
@overload
def gather(
    *handles: JobHandle[T], return_exceptions: Literal[True], timeout: float | None = None
) -> list[T | JobEnded]: ...
def gather(
    *handles: JobHandle[Any], return_exceptions: bool = False, timeout: float | None = None
) -> Any:
    """Wait for all of these jobs; returns what they returned, in the order of the handles.

    Raises JobFailed and its kin as soon as one of them ends without success, and the others go
    on; with `return_exceptions`, the errors stand among the results instead. Raises WaitTimedOut
    if `timeout` seconds were not enough.
    """
    if not handles:
        return []
    engine = _engine_of(handles)
    ids = _ids(handles)
    outcomes = engine.wait(
        lambda api: _outcomes(api, ids, return_exceptions, timeout), ids, on_loop=True
    )
    return _values(handles, outcomes)


@overload
async def agather(a: JobHandle[A], /, **options: Unpack[GatherOptions]) -> tuple[A]: ...
@overload
async def agather(
    a: JobHandle[A], b: JobHandle[B], /, **options: Unpack[GatherOptions]
) -> tuple[A, B]: ...
@overload
async def agather(
    a: JobHandle[A], b: JobHandle[B], c: JobHandle[C], /, **options: Unpack[GatherOptions]
) -> tuple[A, B, C]: ...
@overload
async def agather(
    a: JobHandle[A],
    b: JobHandle[B],
    c: JobHandle[C],
    d: JobHandle[D],
    /,
    **options: Unpack[GatherOptions],
) -> tuple[A, B, C, D]: ...
@overload
async def agather(*handles: JobHandle[T], **options: Unpack[GatherOptions]) -> list[T]: ...
@overload
async def agather(
    *handles: JobHandle[T], return_exceptions: Literal[True], timeout: float | None = None
) -> list[T | JobEnded]: ...
async def agather(
    *handles: JobHandle[Any], return_exceptions: bool = False, timeout: float | None = None
) -> Any:
    """`gather`, to be awaited."""
    if not handles:
        return []
    engine = _engine_of(handles)
    ids = _ids(handles)
    work = engine.await_(lambda api: _outcomes(api, ids, return_exceptions, timeout), ids)
    return _values(handles, await work)


def _values(
    handles: Sequence[JobHandle[T]], outcomes: dict[str, Outcome | JobEnded]
) -> list[T | JobEnded]:
    found: list[T | JobEnded] = []
    for handle in handles:
        outcome = outcomes[handle.job_id]
        found.append(outcome if isinstance(outcome, JobEnded) else handle._value(outcome))
    return found


async def _outcomes(
    api: EngineApi, job_ids: Sequence[str], return_exceptions: bool, timeout: float | None
) -> dict[str, Outcome | JobEnded]:
    outcomes: dict[str, Outcome | JobEnded] = {}
    batches = _ends(api, job_ids, _BATCH, not return_exceptions, timeout)
    async with aclosing(batches):
        async for batch in batches:
            large: list[Ended] = []
            for end in batch:
                try:
                    outcome = at_hand(end.job)
                except JobEnded as error:
                    if not return_exceptions:
                        raise
                    outcomes[end.job_id] = error
                else:
                    if outcome is None:
                        large.append(end)
                    else:
                        outcomes[end.job_id] = outcome
            for begin in range(0, len(large), _READS):
                some = large[begin : begin + _READS]
                read = await _all([outcome_of(api, end.job) for end in some])
                outcomes.update(zip((end.job_id for end in some), read, strict=True))
    return outcomes


# -- one after the other --------------------------------------------------------------------------


class Completed(Generic[T_co]):
    """Handles of jobs as they end, with `for` or `async for`."""

    def __init__(self, handles: Iterable[JobHandle[T_co]], timeout: float | None) -> None:
        self._handles, self._timeout = tuple(handles), timeout

    def __iter__(self) -> Iterator[JobHandle[T_co]]:
        if self._handles:
            engine = _engine_of(self._handles)
            for batch in engine.each(self._batches(engine), self._some()):
                for end in batch:
                    yield _ended(engine, end)

    async def __aiter__(self) -> AsyncIterator[JobHandle[T_co]]:
        if self._handles:
            engine = _engine_of(self._handles)
            async for batch in engine.aeach(self._batches(engine), self._some()):
                for end in batch:
                    yield _ended(engine, end)

    def _some(self) -> list[str]:
        """What a job that waits for them is said to wait for."""
        return _ids(self._handles[:3])

    def _batches(self, engine: EngineCalls) -> AsyncIterator[list[Ended]]:
        return _ends(engine.api, _ids(self._handles), 1, False, self._timeout)


def _ended(engine: EngineCalls, end: Ended) -> JobHandle[Any]:
    """A handle by the id that the caller knows, with the final record: its result is at hand."""
    handle: JobHandle[Any] = JobHandle(engine, end.job_id)
    handle._record = end.job
    return handle


def as_completed(handles: Iterable[JobHandle[T]], *, timeout: float | None = None) -> Completed[T]:
    """These jobs in the order in which they end, however they end; for `for` and `async for`.

    The order is the engine's: a job that runs again and asks again gets the same. Raises
    WaitTimedOut if not all have ended after `timeout` seconds.
    """
    return Completed(handles, timeout)


def first_completed(*handles: JobHandle[T], timeout: float | None = None) -> JobHandle[T]:
    """The one of these jobs that ended first, however it ended; waits until there is one."""
    _engine_of(handles)
    ends = iter(as_completed(handles, timeout=timeout))
    try:
        return next(ends)
    finally:
        ends.close()  # type: ignore[attr-defined]


async def afirst_completed(*handles: JobHandle[T], timeout: float | None = None) -> JobHandle[T]:
    """`first_completed`, to be awaited."""
    _engine_of(handles)
    async with aclosing(aiter(as_completed(handles, timeout=timeout))) as ends:  # type: ignore[type-var]
        return await anext(ends)


# -- passing results on ---------------------------------------------------------------------------


def value(handle: JobHandle[T]) -> T:
    """Stands for the result of a job in the arguments of another, which starts when it has ended.

    It may be an argument, or a part of one: `merge.submit([value(page) for page in pages])`.
    """
    if not hasattr(handle, "job_id"):
        raise InvalidRequest("value", f"expected JobHandle, got {type(handle).__name__}")
    return cast(T, ResultOf(handle.job_id))


# -- what both are made of ------------------------------------------------------------------------


def _ids(handles: Sequence[JobHandle[Any]]) -> list[str]:
    return list(dict.fromkeys(handle.job_id for handle in handles))


def _engine_of(handles: Sequence[JobHandle[Any]]) -> EngineCalls:
    for index, handle in enumerate(handles):
        if not hasattr(handle, "_engine"):
            got = type(handle).__name__
            raise InvalidRequest(
                f"handles[{index}]", f"expected JobHandle, got {got}", hint="gather(*handles)"
            )
    if not handles:
        raise InvalidRequest("handles", "there is no job to wait for")
    engine = handles[0]._engine
    if any(handle._engine is not engine for handle in handles):
        raise InvalidRequest("handles", "all must be of one client")
    return engine


async def _ends(
    api: EngineApi, job_ids: Sequence[str], count: int, or_failure: bool, timeout: float | None
) -> AsyncGenerator[list[Ended], None]:
    """The ends of these jobs in batches, each in the order of their ends; the last is the last."""
    groups = [job_ids[begin : begin + MAX_WAITED] for begin in range(0, len(job_ids), MAX_WAITED)]
    left = [dict.fromkeys(group) for group in groups]
    loop = asyncio.get_running_loop()
    limit = None if timeout is None else loop.time() + timeout

    async def ask(number: int) -> tuple[int, list[Ended]]:
        wanted = list(left[number])
        patience = None if limit is None else max(0.0, limit - loop.time())
        ended = await api.wait_many(
            wanted, min(count, len(wanted)), or_failure=or_failure, timeout=patience
        )
        return number, ended

    asking = {asyncio.ensure_future(ask(number)) for number in range(len(groups))}
    try:
        while asking:
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            batch: list[Ended] = []
            for answer in done:
                number, ended = answer.result()
                for end in ended:
                    del left[number][end.job_id]
                batch += ended
                if left[number] and (ended or limit is None or loop.time() < limit):
                    asking.add(asyncio.ensure_future(ask(number)))
            if len(done) > 1:
                batch.sort(key=lambda end: (end.job.finished_at or 0.0, end.job.seq))
            if batch:
                yield batch
        if more := sum(map(len, left)):
            raise WaitTimedOut(
                f"{more} of {len(job_ids)} jobs have not ended after {timeout:g} s",
                hint="they go on; wait again later, or cancel them",
            )
    finally:
        await _cancelled(asking)


async def _all(work: Sequence[Any]) -> list[Any]:
    """The results of coroutines that run together; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return [await task for task in tasks]
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
