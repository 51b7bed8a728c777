"""One stage of one run: its items are listed, and then run concurrently.

The items of a map stage come from a field of the config, from the outputs of a stage before, or
from a function of (config, ctx). They are read in pages; nothing here holds them all.

A stage can be halted at any time. Then no new item begins; those that run are asked to stop,
async ones are cancelled a moment later, processes are killed, and what does not stop within the
grace time is left and reported.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.core.job import Cancelled
from penstock.ports.executor import CancelToken
from penstock.workloads.pipeline.context import AsyncStageContext, StageContext, report_of
from penstock.workloads.pipeline.definition import Stage
from penstock.workloads.pipeline.distributed import DistributedItems
from penstock.workloads.pipeline.items import ItemRunner, check_report
from penstock.workloads.pipeline.pacing import pause, release
from penstock.workloads.pipeline.payloads import WRONG_TYPE, Unfit, encode, outputs_of
from penstock.workloads.pipeline.records import ErrorClass, ItemOutcome, ItemRecord, StageKind
from penstock.workloads.pipeline.retrying import TIMEOUT, bounded
from penstock.workloads.pipeline.reuse import DUPLICATES, Reuse
from penstock.workloads.pipeline.rows import ItemReport
from penstock.workloads.pipeline.run_log import RunLog, report_from, with_report

_MAX_KEY = 256
_decode = msgspec.json.Decoder().decode
_MOMENT = 0.25
"""Seconds that an async item has to stop by itself before it is cancelled, at most."""


class StageFailed(Exception):
    """A stage that can't be run, or not to its end."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Lister:
    """Lists the items of one map stage. Their `seq` is set by the caller."""

    def __init__(self, runner: ItemRunner, stage: Stage, cancel: CancelToken) -> None:
        self._runner, self._stage, self._cancel = runner, stage, cancel
        self._payloads, self._page = runner.scope.payloads, runner.scope.options.page
        self._ctx: StageContext | None = None

    @property
    def report(self) -> ItemReport | None:
        """What a source function reported. Raises StageFailed for too much."""
        report = None if self._ctx is None else report_of(self._ctx)
        try:
            check_report(report)
        except Unfit as problem:
            raise StageFailed(problem.code, str(problem)) from None
        return report

    async def pages(self) -> AsyncIterator[list[ItemRecord]]:
        """Raises StageFailed where the source is to blame."""
        page: list[ItemRecord] = []
        kind, _, name = self._stage.info.over.partition(":")
        async for item in self._outputs_of(name) if kind == "stage" else self._from_values(name):
            page.append(item)
            if len(page) >= self._page:
                yield page
                page = []
        if page:
            yield page

    # -- from a stage -------------------------------------------------------------

    async def _outputs_of(self, upstream: str) -> AsyncIterator[ItemRecord]:
        after, reader = -1, self._runner.scope.reader
        while page := await reader.items(upstream, after):
            for item in page:
                data = await self._payloads.get(item.output)
                many = outputs_of(data)
                if many is None:
                    yield self._item(item.key, item.output, data)
                    continue
                for index, raw in enumerate(many):
                    one = bytes(raw)
                    pointer = await self._payloads.put(one)
                    yield self._item(f"{item.key}/{index}", pointer, one)
            after = page[-1].seq

    # -- from values --------------------------------------------------------------

    async def _from_values(self, field: str) -> AsyncIterator[ItemRecord]:
        index = 0
        async for value in self._values(field):
            try:
                data = encode(value)
                yield self._item(str(index), await self._payloads.put(data), data)
            except Unfit as problem:
                yield _unfit(str(index), problem)
            index += 1

    async def _values(self, field: str) -> AsyncIterator[Any]:
        """What its source gives; without one, what is in the field of the config."""
        config, source = self._runner.scope.config, self._stage.source
        if source is None:
            is_dict = isinstance(config, Mapping)
            found = config.get(field) if is_dict else getattr(config, field, None)
            for value in self._iterable(found, f"config.{field}"):
                yield value
            return
        try:
            async for value in self._asked(source):
                yield value
        except (StageFailed, Cancelled, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise StageFailed(type(error).__name__, f"its source failed: {error}") from error

    async def _asked(self, source: Any) -> AsyncIterator[Any]:
        if inspect.isasyncgenfunction(source):
            async for value in source(**self._arguments(source, is_async=True)):
                yield value
            return
        if inspect.iscoroutinefunction(source):
            found = await source(**self._arguments(source, is_async=True))
            if hasattr(found, "__aiter__"):
                async for value in found:
                    yield value
                return
            for value in self._iterable(found, self._stage.info.over):
                yield value
            return
        calls = self._runner.calls
        name = f"{self._stage.name}/(its source)"
        arguments = self._arguments(source, is_async=False)
        iterator = await calls.in_thread(
            name, lambda: iter(self._iterable(source(**arguments), self._stage.info.over))
        )
        while values := await calls.in_thread(name, lambda: list(islice(iterator, self._page))):
            for value in values:
                yield value

    def _arguments(self, source: Any, *, is_async: bool) -> dict[str, Any]:
        """A source takes the config, and ctx if it likes, or less."""
        names = list(inspect.signature(source).parameters)
        kind = AsyncStageContext if is_async else StageContext
        self._ctx = kind(self._runner.scope, self._stage.name, "", 1, self._cancel)
        given: dict[str, Any] = {name: self._ctx for name in names if name == "ctx"}
        for name in [name for name in names if name != "ctx"][:1]:
            given[name] = self._runner.scope.config
        return given

    def _iterable(self, found: Any, where: str) -> Iterable[Any]:
        if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
            kind = type(found).__name__
            raise StageFailed(WRONG_TYPE, f"{where} gave {kind}, which is not a list of items")
        return found

    # -- keys ---------------------------------------------------------------------

    def _item(self, key: str, pointer: str, data: bytes) -> ItemRecord:
        if self._stage.key is not None:
            key = self._own_key(data)
        return ItemRecord(seq=0, key=key, input=pointer)

    def _own_key(self, data: bytes) -> str:
        assert self._stage.key is not None
        try:
            value = self._stage.codec.input(data)
        except Unfit:
            value = _decode(data)  # the item will fail by itself; its key need not
        try:
            return short_key(str(self._stage.key(value)))
        except Exception as error:
            raise StageFailed(
                type(error).__name__, f"its key function failed on {data[:200]!r}: {error}"
            ) from error


def short_key(key: str) -> str:
    """A key that can be stored; a long one ends in a digest."""
    key = bounded(key, 1 << 20)
    if len(key) <= _MAX_KEY:
        return key
    return f"{key[: _MAX_KEY - 33]}~{sha256(key.encode()).hexdigest()[:32]}"


def _unfit(key: str, problem: Unfit) -> ItemRecord:
    """An item that can't be stored fails, and nothing else does."""
    return ItemRecord(
        seq=0,
        key=key,
        outcome=ItemOutcome.FAILED,
        error_class=ErrorClass.PERMANENT,
        error_code=problem.code,
        error=bounded(str(problem)),
    )


class Stop(StrEnum):
    """Why a run, or one stage of it, is ended before its time."""

    CANCEL = "cancel"
    """The run ends CANCELLED, once its work has stopped: what ran counts as cancelled."""
    FAIL = "fail"
    """The run ends FAILED, with the reason: what ran counts as cancelled."""
    INTERRUPT = "interrupt"
    """Its worker stops. The run stays RUNNING: what ran will be run again by another attempt."""
    LOST = "lost"
    """Nothing can be written any more. The job may be begun elsewhere as soon as it is left, so
    threads, which can't be stopped, are waited for."""
    TIMEOUT = "timeout"
    """The time of the stage is up: what has not ended has failed."""


_CANCELS = (Stop.CANCEL, Stop.FAIL)


class StageRun:
    """Runs the items of one stage."""

    def __init__(
        self,
        stage: Stage,
        runner: ItemRunner,
        log: RunLog,
        distributed: DistributedItems | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        self._stage, self._runner, self._log = stage, runner, log
        scope = runner.scope
        self._rows, self._clock, self._page_size = scope.rows, scope.clock, scope.options.page
        self._distributed = distributed if stage.info.distributed else None
        self._reuse, self._grace = reuse, scope.pipeline.cancel_grace
        self.output = ""
        """Where the output of the item that ended last is."""
        self._token = CancelToken()
        self.halted: Stop | None = None
        self._driven: asyncio.Future[None] | None = None
        """What is waited for: done when the work is, or when the stage is halted or hurried."""
        self._is_hurried = False
        is_step = stage.info.kind is StageKind.STEP
        self._page = deque([ItemRecord(seq=0, key="")] if is_step else ())
        self._after, self._drained = -1, is_step
        self._turn = asyncio.Lock()
        self._at: dict[asyncio.Task[Any], ItemRecord] = {}
        self._over = False

    async def run(self) -> None:
        """Run what has not ended. Raises StageFailed where it can't be listed."""
        limit = self._stage.info.stage_timeout
        alarm = None if limit is None else asyncio.ensure_future(self._ring(limit))
        try:
            listed = self._log.known[self._stage.name].listed
            if self._stage.info.kind is StageKind.MAP and not listed:
                await self._drive([self._list()], "async")
            if self.halted is None:
                mode = "async" if self._distributed is not None else self._stage.info.mode
                stage, scope = self._log.known[self._stage.name], self._runner.scope
                width = min(self._stage.concurrency(scope.config), stage.total - stage.done)
                await self._drive([self._work() for _ in range(width)], mode)
            if self.halted is Stop.TIMEOUT:
                await self._end_the_rest()
        finally:
            self._over = True
            if alarm is not None:
                alarm.cancel()

    def halt(self, why: Stop, reason: str) -> None:
        """End it; the first reason counts."""
        if self.halted is None:
            self.halted = why
            self._token.request(reason)
            self._wait_no_longer()

    def hurry(self) -> None:
        """Wait for nothing any more that was asked to stop."""
        self._is_hurried = True
        self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        if self._driven is not None:
            release((self._driven,))

    # -- listing ------------------------------------------------------------------

    async def _list(self) -> None:
        name, log = self._stage.name, self._log
        lister = Lister(self._runner, self._stage, self._token)
        again, pages = self._reuse, lister.pages()
        if again is not None and (copied := await again.listing(self._stage)) is not None:
            pages = copied
        seen = seq = 0
        keys: set[str] | None = None if self._stage.key is None else set()
        async for page in pages:
            self._token.raise_if_requested()
            seen += len(page)
            items = [replace(item, seq=n) for n, item in enumerate(_fresh(page, keys), seq)]
            if again is not None:
                items = await again.taken_over(self._stage, items)
            log.list(name, items)
            seq += len(items)
            await log.commit()
        stage, report = log.known[name], lister.report or ItemReport({}, {}, [])
        if seen > stage.total:
            report.fixed[DUPLICATES] = seen - stage.total
        before = {} if again is None or not stage.reused else again.counted(self._stage)
        log.end_list(name, report_from(with_report(before, report), report.errors))

    # -- running ------------------------------------------------------------------

    async def _work(self) -> None:
        """Run one item after the other, until there are none."""
        task, stage, log = asyncio.current_task(), self._stage, self._log
        assert task is not None
        perform, is_map = self._runner.perform, stage.info.kind is StageKind.MAP
        try:
            while self.halted is None:
                if not self._page and not await self._more():
                    return
                self._at[task] = item = self._page.popleft()
                if self._distributed is None:
                    ended, report = await perform(stage, item, self._token)
                else:
                    ended, report = await self._distributed.run(
                        stage, log.known[stage.name], item, self._runner.scope.output_counts
                    )
                self.output = ended.output
                if (kept := self._kept(ended)) is not None:
                    log.end(stage.name, kept, report if kept is ended else None)
                    if is_map:  # a step's end is written with its stage's
                        log.wake()
                    if log.is_full:
                        await log.commit()
        finally:
            self._at.pop(task, None)

    async def _more(self) -> bool:
        """Read the next page of items; whether there are any."""
        async with self._turn:
            if not self._page and not self._drained:
                page = await self._pending(self._after)
                self._drained = len(page) < self._page_size
                if page:
                    self._after = page[-1].seq
                    self._page.extend(page)
        return bool(self._page)

    async def _pending(self, after: int) -> list[ItemRecord]:
        """A page of the items that have not ended."""
        stage, outcomes = self._log.known[self._stage.name], (ItemOutcome.PENDING,)
        return await self._rows.items(stage, after=after, limit=self._page_size, outcomes=outcomes)

    def _kept(self, ended: ItemRecord) -> ItemRecord | None:
        """What is written of an item that ended, maybe while the stage was being halted."""
        if self.halted is None:
            return ended
        if self._over:
            return None
        if ended.error_class is not ErrorClass.CANCELLED:
            return ended
        if self.halted is Stop.TIMEOUT:
            return self._too_late(ended)
        return ended if self.halted in _CANCELS and ended.attempts else None

    async def _end_the_rest(self) -> None:
        """What a stage that ran out of time did not get to."""
        name, after = self._stage.name, -1
        await self._log.commit()
        while page := await self._pending(after):
            after = page[-1].seq
            for item in page:
                self._log.end(name, self._too_late(item))
            await self._log.commit()

    def _too_late(self, item: ItemRecord) -> ItemRecord:
        return replace(
            item,
            outcome=ItemOutcome.FAILED,
            error_class=ErrorClass.TIMEOUT,
            error_code=TIMEOUT,
            error=f"its stage took longer than {self._stage.info.stage_timeout:g} s",
            finished_at=self._clock.now(),
        )

    # -- halting ------------------------------------------------------------------

    async def _ring(self, limit: float) -> None:
        await self._clock.sleep(limit)
        self.halt(Stop.TIMEOUT, f"the stage took longer than {limit:g} s")

    async def _drive(self, work: Sequence[Coroutine[Any, Any, None]], mode: str) -> None:
        """Have the work done, all of it at once, or until the stage is halted."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(one) for one in work]
        if not tasks:
            return
        self._driven = _all_done(tasks)
        if self.halted is not None:
            self._driven.set_result(None)
        try:
            await self._driven
            if self.halted is not None and not all(task.done() for task in tasks):
                await self._wind_down(tasks, mode)
        finally:
            _cancel(tasks)
        if (error := _error_of(tasks)) is not None:
            self._token.request(str(error))
            await self._ended_within(tasks, self._grace)
            if self.halted is None or not isinstance(error, Cancelled):
                raise error

    async def _wind_down(self, tasks: Sequence[asyncio.Task[None]], mode: str) -> None:
        if self._distributed is not None and self.halted not in (Stop.INTERRUPT, Stop.LOST):
            await self._distributed.stop(self._stage, self._token.reason)
        rest = self._grace
        if self.halted in _CANCELS:
            moment = min(rest / 2, _MOMENT)
            rest -= moment
            await self._ended_within(tasks, moment)
        if mode != "thread":
            _cancel(tasks)
        if mode == "process":  # they are killed, and so end soon
            if alive := [task for task in tasks if not task.done()]:
                await _all_done(alive)
        else:
            is_lost = mode == "thread" and self.halted is Stop.LOST
            await self._ended_within(tasks, None if is_lost else rest)
        for task in tasks:
            if not task.done() and (item := self._at.get(task)) is not None:
                self._runner.calls.leave(f"{self._stage.name}/{item.key}", task.done)
        _cancel(tasks)
        for _ in range(3):  # a task that waits for a thread lets go of it at once
            await asyncio.sleep(0)

    async def _ended_within(
        self, tasks: Sequence[asyncio.Task[None]], seconds: float | None
    ) -> None:
        """Wait for them so long; None: as long as they take. Nobody waits once it is hurried."""
        alive = [task for task in tasks if not task.done()]
        if not alive or self._is_hurried or (seconds is not None and seconds <= 0):
            return
        self._driven = _all_done(alive)
        await pause(self._clock, seconds, wake=self._driven)


def _fresh(page: list[ItemRecord], keys: set[str] | None) -> list[ItemRecord]:
    """The items whose keys are new; without `keys`, all of them are."""
    if keys is None:
        return page
    fresh = []
    for item in page:
        if item.key not in keys:
            keys.add(item.key)
            fresh.append(item)
    return fresh


def _all_done(tasks: Sequence[asyncio.Task[None]]) -> asyncio.Future[None]:
    """Done when all are, or one has failed."""
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = len(tasks)

    def one_less(task: asyncio.Task[None]) -> None:
        nonlocal left
        left -= 1
        has_failed = not task.cancelled() and task.exception() is not None
        if (has_failed or left == 0) and not finished.done():
            finished.set_result(None)

    for task in tasks:
        task.add_done_callback(one_less)
    return finished


def _error_of(tasks: Sequence[asyncio.Task[None]]) -> BaseException | None:
    """What the first of them that failed raised."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            return error
    return None


def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
