"""Pipelines, their runs, items and breakers as text: tables, pages, and a run shown to its end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from penstock.cli.engine import EngineRef
from penstock.cli.exits import ENDS, Exit
from penstock.cli.formats import Number, moment, plural, short_id, span
from penstock.cli.output import (
    STYLES,
    JobId,
    Listing,
    Row,
    Wrapped,
    console,
    echo,
    facts,
    print_json,
    print_line,
    rich_text,
    styled,
    warn,
)
from penstock.core.errors import Unavailable
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import EngineApi
from penstock.workloads.pipeline.interface import Pipelines
from penstock.workloads.pipeline.records import (
    AlertRule,
    Breaker,
    BreakerState,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineInfo,
    PipelineRecord,
    StageInfo,
    StageKind,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.run_config import ConfigField, config_fields

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

_BAR = 12


def status_text(status: StrEnum) -> Text:
    """The status of a run, stage, item or breaker in its colour."""
    return styled(status, status.value.replace("_", " "))


def _number(count: int) -> Number:
    return Number(f"{count:,}" if count else "")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


# -- stages of a run -------------------------------------------------------------


def stage_cells(stage: StageRecord, now: float) -> dict[str, str | Text]:
    """What is shown of a stage, by column; of one that was skipped, that and why."""
    note = rich_text((_why(stage), "dim"))
    cells: dict[str, str | Text] = {
        "STAGE": f"  {_cut(stage.name, 24)}",
        "STATUS": status_text(stage.status),
    }
    if stage.status is StageStatus.SKIPPED:
        return {**cells, "": note}
    is_map, began, rate = stage.kind is StageKind.MAP, stage.started_at, stage.rate
    took = stage.duration_ms / 1000
    if began is not None and not stage.is_final:
        took = max(took, now - began)
    done = f"{stage.done:,}/{stage.total:,}" + ("" if stage.listed else "+")
    return {
        **cells,
        "PROGRESS": bar(stage),
        "DONE": done if is_map and (stage.total or stage.listed) else "",
        "OK": f"{stage.ok:,}" if is_map and began is not None else "",
        "SKIPPED": _number(stage.skipped) if is_map else "",
        "FAILED": rich_text((_number(stage.failed) if is_map else "", "red")),
        "KEPT": _number(stage.reused),
        "RATE": f"{rate:,.{int(rate < 10)}f}/s" if is_map and rate is not None else "",
        "ETA": span(stage.eta) if stage.eta and not stage.is_final else "",
        "TOOK": span(took) if began is not None else "",
        "": note,
    }


def stage_table(record: PipelineRecord, now: float, *, live: bool = False) -> Iterator[Text]:
    """A line a stage, with a bar if it is live. A column without content is left out."""
    rows = [stage_cells(stage, now) for stage in record.stages]
    hidden = ("OK", "SKIPPED") if live else ("PROGRESS",)
    columns = [name for name in max(rows, key=len, default={}) if name not in hidden]
    columns = [name for name in columns if any(row.get(name) for row in rows)]
    lines = [{name: rich_text((name, "bold")) for name in columns}] if rows else []
    lines += [{name: rich_text(cell) for name, cell in row.items()} for row in rows]
    for name in filter(None, columns):
        column = [cells[name] for cells in lines if name in cells]
        width = max(cell.cell_len for cell in column)
        for cell in column:
            cell.align("left" if name in ("STAGE", "STATUS", "PROGRESS") else "right", width)
    for cells in lines:
        line = rich_text("  ", cut=True).join(cells[name] for name in columns if name in cells)
        line.rstrip()
        yield line


def bar(stage: StageRecord) -> Text:
    """Progress bar of a stage: done in its colour, failed in red."""
    if stage.status is StageStatus.PENDING:
        return rich_text(" " * _BAR)
    done, total = (stage.done, stage.total) if stage.total else (int(stage.is_final), 1)
    whole = min(_BAR, _BAR * done // total)
    red = min(whole, -(-_BAR * stage.failed // total))
    good = ("━" * (whole - red), STYLES[stage.status.value.lower()])
    return rich_text(good, ("━" * red, "red"), ("─" * (_BAR - whole), "dim"))


def stage_line(stage: StageRecord) -> str:
    """What came of a stage, in a line without a table."""
    cells, why = stage_cells(stage, 0.0), _why(stage, *stage.errors)
    shown = {"DONE": "{}", "FAILED": "{} failed", "SKIPPED": "{} skipped", "TOOK": "{}"}
    said = [words.format(cells[name]) for name, words in shown.items() if cells.get(name)]
    return "  ".join([stage.name, stage.status, *said, *([f"({why})"] if why else [])])


def _why(stage: StageRecord, *errors: str) -> str:
    """The first line of the reason, or of the first of the errors."""
    said = (stage.reason, "nothing to do" if stage.empty else "", *errors, "")
    return next(filter(None, said), "").partition("\n")[0]


# -- runs ------------------------------------------------------------------------


def elapsed(record: PipelineRecord, now: float) -> Number | None:
    """The time from its start to its end, or to now; None if it has not started."""
    if record.started_at is None:
        return None
    return span(max(0.0, (record.finished_at or now) - record.started_at))


def headline(record: PipelineRecord, now: float, *, cut: bool = False) -> Text:
    ran = elapsed(record, now)
    return rich_text(
        *((record.pipeline, "bold"), f"  job {record.id}  ", status_text(record.status)),
        f"  {ran}" if ran else "",
        "  asked to stop" if record.cancel_requested and not record.is_final else "",
        cut=cut,
    )


def outcome(record: PipelineRecord) -> str:
    """Where a run is, or why it ended as it did, in a few words."""
    bad = [s for s in record.stages if s.status in (StageStatus.PARTIAL, StageStatus.FAILED)]
    if record.abandoned_items:
        return f"{plural(len(record.abandoned_items), 'item')} would not stop"
    if record.cancel_requested and not record.is_final:
        return "asked to stop"
    if not record.is_final or record.status is PipelineJobStatus.CANCELLED:
        return f"in {record.current_stage}" if record.current_stage else ""
    if bad:
        return "; ".join(_trouble(stage) for stage in bad)
    return record.errors[0].message if record.errors else ""


def _trouble(stage: StageRecord) -> str:
    if stage.kind is StageKind.MAP and stage.failed:
        return f"{stage.failed:,} of {plural(stage.total, 'item')} of {stage.name} failed"
    return ": ".join(filter(None, (f"{stage.name} {stage.status}", _why(stage, *stage.errors))))


def status_page(
    record: PipelineRecord, why: str, config: dict[str, str], engine: EngineRef, now: float
) -> Iterator[RenderableType]:
    yield headline(record, now)
    yield facts(_run_facts(record, why, config, now))
    if record.stages:
        yield ""
        yield from stage_table(record, now)
    yield from _section("ERROR", [(e.stage or "(job)", e.message) for e in record.errors])
    yield from _section("ALERT", [(alert.code, alert.message) for alert in record.alerts])
    yield from _section("FIGURES", [(s.name, _figures(s)) for s in record.stages if s.metrics])
    if hints := list(_hints(record, engine)):
        yield rich_text(("\n".join(("", *hints)), "dim"))


def _run_facts(
    record: PipelineRecord, why: str, config: dict[str, str], now: float
) -> Iterator[tuple[str, str]]:
    cancel = "took effect" if record.cancel_effective else "came too late: the end won"
    if not record.is_final:
        cancel = "asked for; waits for running items to stop"
    age = span(max(0.0, now - record.created_at))
    yield "now", why
    yield "accepted", f"{moment(record.created_at, now)} ({age} ago), {record.trigger}"
    if record.started_at is not None:
        inside = f", {span(record.summary.stages_ms / 1000)} in stages" if record.summary else ""
        yield "started", f"{moment(record.started_at, now)}{inside}"
    yield "resumed", f"{record.attempt - 1} times" if record.attempt > 1 else ""
    yield "retry of", record.retry_of or ""
    yield "cancel", cancel if record.cancel_requested else ""
    yield "abandoned", ", ".join(record.abandoned_items)
    yield "tenant", record.tenant if record.tenant != "default" else ""
    for name, value in config.items():
        yield "config", f"{name} = {_cut(value, 300)}"
    yield "trace", record.trace_id


def _figures(stage: StageRecord) -> str:
    return ", ".join(f"{name} {_figure(value)}" for name, value in stage.metrics.items())


def _figure(value: float | int | str | bool) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _section(
    title: str, rows: Sequence[tuple[str, str]], header: str = ""
) -> Iterator[RenderableType]:
    """A table of two columns after an empty line; nothing if it has no rows."""
    if rows:
        yield ""
        cells: list[Row] = [{title: f"  {name}", header: Wrapped(text)} for name, text in rows]
        yield Listing(cells)


def _hints(record: PipelineRecord, engine: EngineRef) -> Iterator[str]:
    name = short_id(record.id)
    bad = [stage.name for stage in record.stages if stage.failed]
    if bad:
        yield f"what failed: {engine.command(f'pipeline items {name} {bad[0]} --outcome failed')}"
    elif record.stages:
        yield f"the items: {engine.command(f'pipeline items {name} STAGE')}"
    if not record.is_final:
        yield f"live: {engine.command(f'pipeline watch {name}')}"
    elif record.status is not PipelineJobStatus.COMPLETED:
        yield f"run what is undone: {engine.command(f'pipeline retry {name}')}"


def run_row(record: PipelineRecord, now: float) -> Row:
    again = f"retry of {short_id(record.retry_of)}" if record.retry_of else ""
    return {
        "JOB": JobId(record.id),
        "PIPELINE": record.pipeline,
        "TENANT": record.tenant,
        "STATUS": status_text(record.status),
        "AGE": span(now - record.created_at),
        "TOOK": elapsed(record, now),
        "NOTE": "; ".join(filter(None, (outcome(record), again))),
    }


# -- a run to its end -------------------------------------------------------------

_LOOK = 0.25
"""Seconds between reads of the record while a run is shown live."""


@dataclass
class RunView:
    """The live view of a run: its latest record, drawn as of now."""

    record: PipelineRecord
    remark: str = ""
    """What the run waits for."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = time.time()
        yield headline(self.record, now, cut=True)
        yield from stage_table(self.record, now, live=True)
        if self.remark:
            yield rich_text((self.remark, "dim"), cut=True)


