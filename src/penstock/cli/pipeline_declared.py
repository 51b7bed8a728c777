"""A pipeline as it was declared, on paper: its stages as a small picture, its config, its
alert rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.cli.paper import Listing, emit
from penstock.cli.pipeline_config import fields_of
from penstock.cli.words import plural, span
from penstock.core.job import NO_RETRY
from penstock.workloads.pipeline.records import AlertRule, PipelineInfo, StageInfo, StageKind

if TYPE_CHECKING:
    from rich.console import RenderableType


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
