"""Following a run to its end, and what the end means for the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from penstock.cli.exits import Exit
from penstock.cli.paper import console, print_line
from penstock.cli.pipeline_display import Board, elapsed, job_status, outcome, stage_line
from penstock.cli.place import Place
from penstock.cli.terminal import echo
from penstock.cli.words import moment, short_id, span
from penstock.core.errors import EngineUnavailable, Unavailable
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import EngineApi
from penstock.workloads.pipeline.interface import Pipelines
from penstock.workloads.pipeline.records import PipelineEvent, PipelineEventKind, PipelineRecord

_LOOK = 0.15
"""Seconds between looks at the record while a run is shown live."""
_SELDOM = 1.0
"""Seconds after which it is looked at even if nothing was heard."""
_PATIENCE = 3600.0
"""Seconds that a run in this process is waited for after it was asked to stop."""


async def follow(
    api: EngineApi, record: PipelineRecord, *, silent: bool = False, board: Board | None = None
) -> PipelineRecord:
    """Show a run until it ends; returns its final record."""
    pipelines = api.pipelines
    with _told_how_to_go_on(record.id):
        if silent:
            async for _ in pipelines.stream(record.id):
                pass
        elif sys.stdout.isatty():
            await _live(api, board or Board(record))
        else:
            await _plain(pipelines, record)
        ended = await _ended(pipelines, record.id)
    if not silent:
        _print_end(ended)
    return ended


async def print_events(api: EngineApi, record: PipelineRecord) -> PipelineRecord:
    """Its events as JSON lines until it ends."""
    with _told_how_to_go_on(record.id):
        async for event in api.pipelines.stream(record.id):
            print_line(msgspec.to_builtins(event))
        return await _ended(api.pipelines, record.id)


@contextlib.contextmanager
def _told_how_to_go_on(job_id: str) -> Iterator[None]:
    """Of an engine that does not come back."""
    try:
        yield
    except EngineUnavailable as error:
        hint = f"start it, and go on with 'penstock pipeline watch {short_id(job_id)}'"
        raise EngineUnavailable(error.message, hint=hint) from error


async def _ended(pipelines: Pipelines, job_id: str) -> PipelineRecord:
    record = await pipelines.get(job_id)
    if not record.is_final:
        raise Unavailable(
            f"the events of job {job_id} broke off while it was {record.status}",
            hint=f"go on with 'penstock pipeline watch {short_id(job_id)}'",
        )
    return record


async def _live(api: EngineApi, board: Board) -> None:
    from rich.live import Live

    news, job_id = asyncio.Event(), board.record.id
    with Live(board, console=console(), refresh_per_second=8):
        board.is_live = True
        async with _looking(api, board, news):
            async for _ in api.pipelines.stream(job_id):
                news.set()
        board.record = await api.pipelines.get(job_id)
        board.remark = board.notice = ""
        board.is_live = False


@contextlib.asynccontextmanager
async def _looking(api: EngineApi, board: Board, news: asyncio.Event) -> AsyncIterator[None]:
    """Keep the board fresh. Events say that there is something to see; how many of them come
    at once does not matter, so the past is caught up with at a glance."""

    async def look() -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 that may swallow the cancellation below.
                async with asyncio.timeout(_SELDOM):
                    await news.wait()
            news.clear()
            board.record = record = await api.pipelines.get(board.record.id)
            waits = record.status is PipelineJobStatus.PENDING
            board.remark = await api.why(record.id) if waits else ""
            await asyncio.sleep(_LOOK)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        # What keeps it from looking ends the stream as well, which tells of it.
        await asyncio.gather(task, return_exceptions=True)


async def _plain(pipelines: Pipelines, record: PipelineRecord) -> None:
    """A line when a stage begins and one when it ends."""
    echo(f"pipeline {record.pipeline}, job {record.id}")
    async for event in pipelines.stream(record.id):
        if (said := await _said(pipelines, event)) is not None:
            echo(f"{moment(event.at, time.time())}  {said}")
            sys.stdout.flush()


async def _said(pipelines: Pipelines, event: PipelineEvent) -> str | None:
    name = event.data.get("stage", "")
    if event.kind is PipelineEventKind.STAGE_START:
        return f"{name}  started"
    if event.kind is not PipelineEventKind.STAGE_COMPLETE:
        return None
    stage = (await pipelines.get(event.job_id)).stage(name)
    return None if stage is None else stage_line(stage)


def _print_end(record: PipelineRecord) -> None:
    from rich.text import Text

    ran = f" after {span(elapsed(record, time.time()))}" if record.started_at is not None else ""
    console().print(Text.assemble(f"{record.pipeline} ", job_status(record.status), ran))


async def ending(
    api: EngineApi,
    record: PipelineRecord,
    place: Place,
    *,
    strict: bool = False,
    here: bool = False,
) -> Exit:
    """Say on standard error what went wrong, and what can be done; the exit code of the end.

    `here`: the run's engine ends with this process.
    """
    status, again = record.status, f"penstock {place.spelled()}pipeline"
    for alert in record.alerts:
        echo(f"penstock: alert {alert.code}: {alert.message}", err=True)
    if status is PipelineJobStatus.COMPLETED:
        return Exit.OK
    why = outcome(record)
    echo(
        f"penstock: job {record.id} ended {status}" + (f": {why}" if why else ""),
        err=True,
    )
    for name in record.abandoned_items:
        echo(f"  abandoned: {name}", err=True)
    echo(f"  see '{again} status {short_id(record.id)}'", err=True)
    engine = ", once an engine is up" if here else ""
    echo(
        f"  run what is undone with '{again} retry-failed {short_id(record.id)}'{engine}", err=True
    )
    if status is PipelineJobStatus.FAILED:
        return _ENDS.get((await api.get(record.id)).state, Exit.FAILED)
    return code_of(status, strict=strict)


_ENDS = {JobState.DENIED: Exit.DENIED, JobState.TIMEOUT: Exit.TIMEOUT}
"""Ends of a run's job that a run knows as FAILED."""