async def follow(api: EngineApi, board: RunView, json: str = "") -> PipelineRecord:
    """Show a run until it ends: live on a terminal, else as lines. `json`: print its `events`, or
    its final `record`."""
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
        ran = elapsed(ended, time.time())
        parts = (f"{ended.pipeline} ", status_text(ended.status))
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
    return stage_line(stage) if stage is not None else ""


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
        looking = asyncio.create_task(look())
        try:
            async for _ in api.pipelines.stream(job_id):
                pass
        finally:
            looking.cancel()
            # An error of a look ends the stream as well, which reports it.
            await asyncio.gather(looking, return_exceptions=True)
        board.record = await api.pipelines.get(job_id)
        board.remark = ""


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
    why, later = outcome(record), ", once an engine is up" if here else ""
    warn(
        f"job {record.id} ended {status}" + (f": {why}" if why else ""),
        *(f"abandoned: {name}" for name in record.abandoned_items),
        f"see '{engine.command(f'pipeline status {name}')}'",
        f"run what is undone with '{engine.command(f'pipeline retry {name}')}'{later}",
    )
    if status is PipelineJobStatus.FAILED:
        end = ENDS[(await api.get(record.id)).state]
        return end or Exit.FAILED  # a job that ended well has written the end of its run
    if status is PipelineJobStatus.CANCELLED:
        return Exit.CANCELLED
    return Exit.FAILED if strict else Exit.OK


