"""`penstock show`: everything about one job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct

from penstock.cli.approvals import who_may
from penstock.cli.ids import meant
from penstock.cli.paper import WIDE, Listing, console, emit, facts, print_json, record, styled
from penstock.cli.parameters import as_json
from penstock.cli.pipeline_display import stage_table
from penstock.cli.place import Place, placed, reading_at, run
from penstock.cli.ps import error_of, listing_of
from penstock.cli.words import moment, run_time, short_id, span
from penstock.core.errors import PenstockError
from penstock.core.job import NO_RETRY, Job, JobRequest, chain_of
from penstock.core.journal import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi, newest_try
from penstock.ports.store import JobQuery, StepCount
from penstock.workloads.llm.values import PIPE_TOPICS, HopTime
from penstock.workloads.pipeline.records import PipelineRecord, pipeline_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_GLANCE = 2000
"""Characters of a payload that are shown, at most."""
_LINES = 3
"""Lines of it on a terminal."""
_MARGIN = 20
"""Columns for the name of a fact."""
_SHOWN = 10
"""Tries, and children, that are shown; the newest."""
_TRIES = 1000


class Dossier(Struct, frozen=True):
    """What there is to know about one job and its retries."""

    job: Job
    """The newest try."""
    why: str
    tries: list[Job]
    """All of them, in order; the newest, if there are very many."""
    histories: list[list[Transition]]
    """Of the last tries."""
    children: list[Job]
    """The newest of them."""
    child_counts: dict[JobState, int]
    parents: list[tuple[str, str]]
    """The jobs that it waits for, and their states."""
    given: str
    returned: str
    steps: list[StepCount] = []
    """How many rows it checkpointed."""
    hops: tuple[HopTime, ...] = ()
    """The way of an answer over the nodes of its model."""
    run: PipelineRecord | None = None
    """If it is a run of a pipeline."""


@click.command()
@click.argument("job")
@click.option("--tries", is_flag=True, help="The history of each try, not of the newest only.")
@as_json
@placed
@click.pass_obj
def show(place: Place, job: str, tries: bool, json: bool) -> None:
    """Tell where a job is, why, and how it came there.

    A job and its retries are one: any of their ids names it, and what is told is of the
    newest try. With --json it is an object of "job", "why", "history" (all of the newest try),
    "chain" (the ids of all tries, in order), "children" (how many jobs were submitted inside
    it, by state) and "steps" (how many rows it checkpointed, by name and outcome).
    """
    run(_show(place, job, tries, json))


async def _show(place: Place, text: str, tries: bool, json: bool) -> None:
    async with reading_at(place) as api:
        dossier = await _gather(api, await newest_try(api, await meant(api, text)), tries)
        if json:
            print_json(
                {
                    "job": record(dossier.job),
                    "why": dossier.why,
                    "history": msgspec.to_builtins(dossier.histories[-1]),
                    "chain": [job.job_id for job in dossier.tries],
                    "children": msgspec.to_builtins(dossier.child_counts),
                    "steps": msgspec.to_builtins(dossier.steps),
                }
            )
        else:
            await _print(api, dossier)


async def _gather(api: EngineApi, job: Job, all_tries: bool) -> Dossier:
    first, result = chain_of(job.request), job.result.result_ptr if job.result is not None else None
    tries = await api.find(JobQuery(first_try=first, limit=_TRIES))
    # A retry that came by now, or of before jobs were known by their first try.
    tries = [one for one in reversed(tries) if one.seq < job.seq] + [job]
    counts = await api.count_children(job.job_id)
    children = JobQuery(child_of=first, limit=_SHOWN)
    return Dossier(
        job,
        await api.why(job.job_id),
        tries,
        [await api.history(one.job_id) for one in (tries if all_tries else tries[-1:])],
        await api.find(children) if counts else [],
        counts,
        [(parent, await _state(api, parent)) for parent in job.request.after],
        await _glance(api, job.request.context_ptr),
        await _glance(api, result),
        await api.count_steps(job.job_id),
        await _hops(api, job, result),
        await _run(api, job),
    )


async def _run(api: EngineApi, job: Job) -> PipelineRecord | None:
    return None if pipeline_of(job.request.topic) is None else await api.pipelines.get(job.job_id)


async def _state(api: EngineApi, job_id: str) -> str:
    try:
        return (await api.get(job_id)).state.value
    except PenstockError:
        return "gone"


async def _glance(api: EngineApi, pointer: str | None) -> str:
    """A payload as far as it fits, or the pointer if it can't be read."""
    if not pointer:
        return ""
    try:
        text = (await api.get_blob(pointer)).decode("utf-8", "replace")
    except PenstockError as error:
        return f"{pointer} ({error.message})"
    most = min(_GLANCE, _LINES * (console().width - _MARGIN))
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


