"""Pipelines and runs as text: tables, the page of a run, and the live board."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.cli.paper import WIDE, Listing, console, emit
from penstock.cli.pipeline_config import fields_of
from penstock.cli.place import Place
from penstock.cli.words import moment, plural, short_id, span
from penstock.core.job import NO_RETRY
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import (
    AlertRule,
    Breaker,
    BreakerState,
    ItemOutcome,
    ItemRecord,
    PipelineInfo,
    PipelineRecord,
    StageInfo,
    StageKind,
    StageRecord,
    StageStatus,
)

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


# -- one run, and many -----------------------------------------------------------

_CONFIG_SHOWN = 300
"""Characters of a config field that are shown."""


def status_page(
    record: PipelineRecord, why: str, config: dict[str, str], place: Place, now: float
) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text.assemble(
        "run ", (record.id, "bold"), f" of {record.pipeline}  ", job_status(record.status)
    )
    facts = Listing("", "fact", flexible=("fact",), folded=("fact",), header=False)
    for name, value in _run_facts(record, why, config, now):
        facts.add(Text(f"  {name}", "dim"), value)
    yield facts
    if record.stages:
        yield ""
        yield from stage_table(record, now)
    yield from _section("ERROR", [(e.stage or "(job)", e.message) for e in record.errors])
    yield from _section("ALERT", [(alert.code, alert.message) for alert in record.alerts])
    yield from _section("FIGURES", list(_figures(record)))
    if hints := list(_hints(record, place)):
        yield ""
        for hint in hints:
            yield Text(hint, "dim")


def _run_facts(
    record: PipelineRecord, why: str, config: dict[str, str], now: float
) -> Iterator[tuple[str, str]]:
    if why:
        yield "now", why
    age = span(max(0.0, now - record.created_at))
    yield "accepted", f"{moment(record.created_at, now)} ({age} ago), {record.trigger}"
    if record.started_at is not None:
        inside = f", {span(record.summary.stages_ms / 1000)} in stages" if record.summary else ""
        verb = "ran" if record.is_final else "runs"
        yield verb, f"{span(elapsed(record, now))}{inside}, from {moment(record.started_at, now)}"
    if record.attempt > 1:
        yield "resumed", f"{record.attempt - 1} times"
    if record.retry_of:
        yield "retry of", record.retry_of
    if record.cancel_requested:
        yield "cancel", _cancelled(record)
    if record.abandoned_items:
        yield "abandoned", ", ".join(record.abandoned_items)
    if record.tenant != "default":
        yield "tenant", record.tenant
    for name, value in config.items():
        yield (
            "config",
            f"{name} = {value[:_CONFIG_SHOWN]}" + ("…" if len(value) > _CONFIG_SHOWN else ""),
        )
    yield "trace", record.trace_id


def _cancelled(record: PipelineRecord) -> str:
    if not record.is_final:
        return "asked for; waits for running items to stop"
    return "took effect" if record.cancel_effective else "came too late: the end won"


def _section(title: str, rows: list[tuple[str, str]]) -> Iterator[RenderableType]:
    if rows:
        listing = Listing(title, "", flexible=(title, ""), folded=("",))
        for name, text in rows:
            listing.add(f"  {name}", text)
        yield ""
        yield listing


def _figures(record: PipelineRecord) -> Iterator[tuple[str, str]]:
    """What the stages counted themselves."""
    for stage in record.stages:
        if stage.metrics:
            figures = (f"{name} {_figure(value)}" for name, value in stage.metrics.items())
            yield stage.name, ", ".join(figures)


def _figure(value: float | int | str | bool) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _hints(record: PipelineRecord, place: Place) -> Iterator[str]:
    again, name = f"penstock {place.spelled()}pipeline", short_id(record.id)
    bad = [stage.name for stage in record.stages if stage.failed]
    if bad:
        yield f"what failed: {again} items {name} {bad[0]} --outcome failed"
    elif record.stages:
        yield f"the items: {again} items {name} STAGE"
    if not record.is_final:
        yield f"live: {again} watch {name}"
    elif record.status is not PipelineJobStatus.COMPLETED:
        yield f"run what is undone: {again} retry-failed {name}"


def runs_table(found: list[PipelineRecord], now: float) -> Listing:
    wide = console().width >= WIDE
    tenants = {record.tenant for record in found} != {"default"}
    listing = Listing(
        *("JOB", "PIPELINE", *(["TENANT"] if tenants else []), "STATUS", "AGE", "TOOK", "NOTE"),
        flexible=("JOB", "PIPELINE", "TENANT", "NOTE"),
        right=("AGE", "TOOK"),
    )
    for record in found:
        listing.add(
            record.id if wide else short_id(record.id),
            record.pipeline,
            *([record.tenant] if tenants else []),
            job_status(record.status),
            span(now - record.created_at),
            "" if record.started_at is None else span(elapsed(record, now)),
            _run_note(record),
        )
    return listing


def _run_note(record: PipelineRecord) -> str:
    if record.is_final:
        again = f"retry of {short_id(record.retry_of)}" if record.retry_of else ""
        return "; ".join(filter(None, (outcome(record), again)))
    if record.cancel_requested:
        return "asked to stop"
    return f"in {record.current_stage}" if record.current_stage else ""


# -- items and breakers ----------------------------------------------------------


def items_table(found: list[ItemRecord], inputs: list[str]) -> Listing:
    """With the errors in the same line where there is room; else see `item_errors`."""
    from rich.text import Text

    wide = console().width >= WIDE
    listing = Listing(
        *("SEQ", "KEY", "OUTCOME", "TRIES", "CLASS", "TOOK", *(["ERROR"] if wide else []), "INPUT"),
        flexible=("KEY", "ERROR", "INPUT"),
        right=("SEQ", "TRIES", "TOOK"),
    )
    for one, given in zip(found, inputs, strict=True):
        listing.add(
            str(one.seq),
            one.key,
            Text(one.outcome.value, _OUTCOME_STYLES[one.outcome]),
            str(one.attempts) if one.attempts else "",
            one.error_class.value if one.error_class is not None else "",
            span(one.duration_ms / 1000) if one.attempts else "",
            *([_error(one)] if wide else []),
            given,
        )
    return listing


def item_errors(found: list[ItemRecord]) -> list[Listing | str]:
    failed = [(str(one.seq), _error(one)) for one in found if _error(one)]
    if not failed or console().width >= WIDE:
        return []
    listing = Listing("SEQ", "ERROR", flexible=("ERROR",), folded=("ERROR",), right=("SEQ",))
    for seq, error in failed:
        listing.add(seq, error)
    return ["", listing]


def _error(one: ItemRecord) -> str:
    return " ".join(": ".join(filter(None, (one.error_code, one.error))).split())


_OUTCOME_STYLES = {
    ItemOutcome.PENDING: "dim",
    ItemOutcome.OK: "green",
    ItemOutcome.FAILED: "red",
    ItemOutcome.SKIPPED: "dim",
}


_BREAKER_STYLES = {
    BreakerState.CLOSED: "green",
    BreakerState.OPEN: "red",
    BreakerState.HALF_OPEN: "yellow",
}


def breakers_table(found: list[Breaker], now: float) -> Listing:
    from rich.text import Text

    listing = Listing(
        *("NAME", "STATE", "FAILURES", "OPENS AT", "SINCE", "TRIES AGAIN"),
        flexible=("NAME", "TRIES AGAIN"),
        right=("FAILURES", "OPENS AT", "SINCE"),
    )
    for one in found:
        listing.add(
            one.name,
            Text(one.state.value.replace("_", " "), _BREAKER_STYLES[one.state]),
            f"{one.failures:,}",
            f"{one.threshold:,}",
            "" if one.opened_at is None else span(max(0.0, now - one.opened_at)),
            tries_again(one, now),
        )
    return listing


def tries_again(one: Breaker, now: float) -> str:
    if one.state is BreakerState.CLOSED or one.opened_at is None:
        return ""
    left = one.opened_at + one.cooldown - now
    return f"in {span(left)}" if left > 0 else "with the next item"


# -- definitions -----------------------------------------------------------------


def print_pipelines(infos: Sequence[PipelineInfo]) -> None:
    listing = Listing(
        *("NAME", "STAGES", "AT ONCE", "WHAT IT DOES"),
        flexible=("NAME", "STAGES", "WHAT IT DOES"),
    )
    for info in infos:
        listing.add(
            info.name,
            " → ".join(stage.name for stage in info.stages),
            "one run" if info.single_flight else "any",
            info.doc.partition("\n")[0],
        )
    emit(listing)


def print_pipeline(info: PipelineInfo) -> None:
    from rich.text import Text

    count = plural(len(info.stages), "stage")
    parts: list[RenderableType] = [Text.assemble("pipeline ", (info.name, "bold"), f"  {count}")]
    facts = Listing("", "fact", flexible=("fact",), folded=("fact",), header=False)
    for name, value in _facts(info):
        facts.add(Text(f"  {name}", "dim"), value)
    parts += [facts, "", _picture(info.stages)]
    if fields := fields_of(info.config_schema):
        columns = ("CONFIG", "TYPE", "DEFAULT", "BOUNDS")
        listing = Listing(*columns, flexible=columns, folded=columns)
        for one in fields:
            about = "; ".join(filter(None, (one.bounds, one.doc)))
            listing.add(f"  {one.name}", one.kind, one.default, about)
        parts += ["", listing]
    if info.alerts:
        alerts = Listing("ALERT", "WHEN", flexible=("ALERT", "WHEN"), folded=("WHEN",))
        for rule in info.alerts:
            alerts.add(f"  {rule.code}", when(rule))
        parts += ["", alerts]
    emit(*parts)


def _facts(info: PipelineInfo) -> Iterator[tuple[str, str]]:
    if info.doc:
        yield "about", " ".join(info.doc.split())
    yield "topic", info.topic
    yield "at once", "one run" if info.single_flight else "any number of runs"
    yield "status", f"by the rule {info.policy}"
    yield "changed", f"an unfinished run of an older definition: {info.on_change}"
    yield "orphaned", f"a run whose process is gone: {info.on_orphan}"
    if info.stale_after is not None:
        yield "stale", f"after {span(info.stale_after)} without progress"


def _picture(stages: Sequence[StageInfo]) -> Listing:
    listing = Listing(
        *("STAGE", "WHAT", "AT ONCE", "MORE"),
        flexible=("STAGE", "WHAT", "MORE"),
        folded=("MORE",),
        right=("AT ONCE",),
    )
    for number, stage in enumerate(stages):
        corner = "─" if len(stages) == 1 else "╰╭"[number == 0] if _ends(number, stages) else "├"
        at_once = str(stage.concurrency) if stage.kind is StageKind.MAP else ""
        listing.add(f"  {corner} {stage.name}", what(stage), at_once, "; ".join(_more(stage)))
    return listing


def _ends(number: int, stages: Sequence[StageInfo]) -> bool:
    return number in (0, len(stages) - 1)


def what(stage: StageInfo) -> str:
    """`map over ingest`, `map over config.sources`, `map over candidates()`, `step of brief`."""
    if stage.kind is StageKind.STEP:
        return f"step of {stage.of}" if stage.of else "step"
    kind, _, name = stage.over.partition(":")
    return "map over " + {"config": f"config.{name}", "source": f"{name}()"}.get(kind, name)


def _more(stage: StageInfo) -> Iterator[str]:
    """What is said about it beyond the defaults."""
    if stage.enabled:
        yield f"if {stage.enabled}"
    if stage.needs:
        yield f"needs {', '.join(stage.needs)}"
    if stage.critical:
        yield "critical"
    if not stage.counts:
        yield "does not count"
    if stage.retry != NO_RETRY:
        yield f"retries {stage.retry.retries}"
    if stage.breaker:
        yield f"breaker {stage.breaker}, open: {stage.when_open}"
    if stage.rate is not None:
        yield f"{stage.rate:g}/s"
    if stage.timeout is not None:
        yield f"timeout {span(stage.timeout)}"
    if stage.stage_timeout is not None:
        yield f"all within {span(stage.stage_timeout)}"
    if stage.min_ok:
        yield f"at least {stage.min_ok} ok"
    if stage.max_failed is not None:
        yield f"at most {stage.max_failed:.0%} failed"
    if stage.distributed:
        yield "distributed over workers"
    if stage.mode != "async":
        yield f"in a {stage.mode}"


def when(rule: AlertRule) -> str:
    """The threshold in words."""
    value = f"{rule.metric} / {rule.of}" if rule.of else rule.metric
    said = [
        f"below {rule.below:g}" if rule.below is not None else "",
        f"above {rule.above:g}" if rule.above is not None else "",
        f"is {rule.equals}" if rule.equals is not None else "",
    ]
    return f"{value} {' or '.join(filter(None, said))}".rstrip()