# -- items and breakers ----------------------------------------------------------


def items_page(
    found: Sequence[ItemRecord], inputs: Sequence[str], *, wide: bool
) -> Iterator[RenderableType]:
    """A table; where there is no room for errors in it, they follow in one of their own."""
    rows, errors = list[Row](), list[Row]()
    for one, given in zip(found, inputs, strict=True):
        error = " ".join(": ".join(filter(None, (one.error_code, one.error))).split())
        row: Row = {
            "SEQ": one.seq,
            "KEY": one.key,
            "OUTCOME": status_text(one.outcome),
            "TRIES": _number(one.attempts),
            "CLASS": one.error_class or "",
            "TOOK": span(one.duration_ms / 1000) if one.attempts else None,
        }
        rows.append({**row, **({"ERROR": error} if wide else {}), "INPUT": given})
        errors += [{"SEQ": one.seq, "ERROR": Wrapped(error)}] if error and not wide else []
    yield Listing(rows)
    if errors:
        yield ""
        yield Listing(errors)


def breaker_row(one: Breaker, now: float) -> Row:
    return {
        "NAME": one.name,
        "STATE": status_text(one.state),
        "FAILURES": one.failures,
        "OPENS AT": one.threshold,
        "SINCE": None if one.opened_at is None else span(max(0.0, now - one.opened_at)),
        "TRIES AGAIN": tries_again(one, now),
    }


