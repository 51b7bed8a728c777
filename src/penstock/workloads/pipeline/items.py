"""One item of a stage, from its first attempt to its end.

    pace -> breaker -> call -> judge -> again, after a while, or the end

Whatever the function does, the item ends: ok, failed or skipped. Only asyncio's cancellation
of the caller passes, and then the job is not being cancelled in an orderly way.
"""

from __future__ import annotations

import asyncio
import builtins
import random
import traceback
from collections.abc import Coroutine
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.job import Cancelled
from penstock.ports.executor import CancelToken
from penstock.workloads.pipeline.breakers import DEFAULT
from penstock.workloads.pipeline.calls import Calls, CallSpec, FailedElsewhere
from penstock.workloads.pipeline.context import AsyncStageContext, RunScope, StageContext, report_of
from penstock.workloads.pipeline.definition import Stage
from penstock.workloads.pipeline.pacing import Pace, pause
from penstock.workloads.pipeline.payloads import (
    WRONG_TYPE,
    Results,
    Unfit,
    element_of,
    outputs_of,
    wants_list,
)
from penstock.workloads.pipeline.records import (
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    StageKind,
    WhenOpen,
)
from penstock.workloads.pipeline.retrying import (
    CANCELLED,
    BreakerOpen,
    Failure,
    bounded,
    judge,
    next_try,
)
from penstock.workloads.pipeline.rows import ItemReport, has_metrics, report_size

_MOST_TRACEBACKS = 20
_MAX_TRACEBACK = 8_000
_MAX_REPORT = 8_000
"""Bytes of the metrics of one item: they stand in its row."""


class ItemRunner:
    """Runs items of the stages of one job."""

    def __init__(self, scope: RunScope) -> None:
        self.scope, self.clock = scope, scope.clock
        self.calls = Calls(scope)
        self._paces: dict[str, Pace] = {}
        self._tracebacks = 0

    def perform(
        self, stage: Stage, item: ItemRecord, cancel: CancelToken
    ) -> Coroutine[Any, Any, tuple[ItemRecord, ItemReport | None]]:
        """The item as it ended, and what its last attempt reported."""
        return _Item(self, stage, item, cancel).run()

    async def close(self) -> None:
        self.calls.close()
        await self.scope.resources.close(self.scope.context)

    # -- what the attempts share --------------------------------------------------

    def pace(self, stage: Stage, rate: float) -> Pace:
        if stage.name not in self._paces:
            self._paces[stage.name] = Pace(rate, self.clock)
        return self._paces[stage.name]

    async def with_input(self, stage: Stage, item: ItemRecord, ctx: StageContext) -> CallSpec:
        if stage.info.kind is StageKind.STEP:
            return CallSpec(stage, ctx, *await self._results(stage))
        return CallSpec(stage, ctx, await self.scope.payloads.get(item.input))

    async def _results(self, stage: Stage) -> tuple[bytes | None, Any]:
        """What a step is given: results, or a list where it asks for one, or is far away."""
        info, shape = stage.info, stage.shape
        kind, scope = element_of(shape.input_type), self.scope
        far = info.mode == "process"
        if not info.of:
            return (b"[]", None) if far else (None, [])
        count = scope.output_counts.get(info.of, 0)
        if far:
            raws = [
                raw
                async for item in Results(scope.reader, info.of, count).items()
                for raw in await scope.reader.outputs(item)
            ]
            return b"[" + b",".join(map(bytes, raws)) + b"]", None
        if wants_list(shape.input_type):
            try:
                return None, await Results(scope.reader, info.of, count, kind=kind).list()
            except ValueError as problem:
                raise Unfit(WRONG_TYPE, f"{stage.name} can't take its input: {problem}") from None
        portal = None if shape.is_async else scope.portal
        return None, Results(scope.reader, info.of, count, kind=kind, portal=portal)

    def judge(self, error: BaseException) -> Failure:
        if isinstance(error, Unfit):
            return _failure(ErrorClass.PERMANENT, error.code, str(error))
        if isinstance(error, FailedElsewhere):
            return _judge_elsewhere(error)
        failure = judge(error, self.clock.now())
        if failure.error_class is not ErrorClass.CANCELLED:
            self._tell_traceback(error)
        return failure

    def _tell_traceback(self, error: BaseException) -> None:
        if self._tracebacks < _MOST_TRACEBACKS and error.__traceback__ is not None:
            self._tracebacks += 1
            try:
                text = "".join(traceback.format_exception(error))
            except Exception:
                text = f"{type(error).__name__}, whose traceback can't be shown"
            self.scope.context.log(bounded(text[-_MAX_TRACEBACK:], _MAX_TRACEBACK), level="error")


