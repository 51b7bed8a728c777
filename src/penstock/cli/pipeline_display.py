"""A run on paper and on the screen: one line a stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.cli.words import plural, span
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import PipelineRecord, StageKind, StageRecord, StageStatus

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

STAGE_STYLES = {
    StageStatus.PENDING: "dim",
    StageStatus.RUNNING: "cyan",
    StageStatus.COMPLETED: "green",
    StageStatus.PARTIAL: "yellow",
    StageStatus.FAILED: "red",
    StageStatus.SKIPPED: "dim",
}
JOB_STYLES = {
    PipelineJobStatus.PENDING: "dim",
    PipelineJobStatus.RUNNING: "cyan",
    PipelineJobStatus.COMPLETED: "green",
    PipelineJobStatus.PARTIAL: "yellow",
    PipelineJobStatus.FAILED: "red",
    PipelineJobStatus.CANCELLED: "magenta",
}
_BAR = 16
_LONGEST = 24
"""Characters of a stage's name that are shown."""
Column = tuple[str, "Callable[[StageRecord], str | Text]"]


def job_status(status: PipelineJobStatus) -> Text:
    from rich.text import Text

    return Text(status.value, JOB_STYLES[status])


def elapsed(record: PipelineRecord, now: float) -> float:
    """Seconds from its start to its end, or to now."""
    if record.started_at is None:
        return 0.0
    return max(0.0, (record.finished_at or now) - record.started_at)


def took(stage: StageRecord, now: float) -> str:
    if stage.started_at is None:
        return ""
    if stage.is_final:
        return span(stage.duration_ms / 1000)
    return span(max(stage.duration_ms / 1000, now - stage.started_at))


def counted(stage: StageRecord) -> str:
    """`120/500`; with a + while its items are still being listed."""
    if stage.kind is StageKind.STEP or not (stage.total or stage.listed):
        return ""
    return f"{stage.done:,}/{stage.total:,}" + ("" if stage.listed else "+")


def note(stage: StageRecord) -> str:
    """The one thing about a stage that is worth a glance, besides its errors."""
    if stage.reason:
        return stage.reason.partition("\n")[0]
    return "nothing to do" if stage.empty else ""


def stage_table(record: PipelineRecord, now: float, *, live: bool = False) -> Iterator[Text]:
    """A line a stage; with bars if it is looked at live. A column in which there is nothing is
    left out, and of a stage that was not run only the reason is told."""
    columns: list[Column] = [("STAGE", _name), ("STATUS", _status)]
    columns += [("PROGRESS", bar)] if live else []
    columns.append(("DONE", counted))
    columns += [] if live else [("OK", _ok), ("SKIPPED", _skipped)]
    columns += [
        ("FAILED", _failed),
        ("KEPT", lambda stage: f"{stage.reused:,}" if stage.reused else ""),
        ("RATE", _rate),
        ("ETA", _eta),
        ("TOOK", lambda stage: took(stage, now)),
    ]
    yield from _lines(record.stages, columns)


def _lines(stages: Sequence[StageRecord], columns: Sequence[Column]) -> Iterator[Text]:
    from rich.text import Text

    rows = [[Text.assemble(cell(stage)) for _, cell in columns] for stage in stages]
    widths = [max(row[n].cell_len for row in rows) for n in range(len(columns))]
    kept = [n for n, width in enumerate(widths) if width]
    widths = [max(width, len(columns[n][0])) for n, width in enumerate(widths)]
    titles = [Text(columns[n][0], "bold") for n in kept]
    yield _line(titles, kept, widths, columns)
    for stage, row in zip(stages, rows, strict=True):
        told = kept[:2] if stage.status is StageStatus.SKIPPED else kept
        line = _line([row[n] for n in told], told, widths, columns)
        if why := note(stage):
            line.append(f"  {why}", "dim")
        yield line


def _line(
    cells: Sequence[Text], kept: Sequence[int], widths: Sequence[int], columns: Sequence[Column]
) -> Text:
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    for n, cell in zip(kept, cells, strict=True):
        padding = " " * (widths[n] - cell.cell_len)
        line.append("  " if n else "")
        line.append_text(cell + padding if columns[n][0] in _LEFT else Text(padding) + cell)
    return line


_LEFT = ("STAGE", "STATUS", "PROGRESS")


def _name(stage: StageRecord) -> str:
    return "  " + (stage.name if len(stage.name) <= _LONGEST else f"{stage.name[: _LONGEST - 1]}…")


