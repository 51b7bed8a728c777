"""Following a run to its end, and what the end means for the exit code."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.cli import pipeline_display as display
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import moment, short_id
from penstock.cli.output import console, echo, print_json, print_line, rich_text, warn
from penstock.core.errors import Unavailable
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import EngineApi
from penstock.workloads.pipeline.interface import Pipelines
from penstock.workloads.pipeline.records import PipelineEvent, PipelineEventKind, PipelineRecord

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_LOOK = 0.25
"""Seconds between reads of the record while a run is shown live."""


class Json(StrEnum):
    """What is printed as JSON: nothing, the final record, or the events."""

    NOTHING = ""
    RECORD = "record"
    EVENTS = "events"


@dataclass
class RunView:
    """The live view of a run: its latest record, drawn as of now."""

    record: PipelineRecord
    is_live: bool = False
    """Whether it is on the screen, where nothing else can be printed."""
    remark: str = ""
    """What the run waits for."""
    notice: str = ""

    def say(self, text: str) -> None:
        """Print below the live view, or on standard error without one."""
        if self.is_live:
            self.notice = text
        else:
            warn(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = time.time()
        yield display.headline(self.record, now, cut=True)
        yield from display.stage_table(self.record, now, live=True)
        for part in ((self.remark, "dim"), (self.notice, "yellow")):
            if part[0]:
                yield rich_text(part, cut=True)


async def follow(api: EngineApi, board: RunView, json: str = "") -> PipelineRecord:
    """Show a run until it ends: live on a terminal, else as lines."""
    job_id, pipelines = board.record.id, api.pipelines
    if sys.stdout.isatty() and not json:
        await _live(api, board)
    else:
        if not json:
            echo(f"pipeline {board.record.pipeline}, job {job_id}")
        async for event in pipelines.stream(job_id):
            if json == "events":
                print_line(event)
            elif not json and (line := await _line(pipelines, event)):
                echo(f"{moment(event.at, time.time())}  {line}")
                sys.stdout.flush()
    ended = await pipelines.get(job_id)
    if not ended.is_final:
        raise Unavailable(f"the events of job {job_id} broke off while it was {ended.status}")
    if json == "record":
        print_json(ended)
    elif not json:
        ran = display.elapsed(ended, time.time())
        parts = (f"{ended.pipeline} ", display.status_text(ended.status))
        console().print(rich_text(*parts, f" after {ran}" if ran else ""))
    return ended


async def _line(pipelines: Pipelines, event: PipelineEvent) -> str:
    """What a line says when a stage begins or ends; empty for other events."""
    name = event.data.get("stage", "")
    if event.kind is PipelineEventKind.STAGE_START:
        return f"{name}  started"
    if event.kind is not PipelineEventKind.STAGE_COMPLETE:
        return ""
    stage = (await pipelines.get(event.job_id)).stage(name)
    return display.stage_line(stage) if stage is not None else ""


async def _live(api: EngineApi, board: RunView) -> None:
    from rich.live import Live

    job_id = board.record.id

    async def look() -> None:
        while True:
            board.record = record = await api.pipelines.get(job_id)
            waits = record.status is PipelineJobStatus.PENDING
            board.remark = await api.why(job_id) if waits else ""
            await asyncio.sleep(_LOOK)

    with Live(board, console=console(), refresh_per_second=8):
        board.is_live, looking = True, asyncio.create_task(look())
        try:
            async for _ in api.pipelines.stream(job_id):
                pass
        finally:
            looking.cancel()
            # An error of a look ends the stream as well, which reports it.
            await asyncio.gather(looking, return_exceptions=True)
        board.record = await api.pipelines.get(job_id)
        board.remark, board.notice, board.is_live = "", "", False


async def ending(
    api: EngineApi,
    record: PipelineRecord,
    engine: EngineRef,
    *,
    strict: bool = False,
    here: bool = False,
) -> Exit:
    """Say on standard error what went wrong and what can be done; returns the exit code.

    `here`: the run's engine ends with this process.
    """
    status, name = record.status, short_id(record.id)
    for alert in record.alerts:
        warn(f"alert {alert.code}: {alert.message}")
    if status is PipelineJobStatus.COMPLETED:
        return Exit.OK
    why, later = display.outcome(record), ", once an engine is up" if here else ""
    warn(
        f"job {record.id} ended {status}" + (f": {why}" if why else ""),
        *(f"abandoned: {name}" for name in record.abandoned_items),
        f"see '{engine.command(f'pipeline status {name}')}'",
        f"run what is undone with '{engine.command(f'pipeline retry {name}')}'{later}",
    )
    if status is PipelineJobStatus.FAILED:
        return _ENDS.get((await api.get(record.id)).state, Exit.FAILED)
    if status is PipelineJobStatus.CANCELLED:
        return Exit.CANCELLED
    return Exit.FAILED if strict else Exit.OK


_ENDS = {JobState.DENIED: Exit.DENIED, JobState.TIMEOUT: Exit.TIMEOUT}
"""Ends of a job that its run calls FAILED."""
