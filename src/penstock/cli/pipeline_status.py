"""`penstock pipeline status`: everything about one run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import as_json
from penstock.cli.pipeline_config import said
from penstock.cli.pipeline_display import elapsed, job_status, stage_table
from penstock.cli.pipeline_follow import is_retriable
from penstock.cli.pipeline_runs import run_meant
from penstock.cli.place import Place, placed, reading_at, run
from penstock.cli.words import moment, short_id, span
from penstock.core.errors import PenstockError
from penstock.workloads.pipeline.records import PipelineRecord
from penstock.workloads.pipeline.views import view_of

if TYPE_CHECKING:
    from rich.console import RenderableType


_GLANCE = 300
"""Characters of a config field that are shown."""


class Look(Struct, frozen=True):
    """A run at one moment."""

    record: PipelineRecord
    why: str
    """What it waits for, or what is happening to it."""
    config: dict[str, str]
    """The fields that are not at their defaults, as JSON."""


@click.command()
@click.argument("job")
@as_json
@placed
@click.pass_obj
def status(place: Place, job: str, json: bool) -> None:
    """Tell how far a run is: stages, errors, alerts."""

    look = run(_look(place, job))
    if json:
        print_json(view_of(look.record))
    else:
        emit(*_page(look, place, time.time()))


async def _look(place: Place, text: str) -> Look:
    async with reading_at(place) as api:
        record = await run_meant(api, text)
        try:
            schema = (await api.pipelines.show(record.pipeline)).config_schema
        except PenstockError:  # nobody serves it any more
            schema = {}
        why = "" if record.is_final else await api.why(record.id)
        return Look(record, why, said(record.config, schema))


def _page(look: Look, place: Place, now: float) -> Iterator[RenderableType]:
    from rich.text import Text

    record = look.record
    yield Text.assemble(
        "run ", (record.id, "bold"), f" of {record.pipeline}  ", job_status(record.status)
    )
    facts = Listing("", "fact", flexible=("fact",), folded=("fact",), header=False)
    for name, value in _facts(look, now):
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


def _facts(look: Look, now: float) -> Iterator[tuple[str, str]]:
    record = look.record
    if look.why:
        yield "now", look.why
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
    for name, value in look.config.items():
        yield "config", f"{name} = {value[:_GLANCE]}" + ("…" if len(value) > _GLANCE else "")
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
    elif is_retriable(record):
        yield f"run what is undone: {again} retry-failed {name}"
