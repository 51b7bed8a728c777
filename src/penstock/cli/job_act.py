"""`penstock cancel`, `retry`, `approve` and `reject`."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import replace

from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.groups import command
from penstock.cli.options import options, states, waits
from penstock.cli.output import record
from penstock.cli.selection import Choice, Done, chosen
from penstock.core.job import Job
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.engine_api import EngineApi


@command()
@chosen
@options("--children  And the jobs that they are parents of.")
@waits("10s", "How long to wait for running work to end.")
@states
def cancel(
    engine: EngineRef, /, children: bool, reason: str, wait_timeout: float, **said: Any
) -> int:
    """Cancel jobs.

    The jobs named, or all unfinished ones that match. For each job named it prints whether it was
    cancelled or had already ended (exit code 4). `-` reads ids from standard input. With filters it
    asks for confirmation, then asks every job that matches to end, and does not wait for them.
    """
    if children and not said["jobs"]:
        raise click.UsageError("--children goes with ids; filters match children, too")
    wanted = tuple(map(JobState, said["states"]))
    if ended := [state for state in wanted if state in TERMINAL]:
        raise click.UsageError(f"--state {ended[0]}: what has ended can't be cancelled")
    unfinished = tuple(state for state in JobState if state not in TERMINAL)

    async def cancel_one(api: EngineApi, job_id: str) -> Done:
        done = await api.cancel(job_id, reason=reason, children=children, timeout=wait_timeout)
        code, what = _cancelled(done.job)
        return code, {**record(done.job), "ended": done.ended}, f"{done.job.job_id} {what}"

    return Choice(engine, said, {"states": wanted or unfinished}).act(
        "cancel",
        cancel_one,
        lambda api, query: api.cancel_many(replace(query, states=wanted), reason=reason),
        "asked {} to end",
    )


def _cancelled(job: Job) -> tuple[Exit, str]:
    if job.state is JobState.CANCELLED:
        return Exit.OK, "cancelled"
    if job.is_final:
        return Exit.CONFLICT, f"had ended already: {job.state}"
    return Exit.NOT_YET, f"was asked to end and is still {job.state}"


@command()
@chosen
def retry(engine: EngineRef, /, **said: Any) -> int:
    """Retry jobs that failed or timed out.

    The jobs named, or all dead ones that match: those that ended FAILED or TIMEOUT and were not
    retried ('penstock ps --dead' lists them). A retry is a new job, which keeps every field of the
    old and passes the safety rules again. Prints the ids of the new jobs, or with filters how many
    there are. `-` reads ids from standard input.
    """

    async def retry_one(api: EngineApi, job_id: str) -> Done:
        new = await api.retry(job_id)
        return Exit.OK, record(new), new.job_id

    return Choice(engine, said, {"dead": True}).act(
        "retry", retry_one, lambda api, query: api.retry_many(query), "retried {}"
    )


@command()
@chosen
@options("--snapshot SNAPSHOT=  Only if the job is held by this snapshot of the rules.")
def approve(engine: EngineRef, /, reason: str, snapshot: str, **said: Any) -> int:
    """Approve jobs that are awaiting approval.

    The jobs named, or all that match, after confirmation. Says of each whether it goes on or needs
    more approvals. `-` reads ids from standard input.
    """

    async def approve_one(api: EngineApi, job_id: str) -> Done:
        job = await api.approvals.approve(job_id, reason=reason, snapshot=snapshot)
        return Exit.OK, record(job), f"{job.job_id} {_approved(job)}"

    return Choice(engine, said, {"awaiting_approval": True}).act("approve", approve_one)


def _approved(job: Job) -> str:
    hold = job.hold
    if hold is None or hold.approved:
        return "approved: it goes on"
    missing = hold.terms.needed - len(hold.votes)
    return f"approved by {len(hold.votes)} of {hold.terms.needed}: {missing} more needed"


@command()
@chosen
def reject(engine: EngineRef, /, reason: str, **said: Any) -> int:
    """Reject jobs that are awaiting approval: they end DENIED.

    The jobs named, or all that match, after confirmation. `-` reads ids from standard input.
    """

    async def reject_one(api: EngineApi, job_id: str) -> Done:
        job = await api.approvals.reject(job_id, reason=reason)
        return Exit.OK, record(job), f"{job.job_id} rejected"

    return Choice(engine, said, {"awaiting_approval": True}).act("reject", reject_one)
