"""`penstock show`: everything about one job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.app.finding import find_job
from penstock.app.job_details import SHOWN, JobDetails, job_details
from penstock.cli.formats import layers, moment, pairs, plural, run_time, short_id, span
from penstock.cli.groups import command
from penstock.cli.job_list import error_of, job_row, who_may
from penstock.cli.options import options
from penstock.cli.output import (
    Form,
    JobId,
    Listing,
    Row,
    Wrapped,
    console,
    facts,
    print_one,
    record,
    rich_text,
    styled,
)
from penstock.cli.pipeline_display import stage_table
from penstock.core.job import NO_RETRY, Job, JobRequest, chain_of
from penstock.core.journal import Transition
from penstock.ports.engine_api import EngineApi, newest_try
from penstock.ports.store import StepCount
from penstock.workloads.llm.values import HopTime

if TYPE_CHECKING:
    from rich.console import RenderableType

_GLANCE = 2000
"""Characters of a payload that are shown, at most."""
_LINES = 3
"""Lines of it on a terminal."""
_MARGIN = 20
"""Columns for the name of a fact."""


@command()
@options("--tries  The history of each try, not of the newest only.")
async def show(reading: EngineApi, job: str, tries: bool, form: Form) -> None:
    """Show a job: its state, the reason, and its history.

    A job and its retries are one: any of their ids names it, and what is shown is the newest try.
    With --json it is the record, and "why", "history" (of the newest try), "chain" (the ids of all
    tries, in order), "children" (how many jobs were submitted inside it, by state) and "steps" (how
    many rows it checkpointed, by name and outcome).
    """
    newest = await newest_try(reading, await find_job(reading, job))
    most = min(_GLANCE, _LINES * (console().width - _MARGIN))
    details = await job_details(reading, newest, most=most, all_tries=tries)
    print_one(
        form,
        {
            **record(details.job),
            "why": details.why,
            "history": details.histories[-1],
            "chain": [one.job_id for one in details.tries],
            "children": details.child_counts,
            "steps": details.steps,
        },
        chain_of(details.job.request),
        lambda: _page(details, wide=form.wide),
    )


def _page(details: JobDetails, *, wide: bool) -> Iterator[RenderableType]:
    job, now = details.job, time.time()
    first, count = chain_of(job.request), job.request.try_number
    tries = f"  {count:,} tries" if count > 1 else ""
    yield rich_text("job ", (first, "bold"), "  ", styled(job.state), tries)
    yield facts(_facts(details, now))
    if details.run is not None and details.run.stages:
        yield ""
        yield from stage_table(details.run, now)
    if count > 1:
        yield ""
        yield Listing([_try(one, now) for one in details.tries[-SHOWN:]], wide=wide)
    if children := details.children:
        row = partial(job_row, why=details.child_reasons, now=now, title="CHILD")
        yield ""
        yield Listing([row(one) for one in children], wide=wide)
    shown = details.tries[-len(details.histories) :]
    for one, history in zip(shown, details.histories, strict=True):
        yield ""
        if len(details.histories) > 1:
            head = f"try {one.request.try_number}  {one.job_id}  "
            yield rich_text((head, "bold"), styled(one.state))
        yield _history(history, now, wide)


def _try(job: Job, now: float) -> Row:
    return {
        "TRY": job.request.try_number,
        "JOB": JobId(job.job_id),
        "STATE": styled(job.state),
        "AGE": span(now - job.accepted_at),
        "TOOK": run_time(job, now),
        "ERROR": error_of(job),
    }


def _facts(details: JobDetails, now: float) -> Iterator[tuple[str, str]]:
    job, request = details.job, details.job.request
    yield "now", details.why
    yield "topic", request.topic
    yield "priority", request.priority.value
    yield "tenant", request.tenant
    if details.given:
        yield "input", details.given
    yield from _asked(request, now)
    if details.parents:
        said = ", ".join(f"{short_id(name)} {state}" for name, state in details.parents)
        yield "after", f"{said}; if one fails: {request.if_parent_fails}"
    yield from _judged(job, now)
    yield "accepted", f"{moment(job.accepted_at, now)} ({span(now - job.accepted_at)} ago)"
    if job.worker_id is not None:
        yield "worker", f"{job.worker_id}, pool {job.pool}, attempt {job.attempt}"
    if job.started_at is not None:
        ran = run_time(job, now)
        yield "ran" if job.is_final else "runs", f"{ran}, from {moment(job.started_at, now)}"
    if details.steps and details.run is None:
        yield "steps", _steps(details.steps)
    if counts := details.child_counts:
        said = ", ".join(f"{count:,} {state}" for state, count in counts.items())
        more = sum(counts.values()) > len(details.children)
        where = f"; all: penstock ps --parent {short_id(chain_of(request))}" if more else ""
        yield "children", f"{said}{where}"
    if (result := job.result) is not None:
        if result.error_code:
            yield "error", f"{result.error_code}: {result.error_message or ''}".rstrip(": ")
        if details.returned:
            yield "result", details.returned
    for index, hop in enumerate(details.hops):
        yield "" if index else "hops", _hop(hop)


def _steps(counts: list[StepCount]) -> str:
    """As in `fetch: 980 ok, 20 failed; parse: 7`."""
    said: dict[str, list[str]] = {}
    for count in counts:
        said.setdefault(count.name, []).append(f"{count.rows:,} {count.outcome}".rstrip())
    return "; ".join(f"{name}: {', '.join(parts)}" for name, parts in said.items())


def _hop(hop: HopTime) -> str:
    took = [f"computed {span(hop.compute_ms / 1000)}"]
    if hop.queue_ms:
        took.append(f"queued {span(hop.queue_ms / 1000)}")
    if hop.network_ms:
        took.append(f"on the network {span(hop.network_ms / 1000)}")
    passes = f"{hop.passes:,} pass" if hop.passes == 1 else f"{hop.passes:,} passes"
    return f"{layers(hop.layers)} on {hop.node}: {passes}, {', '.join(took)}{hop.lossy}"


def _judged(job: Job, now: float) -> Iterator[tuple[str, str]]:
    """The decision of the safety rules, and the approvals."""
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
    yes = f"{len(hold.votes)} of {plural(hold.terms.needed, 'approval')}"
    if hold.approved or job.is_final:
        yield "approval", yes
    else:
        left = f"until {moment(hold.until, now)} (for {span(max(0.0, hold.until - now))})"
        yield "approval", f"{yes}; {who_may(hold)} may approve, {left}"
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
        "labels": pairs(request.labels),
        "env": pairs(request.env),
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


def _history(history: list[Transition], now: float, wide: bool) -> Listing:
    """On a narrow terminal, who did it and why are one column, so that both can be read."""
    rows: list[Row] = []
    before: float | None = None
    for entry in history:
        reason = " ".join(filter(None, (entry.worker_id and f"to {entry.worker_id}", entry.reason)))
        row: Row = {
            "TIME": moment(entry.at, now),
            "AFTER": None if before is None else span(entry.at - before),
            "EVENT": f"{entry.event} {entry.attempt}" if entry.worker_id else entry.event.value,
            "STATE": styled(entry.after),
        }
        if wide:
            rows.append({"#": entry.n, **row, "BY": entry.actor, "REASON": Wrapped(reason)})
        else:
            said = ": ".join(filter(None, (entry.actor, reason)))
            rows.append({**row, "BY: REASON": Wrapped(said)})
        before = entry.at
    return Listing(rows)