def is_retriable(record: PipelineRecord) -> bool:
    """Whether there is something for `retry-failed` to do."""
    return record.is_final and record.status is not PipelineJobStatus.COMPLETED


def code_of(status: PipelineJobStatus, *, strict: bool = False) -> Exit:
    if status is PipelineJobStatus.CANCELLED:
        return Exit.CANCELLED
    if status is PipelineJobStatus.FAILED or (strict and status is PipelineJobStatus.PARTIAL):
        return Exit.FAILED
    return Exit.OK


def say_how_to_go_on(place: Place, job_id: str) -> None:
    again = f"penstock {place.spelled()}pipeline"
    echo(f"\npenstock: job {job_id} goes on", err=True)
    echo(f"  follow it with '{again} watch {short_id(job_id)}'", err=True)
    echo(f"  end it with '{again} cancel {short_id(job_id)}'", err=True)


_CANCELLING = "cancelling it; Ctrl-C once more leaves at once"


class Interrupts:
    """Ctrl-C while a run goes on in this process: the first cancels it, the next leaves."""

    def __init__(self, pipelines: Pipelines, board: Board) -> None:
        self._pipelines, self._board = pipelines, board
        self._cancelling: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._hear)

    async def __aexit__(self, *exc: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        if self._cancelling is not None:
            await self._cancelling

    def _hear(self) -> None:
        if self._cancelling is None:
            if self._board.is_live:
                self._board.notice = _CANCELLING
            else:
                echo(f"penstock: {_CANCELLING}", err=True)
            job_id = self._board.record.id
            work = self._pipelines.cancel(job_id, reason="Ctrl-C", timeout=_PATIENCE)
            self._cancelling = asyncio.ensure_future(work)
            return
        from penstock.cli.service import leave_at_once

        console().show_cursor(True)
        leave_at_once("stopped at once; the run is taken up at the next start")
