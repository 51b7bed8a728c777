"""`penstock ps`, which is `penstock job list`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.app.finding import every_job
from penstock.app.job_details import reasons
from penstock.cli.formats import Whole, run_time, short_id, span
from penstock.cli.groups import command
from penstock.cli.options import options
from penstock.cli.output import Form, JobId, Row, print_list, record, styled
from penstock.cli.selection import filtered, query_of
from penstock.core.job import Job, chain_of
from penstock.core.verdict import Hold
from penstock.lifecycles.canonical import HELD, TERMINAL, JobState
from penstock.ports.engine_api import EngineApi
from penstock.ports.store import JobQuery


@command()
@options(
    """
    --active             Not ended yet.
    --awaiting-approval  Awaiting approval, oldest first.
    --dead               Ended FAILED or TIMEOUT and not retried.
    --tries              List every try separately.
    --all as everything  List all, without a limit.
    -n, --limit 1..=20   Maximum number of results.
    """
)
@filtered
async def ps(
    reading: EngineApi,
    states: tuple[str, ...],
    active: bool,
    awaiting_approval: bool,
    dead: bool,
    limit: int,
    tries: bool,
    everything: bool,
    before: int | None,
    form: Form,
    **filters: Any,
) -> None:
    """List jobs, newest first.

    All filters must match. A job and its retries are one line, with the id of the first try and
    the state of the newest; the filters are about the newest. Jobs of a workflow come in the order
    of its steps. With --json it is an array of records, of the newest tries.
    """
    wanted = tuple(map(JobState, states))
    if active:
        wanted += tuple(s for s in JobState if s not in TERMINAL and s not in wanted)
    more = {
        "states": wanted,
        "awaiting_approval": awaiting_approval or None,
        "oldest_first": awaiting_approval,
        "dead": dead,
        "tries": tries,
        "before": before,
        "limit": limit,
    }

    query = await query_of(reading, filters, **more)
    jobs = await (every_job(reading, query) if everything else reading.find(query))
    why = await reasons(reading, jobs) if form.is_table else {}
    is_page = len(jobs) == limit and not everything and not query.workflow_id
    row = partial(job_row, why=why, folded=query.folded)
    print_list(
        form,
        jobs,
        partial(approval_row if awaiting_approval else row, now=time.time()),
        empty=_empty(query),
        json=record,
        more=f"--before {jobs[-1].seq}, or --all" if is_page else "",
    )


def _empty(query: JobQuery) -> str:
    if query.awaiting_approval:
        return "no job is awaiting approval"
    return "no dead jobs" if query.dead else "no such jobs"


def job_row(
    job: Job, *, why: Mapping[str, str], now: float, folded: bool = True, title: str = "JOB"
) -> Row:
    """A job with what it waits for or does, or why it ended so; `folded`: with its retries."""
    request = job.request
    return {
        title: JobId(chain_of(request) if folded else job.job_id),
        "STATE": styled(job.state),
        "TOPIC": request.topic,
        "+PRIORITY": request.priority.value,
        "TENANT": request.tenant,
        "TRIES" if folded else "TRY": request.try_number,
        "AGE": span(now - job.accepted_at),
        "TOOK": run_time(job, now),
        "NOTE": why.get(job.job_id) or _note(job),
    }


def _note(job: Job) -> str:
    """The most important fact about it."""
    if job.successor is not None:
        return f"retried as {short_id(job.successor)}"
    if job.state in HELD:
        asked = ", asked to end" if job.cancel_requested else ""
        attempt = f", attempt {job.attempt}" if job.attempt > 1 else ""
        return f"on {job.worker_id}{attempt}{asked}"
    return error_of(job)


def error_of(job: Job) -> str:
    """What went wrong, on one line."""
    result = job.result
    if result is None:
        return ""
    code = None if result.error_code == job.state.value else result.error_code
    return ": ".join(filter(None, (code, result.error_message)))


def approval_row(job: Job, now: float) -> Row:
    """A job that is awaiting approval: who may approve it, how many did, how long is left."""
    assert job.hold is not None
    hold = job.hold
    return {
        "JOB": JobId(chain_of(job.request)),
        "TOPIC": job.request.topic,
        "FROM": job.request.principal,
        "VOTES": Whole(f"{len(hold.votes)}/{hold.terms.needed}"),
        "LEFT": span(max(0.0, hold.until - now)),
        "APPROVERS": who_may(hold),
        "RULE": hold.rule_id,
        "SNAPSHOT": hold.snapshot,
    }


def who_may(hold: Hold) -> str:
    """Who may approve it."""
    return ", ".join(hold.terms.approvers) or "any approver"