def bar(stage: StageRecord) -> Text:
    """How far it is: what is done in its colour, what failed in red."""
    from rich.text import Text

    if stage.status in (StageStatus.SKIPPED, StageStatus.PENDING):
        return Text(" " * _BAR)
    style = STAGE_STYLES[stage.status]
    if not stage.total:
        full = _BAR if stage.is_final else 0
        return Text.assemble(("━" * full, style), ("─" * (_BAR - full), "dim"))
    whole = min(_BAR, _BAR * stage.done // stage.total)
    red = min(whole, -(-_BAR * stage.failed // stage.total))
    return Text.assemble(
        ("━" * (whole - red), style), ("━" * red, "red"), ("─" * (_BAR - whole), "dim")
    )


def _status(stage: StageRecord) -> Text:
    from rich.text import Text

    return Text(stage.status.value, STAGE_STYLES[stage.status])


def _ok(stage: StageRecord) -> str:
    return f"{stage.ok:,}" if stage.started_at is not None and stage.kind is StageKind.MAP else ""


def _skipped(stage: StageRecord) -> str:
    return f"{stage.skipped:,}" if stage.skipped else ""


def _failed(stage: StageRecord) -> Text:
    from rich.text import Text

    return Text(f"{stage.failed:,}" if stage.failed else "", "red")


def _rate(stage: StageRecord) -> str:
    if stage.rate is None or stage.kind is StageKind.STEP:
        return ""
    return f"{stage.rate:,.0f}/s" if stage.rate >= 10 else f"{stage.rate:.1f}/s"


def _eta(stage: StageRecord) -> str:
    return span(stage.eta) if stage.eta and not stage.is_final else ""


class Board:
    """The live view of a run. Drawn again and again, it shows the record that it was last
    given, at the time of drawing."""

    def __init__(self, record: PipelineRecord) -> None:
        self.record = record
        self.is_live = False
        """Whether it is on the screen, where nothing else can be printed."""
        self.remark = ""
        """What the run waits for."""
        self.notice = ""
        """What whoever looks at it should know."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.parts(time.time())

    def parts(self, now: float) -> Iterator[RenderableType]:
        from rich.text import Text

        yield headline(self.record, now)
        if self.record.stages:
            yield from stage_table(self.record, now, live=True)
        if self.remark:
            yield Text(self.remark, "dim", no_wrap=True, overflow="ellipsis")
        if self.notice:
            yield Text(self.notice, "yellow", no_wrap=True, overflow="ellipsis")


def headline(record: PipelineRecord, now: float) -> Text:
    from rich.text import Text

    return Text.assemble(
        (record.pipeline, "bold"),
        f"  job {record.id}  ",
        job_status(record.status),
        f"  {span(elapsed(record, now))}" if record.started_at is not None else "",
        "  asked to stop" if record.cancel_requested and not record.is_final else "",
        no_wrap=True,
        overflow="ellipsis",
    )


def stage_line(stage: StageRecord) -> str:
    """What came of a stage, in a line without a table."""
    said = [stage.name, stage.status.value]
    if stage.kind is StageKind.MAP and (stage.total or stage.listed):
        said.append(f"{stage.done:,}/{stage.total:,}")
        said += [f"{stage.failed:,} failed"] if stage.failed else []
        said += [f"{stage.skipped:,} skipped"] if stage.skipped else []
    if stage.started_at is not None:
        said.append(span(stage.duration_ms / 1000))
    if why := note(stage) or (stage.errors[0].partition("\n")[0] if stage.errors else ""):
        said.append(f"({why})")
    return "  ".join(said)


def outcome(record: PipelineRecord) -> str:
    """Why a run ended as it did, in a few words."""
    bad = [s for s in record.stages if s.status in (StageStatus.PARTIAL, StageStatus.FAILED)]
    if record.abandoned_items:
        return f"{plural(len(record.abandoned_items), 'item')} would not stop"
    if record.status is PipelineJobStatus.CANCELLED:
        return f"in {record.current_stage}" if record.current_stage else ""
    if bad:
        return "; ".join(_trouble(stage) for stage in bad)
    return record.errors[0].message if record.errors else ""


def _trouble(stage: StageRecord) -> str:
    if stage.kind is StageKind.MAP and stage.failed:
        return f"{stage.failed:,} of {plural(stage.total, 'item')} of {stage.name} failed"
    why = note(stage) or next(iter(stage.errors), "").partition("\n")[0]
    return f"{stage.name} {stage.status}" + (f": {why}" if why else "")