def tries_again(one: Breaker, now: float) -> str:
    if one.state is BreakerState.CLOSED or one.opened_at is None:
        return ""
    left = one.opened_at + one.cooldown - now
    return f"in {span(left)}" if left > 0 else "with the next item"


# -- definitions -----------------------------------------------------------------


def pipeline_row(info: PipelineInfo, now: float) -> Row:
    return {
        "NAME": info.name,
        "STAGES": " → ".join(stage.name for stage in info.stages),
        "AT ONCE": Number("one run" if info.single_flight else "any"),
        "WHAT IT DOES": info.doc.partition("\n")[0],
    }


def pipeline_page(info: PipelineInfo) -> Iterator[RenderableType]:
    count, stale = len(info.stages), info.stale_after
    yield rich_text("pipeline ", (info.name, "bold"), f"  {plural(count, 'stage')}")
    yield facts(
        [
            ("about", " ".join(info.doc.split())),
            ("topic", info.topic),
            ("at once", "one run" if info.single_flight else "any number of runs"),
            ("status", f"by the rule {info.policy}"),
            ("changed", f"an unfinished run of an older definition: {info.on_change}"),
            ("orphaned", f"a run whose process is gone: {info.on_orphan}"),
            ("stale", "" if stale is None else f"after {span(stale)} without progress"),
        ]
    )
    corners = "─" if count == 1 else f"╭{'├' * (count - 2)}╰"
    stages: list[Row] = [
        {
            "STAGE": f"  {corner} {stage.name}",
            "WHAT": what(stage),
            "AT ONCE": stage.concurrency if stage.kind is StageKind.MAP else None,
            "OPTIONS": Wrapped(_options(stage)),
        }
        for corner, stage in zip(corners, info.stages, strict=True)
    ]
    yield ""
    yield Listing(stages)
    if fields := [_field_row(field) for field in config_fields(info.config_schema)]:
        yield ""
        yield Listing(fields)
    yield from _section("ALERT", [(rule.code, when(rule)) for rule in info.alerts], "WHEN")


def _field_row(field: ConfigField) -> Row:
    return {
        "CONFIG": Wrapped(f"  {field.name}"),
        "TYPE": Wrapped(field.type),
        "DEFAULT": Wrapped(field.default),
        "BOUNDS": Wrapped(field.about),
    }


def what(stage: StageInfo) -> str:
    """`map over ingest`, `map over config.sources`, `map over candidates()`, `step of brief`."""
    if stage.kind is StageKind.STEP:
        return f"step of {stage.of}" if stage.of else "step"
    kind, _, name = stage.over.partition(":")
    return "map over " + {"config": f"config.{name}", "source": f"{name}()"}.get(kind, name)


def _options(stage: StageInfo) -> str:
    """Its options that are not at their defaults, as they are declared."""

    def plain(info: StageInfo) -> dict[str, Any]:
        return {**asdict(info), "retry": info.retry.retries, "needs": ",".join(info.needs)}

    apart = ("over", "of", "concurrency", "doc")  # shown elsewhere, or too long
    default = plain(StageInfo(name=stage.name, kind=stage.kind))
    default["when_open"] = "" if stage.breaker else stage.when_open
    said = {name: of for name, of in plain(stage).items() if of != default[name]}
    return " ".join(f"{name}={_figure(of)}" for name, of in said.items() if name not in apart)


def when(rule: AlertRule) -> str:
    """The threshold in words."""
    limits = {"below": rule.below, "above": rule.above, "is": rule.equals}
    said = [f"{word} {_figure(of)}" for word, of in limits.items() if of is not None]
    return f"{rule.metric}{f' / {rule.of}' if rule.of else ''} {' or '.join(said)}".rstrip()
