"""`penstock show`: everything about one job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click
import msgspec
from msgspec import Struct

from penstock.cli.approvals import who_may
from penstock.cli.ids import meant
from penstock.cli.paper import Listing, emit, print_json, record, styled
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, placed, reading_at, run
from penstock.cli.words import moment, run_time, short_id, span
from penstock.core.errors import PenstockError
from penstock.core.job import NO_RETRY, Job, JobRequest
from penstock.core.llm import PIPE_TOPICS, HopTime
from penstock.core.stages import pipeline_of
from penstock.core.transition import Transition
from penstock.ports.desk import Desk

_GLANCE = 2000
"""Characters of a payload that are shown."""


class Dossier(Struct, frozen=True):
    """What there is to know about one job."""

    job: Job
    why: str
    history: list[Transition]
    chain: list[str]
    """The job and its retries, in order."""
    parents: list[tuple[str, str]]
    """The jobs that it waits for, and their states."""
    given: str
    returned: str
    hops: tuple[HopTime, ...] = ()
    """The way of an answer over the nodes of its model."""


@click.command()
@click.argument("job")
@as_json
@placed
@click.pass_obj
def show(place: Place, job: str, json: bool) -> None:
    """Tell where a job is, why, and how it came there.

    With --json it is an object of "job", "why", "history" and "chain" (the job and its
    retries, in order).
    """
    dossier = run(_gather(place, job))
    if json:
        print_json(
            {
                "job": record(dossier.job),
                "why": dossier.why,
                "history": msgspec.to_builtins(dossier.history),
                "chain": dossier.chain,
            }
        )
    else:
        _print(dossier)


async def _gather(place: Place, text: str) -> Dossier:
    async with reading_at(place) as desk:
        job = await meant(desk, text)
        result = job.result.result_ptr if job.result is not None else None
        return Dossier(
            job,
            await desk.why(job.job_id),
            await desk.history(job.job_id),
            await _chain(desk, job),
            [(parent, await _state(desk, parent)) for parent in job.request.after],
            await _glance(desk, job.request.context_ptr),
            await _glance(desk, result),
            await _hops(desk, job, result),
        )


async def _chain(desk: Desk, job: Job) -> list[str]:
    chain, first = [job.job_id], job
    while first.request.parent_job_id is not None:
        try:
            parent = await desk.get(first.request.parent_job_id)
        except PenstockError:
            break
        if parent.successor != first.job_id:
            break
        chain.insert(0, parent.job_id)
        first = parent
    while job.successor is not None:
        job = await desk.get(job.successor)
        chain.append(job.job_id)
    return chain


async def _state(desk: Desk, job_id: str) -> str:
    try:
        return (await desk.get(job_id)).state.value
    except PenstockError:
        return "gone"


async def _glance(desk: Desk, pointer: str | None) -> str:
    """A payload as far as it fits, or the pointer if it can't be read."""
    if not pointer:
        return ""
    try:
        text = (await desk.get_blob(pointer)).decode("utf-8", "replace")
    except PenstockError as error:
        return f"{pointer} ({error.message})"
    return text if len(text) <= _GLANCE else text[:_GLANCE] + "…"


async def _hops(desk: Desk, job: Job, pointer: str | None) -> tuple[HopTime, ...]:
    if not pointer or not job.request.topic.startswith(PIPE_TOPICS):
        return ()
    try:
        return msgspec.json.decode(await desk.get_blob(pointer), type=_Way).hops
    except (PenstockError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


class _Way(Struct, frozen=True):
    """Of a result, the part that is looked at."""

    hops: tuple[HopTime, ...] = ()


def _print(dossier: Dossier) -> None:
    from rich.text import Text

    job, now = dossier.job, time.time()
    title = Text.assemble("job ", (job.job_id, "bold"), "  ", styled(job.state))
    facts = Listing("", "fact", flexible=("fact",), folded=("fact",), header=False)
    for name, value in _facts(dossier, now):
        facts.add(Text(f"  {name}", "dim"), value)
    emit(title, facts, "", _history(dossier.history, now))


def _facts(dossier: Dossier, now: float) -> Iterator[tuple[str, str]]:
    job, request = dossier.job, dossier.job.request
    yield "now", dossier.why
    yield "topic", request.topic
    if pipeline_of(request.topic) is not None:
        yield "stages", f"see 'penstock pipeline status {short_id(job.job_id)}'"
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
    if len(dossier.chain) > 1:
        yield "retries", " → ".join(_named(name, job.job_id) for name in dossier.chain)
    if (result := job.result) is not None:
        if result.error_code:
            yield "error", f"{result.error_code}: {result.error_message or ''}".rstrip(": ")
        if dossier.returned:
            yield "result", dossier.returned
    for index, hop in enumerate(dossier.hops):
        yield "" if index else "hops", _hop(hop)


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


def _named(job_id: str, this: str) -> str:
    return f"{short_id(job_id)} (this)" if job_id == this else short_id(job_id)


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
        "parent": request.parent_job_id,
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
    listing = Listing(
        *("#", "TIME", "AFTER", "EVENT", "STATE", "BY", "REASON"),
        flexible=("REASON",),
        folded=("REASON",),
        right=("#", "AFTER"),
    )
    before: float | None = None
    for entry in history:
        listing.add(
            str(entry.n),
            moment(entry.at, now),
            "" if before is None else span(entry.at - before),
            f"{entry.event} {entry.attempt}" if entry.worker_id else entry.event.value,
            styled(entry.after),
            entry.actor,
            " ".join(filter(None, (entry.worker_id and f"to {entry.worker_id}", entry.reason))),
        )
        before = entry.at
    return listing