async def _hops(api: EngineApi, job: Job, pointer: str | None) -> tuple[HopTime, ...]:
    if not pointer or not job.request.topic.startswith(PIPE_TOPICS):
        return ()
    try:
        return msgspec.json.decode(await api.get_blob(pointer), type=_Way).hops
    except (PenstockError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


class _Way(Struct, frozen=True):
    """Of a result, the part that is looked at."""

    hops: tuple[HopTime, ...] = ()


async def _print(api: EngineApi, dossier: Dossier) -> None:
    from rich.text import Text

    job, now = dossier.job, time.time()
    first, count = chain_of(job.request), job.request.try_number
    title = Text.assemble("job ", (first, "bold"), "  ", styled(job.state))
    if count > 1:
        title.append(f"  {count:,} tries")
    parts: list[RenderableType] = [title, facts(_facts(dossier, now))]
    if dossier.run is not None and dossier.run.stages:
        parts += ["", *stage_table(dossier.run, now)]
    if count > 1:
        parts += ["", _tries(dossier.tries[-_SHOWN:], now)]
    if dossier.children:
        shown = JobQuery(child_of=first, limit=_SHOWN)
        parts += ["", await listing_of(api, dossier.children, shown, title="CHILD")]
    for one, history in zip(
        dossier.tries[-len(dossier.histories) :], dossier.histories, strict=True
    ):
        parts.append("")
        if len(dossier.histories) > 1:
            head = f"try {one.request.try_number}  {one.job_id}  "
            parts.append(Text.assemble((head, "bold"), styled(one.state)))
        parts.append(_history(history, now))
    emit(*parts)


def _tries(tries: list[Job], now: float) -> Listing:
    wide = console().width >= WIDE
    listing = Listing(
        *("TRY", "JOB", "STATE", "AGE", "TOOK", "ERROR"),
        flexible=("JOB", "ERROR"),
        right=("TRY", "AGE", "TOOK"),
    )
    for job in tries:
        listing.add(
            str(job.request.try_number),
            job.job_id if wide else short_id(job.job_id),
            styled(job.state),
            span(now - job.accepted_at),
            "" if job.started_at is None else span(run_time(job, now)),
            error_of(job),
        )
    return listing


def _facts(dossier: Dossier, now: float) -> Iterator[tuple[str, str]]:
    job, request = dossier.job, dossier.job.request
    yield "now", dossier.why
    yield "topic", request.topic
    yield "priority", request.priority.value
    yield "tenant", request.tenant
    if dossier.given:
        yield "input", dossier.given
    yield from _asked(request, now)
    if dossier.parents:
        said = ", ".join(f"{short_id(name)} {state}" for name, state in dossier.parents)
        yield "after", f"{said}; if one fails: {request.if_parent_fails}"
    yield from _judged(job, now)
    yield "accepted", f"{moment(job.accepted_at, now)} ({span(now - job.accepted_at)} ago)"
    if job.worker_id is not None:
        yield "worker", f"{job.worker_id}, pool {job.pool}, attempt {job.attempt}"
    if job.started_at is not None:
        ran = span(run_time(job, now))
        yield "ran" if job.is_final else "runs", f"{ran}, from {moment(job.started_at, now)}"
    if dossier.steps and dossier.run is None:
        yield "steps", _steps(dossier.steps)
    if counts := dossier.child_counts:
        said = ", ".join(f"{count:,} {state}" for state, count in counts.items())
        more = sum(counts.values()) > len(dossier.children)
        where = f"; all: penstock ps --parent {short_id(chain_of(request))}" if more else ""
        yield "children", f"{said}{where}"
    if (result := job.result) is not None:
        if result.error_code:
            yield "error", f"{result.error_code}: {result.error_message or ''}".rstrip(": ")
        if dossier.returned:
            yield "result", dossier.returned
    for index, hop in enumerate(dossier.hops):
        yield "" if index else "hops", _hop(hop)


def _steps(counts: list[StepCount]) -> str:
    """As in `fetch: 980 ok, 20 failed; parse: 7`."""
    said: dict[str, list[str]] = {}
    for count in counts:
        said.setdefault(count.name, []).append(f"{count.rows:,} {count.outcome}".rstrip())
    return "; ".join(f"{name}: {', '.join(parts)}" for name, parts in said.items())


def _hop(hop: HopTime) -> str:
    took = [f"computed {_ms(hop.compute_ms)}"]
    if hop.queue_ms:
        took.append(f"queued {_ms(hop.queue_ms)}")
    if hop.network_ms:
        took.append(f"on the network {_ms(hop.network_ms)}")
    passes = f"{hop.passes:,} pass" if hop.passes == 1 else f"{hop.passes:,} passes"
    return f"{_layers(hop.layers)} on {hop.node}: {passes}, {', '.join(took)}"


def _layers(written: str) -> str:
    first, _, last = written.partition("-")
    if not first.isdigit():
        return written
    return f"layer {first}" if last in ("", first) else f"layers {written}"


def _ms(milliseconds: float) -> str:
    return span(milliseconds / 1000)


def _judged(job: Job, now: float) -> Iterator[tuple[str, str]]:
    """What the safety rules said, and whose word it takes or took."""
    if (verdict := job.verdict) is not None:
        said = f"{verdict.decision} by rule {verdict.rule_id}, snapshot {verdict.snapshot}"
        yield "verdict", said + (f": {verdict.reason}" if verdict.reason else "")
        if verdict.rate is not None:
            yield "rate", str(verdict.rate)
        if verdict.constraints is not None:
            limits = msgspec.to_builtins(verdict.constraints)
            yield "constraints", ", ".join(f"{name} {value}" for name, value in limits.items())
    if (hold := job.hold) is None:
        return
    yes = f"{len(hold.votes)} of {hold.terms.needed} said yes"
    if hold.approved or job.is_final:
        yield "approval", yes
    else:
        left = f"until {moment(hold.until, now)} (for {span(max(0.0, hold.until - now))})"
        yield "approval", f"{yes}; {who_may(hold)} may, {left}"
    for vote in hold.votes:
        reason = f": {vote.reason}" if vote.reason else ""
        yield "", f"{vote.by} at {moment(vote.at, now)}{reason}"


def _asked(request: JobRequest, now: float) -> Iterator[tuple[str, str]]:
    """The fields of a request that say something beyond the defaults."""
    retry = request.retry
    fields: dict[str, Any] = {
        "timeout": request.timeout and span(request.timeout),
        "start timeout": request.dispatch_timeout and span(request.dispatch_timeout),
        "deadline": request.deadline and moment(request.deadline, now),
        "not before": request.run_at and moment(request.run_at, now),
        "retry policy": _policy(request) if retry != NO_RETRY else "",
        "idempotent": "yes" if request.idempotent else "",
        "key": request.idempotency_key,
        "parent": request.child_of or (request.parent_job_id if not request.first_try else None),
        "workflow": request.workflow_id,
        "step": None if request.step_index is None else str(request.step_index),
        "adapter": request.adapter_id,
        "submitted by": request.principal,
        "schedule": request.schedule,
        "capability": request.capability,
        "risk tags": ", ".join(request.risk_tags),
        "cost": None if request.estimated_cost is None else f"{request.estimated_cost:g}",
        "unique": _unique(request),
        "labels": _pairs(request.labels),
        "env": _pairs(request.env),
    }
    for name, value in fields.items():
        if value:
            yield name, value


def _unique(request: JobRequest) -> str:
    if (unique := request.unique) is None:
        return ""
    how_long = f"while {unique.scope}" if unique.period is None else f"for {span(unique.period)}"
    return f"{unique.key}, {how_long}"


def _policy(request: JobRequest) -> str:
    retry = request.retry
    said = f"{request.retry_number} of {retry.retries} used, first after {span(retry.delay)}"
    said += f", times {retry.factor:g}, at most {span(retry.max_delay)}"
    if retry.on:
        said += f", on {', '.join(retry.on)}"
    return said + (f", never on {', '.join(retry.never)}" if retry.never else "")


def _pairs(pairs: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(pairs.items()))


def _history(history: list[Transition], now: float) -> Listing:
    """On a narrow terminal, who did it and why are one column, so that both can be read."""
    wide = console().width >= WIDE
    columns = ("#", "TIME", "AFTER", "EVENT", "STATE", "BY", "REASON")
    last = "REASON" if wide else "BY: REASON"
    listing = Listing(
        *(columns if wide else (*columns[1:5], last)),
        flexible=(last,),
        folded=(last,),
        right=("#", "AFTER"),
    )
    before: float | None = None
    for entry in history:
        reason = " ".join(filter(None, (entry.worker_id and f"to {entry.worker_id}", entry.reason)))
        cells = (
            str(entry.n),
            moment(entry.at, now),
            "" if before is None else span(entry.at - before),
            f"{entry.event} {entry.attempt}" if entry.worker_id else entry.event.value,
            styled(entry.after),
        )
        if wide:
            listing.add(*cells, entry.actor, reason)
        else:
            listing.add(*cells[1:], ": ".join(filter(None, (entry.actor, reason))))
        before = entry.at
    return listing