class _Item(Struct):
    """One item while it is run."""

    runner: ItemRunner
    stage: Stage
    item: ItemRecord
    token: CancelToken
    attempts: int = 0
    spent: float = 0.0
    report: ItemReport | None = None

    async def run(self) -> tuple[ItemRecord, ItemReport | None]:
        try:
            return await self._try_until_it_ends(), self.report
        except Cancelled as asked:
            return self._cancelled(str(asked)), self.report
        except asyncio.CancelledError:
            # The job is being cancelled, and this item did not end by itself.
            task = asyncio.current_task()
            if not self.token.requested or task is None:
                raise
            task.uncancel()
            return self._cancelled(self.token.reason), self.report

    async def _try_until_it_ends(self) -> ItemRecord:
        info = self.stage.info
        while True:
            self.token.raise_if_requested()
            if info.rate is not None:
                await self.runner.pace(self.stage, info.rate).turn(self.token)
            try:
                if info.breaker is None:
                    ended = await self._call()
                else:
                    ended = await self._guarded_call(info.breaker)
            except BreakerOpen as closed:
                return self._kept_out(closed)
            if isinstance(ended, ItemRecord):
                return ended
            delay = next_try(info.retry, ended, self.attempts, random.random())
            if delay is None:
                return self._failed(ended)
            await pause(self.runner.clock, delay, self.token)

    async def _guarded_call(self, breaker: str) -> ItemRecord | Failure:
        info, scope = self.stage.info, self.runner.scope
        async with scope.breakers.call(
            breaker,
            scope.pipeline.breakers.get(breaker, DEFAULT),
            when_open=info.when_open,
            cancel=self.token,
            timeout=info.timeout,
        ) as call:
            ended = await self._call()
            call.ended(None if isinstance(ended, ItemRecord) else ended)
            return ended

    async def _call(self) -> ItemRecord | Failure:
        runner, stage, item = self.runner, self.stage, self.item
        begun, scope = runner.clock.monotonic(), runner.scope
        self.attempts += 1
        timeout = stage.info.timeout
        token, forget = (self.token, None) if timeout is None else _chained(self.token)
        kind = AsyncStageContext if stage.shape.is_async else StageContext
        until = None if timeout is None else begun + timeout
        ctx = kind(scope, stage.name, item.key, self.attempts, token, until)
        spec = CallSpec(stage, ctx, None)
        try:
            if stage.shape.takes_input:
                spec = await runner.with_input(stage, item, ctx)
            ended = await runner.calls.run(spec)
            if not isinstance(ended, bytes):
                return runner.judge(ended)
            many, output = outputs_of(ended), await scope.payloads.put(ended)
        except Exception as error:  # of its input or output: what it raises itself is returned
            return runner.judge(error)
        finally:
            self.spent += runner.clock.monotonic() - begun
            report = report_of(ctx)
            self.report = None if report is not None and _is_too_large(report) else report
            if forget is not None:
                forget()
        if report is not self.report:
            return runner.judge(_too_large())
        return ItemRecord(
            seq=item.seq,
            key=item.key,
            input=item.input,
            outcome=ItemOutcome.OK,
            output=output,
            output_count=1 if many is None else len(many),
            attempts=self.attempts,
            error="" if self.report is None else bounded("; ".join(self.report.errors)),
            duration_ms=self.spent * 1000,
            finished_at=runner.clock.now(),
        )

    def _failed(self, failure: Failure) -> ItemRecord:
        return replace(
            self.item,
            outcome=ItemOutcome.FAILED,
            attempts=self.attempts,
            error_class=failure.error_class,
            error_code=failure.code,
            error=failure.message,
            duration_ms=self.spent * 1000,
            finished_at=self.runner.clock.now(),
        )

    def _cancelled(self, reason: str) -> ItemRecord:
        return self._failed(_failure(ErrorClass.CANCELLED, CANCELLED, reason))

    def _kept_out(self, closed: BreakerOpen) -> ItemRecord:
        ended = self._failed(judge(closed))
        if closed.when_open is WhenOpen.SKIP:
            return replace(ended, outcome=ItemOutcome.SKIPPED, error_class=None)
        return ended


def _is_too_large(report: ItemReport) -> bool:
    return has_metrics(report) and report_size(report) > _MAX_REPORT


def _too_large() -> Unfit:
    return Unfit(
        "REPORT_TOO_LARGE", f"its metrics take more than {_MAX_REPORT:,} bytes: count less"
    )


def check_report(report: ItemReport | None) -> None:
    """Raise Unfit for metrics that a row has no room for."""
    if report is not None and _is_too_large(report):
        raise _too_large()


def _chained(token: CancelToken) -> tuple[CancelToken, Any]:
    """A token of its own for a call that may run out of time; asked when the other one is."""
    own = CancelToken()
    return own, token.when_requested(lambda: own.request(token.reason))


def _failure(error_class: ErrorClass, code: str, message: str) -> Failure:
    return Failure(error_class=error_class, code=code, message=bounded(message))


def _judge_elsewhere(error: FailedElsewhere) -> Failure:
    """By the classes that the other process named, as far as this one knows them."""
    named = (getattr(builtins, kind, None) for kind in error.kinds)
    known = next((k for k in named if isinstance(k, type) and issubclass(k, Exception)), None)
    error_class = ErrorClass.PERMANENT if error.in_vain else ErrorClass.TRANSIENT
    if known is not None and known is not Exception:
        error_class = judge(known.__new__(known)).error_class
    return Failure(
        error_class=error_class,
        code=error.code,
        message=bounded(str(error)),
        kinds=error.kinds,
        retry_after=error.retry_after,
    )
