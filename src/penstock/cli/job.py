"""`penstock job`, and its short forms that submit jobs and act on them."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import replace

from penstock.app import load_app
from penstock.app.finding import job_id_of
from penstock.app.service import cancelling
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.groups import Commands, command
from penstock.cli.job_list import ps
from penstock.cli.job_result import artifacts, print_result, result, steps
from penstock.cli.job_show import show
from penstock.cli.job_watch import logs, watch
from penstock.cli.live import saying_why
from penstock.cli.options import (
    SHARED,
    job_fields,
    job_options,
    options,
    read_lines,
    read_object,
    read_source,
    started,
)
from penstock.cli.output import echo_lines, print_done, print_json, record
from penstock.cli.selection import Done, act, chosen
from penstock.core.job import Job, ParentPolicy, Unique
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.engine_api import EngineApi

# -- submitting --------------------------------------------------------------------


@command()
@options(
    """
    --each @FILE|-                     Submit a job for each line, a JSON object; all or none.
    --id ID as job_id                  Job id. Submitting the same id again returns the existing
            job.
    --key KEY                          Idempotency key. Submitting the same key again returns the
            existing job.
    --deadline TIME|+DURATION          Time by which it must have ended.
    --delay DURATION                   How long to wait before it may start.
    --tenant TENANT                    Its tenant.
    --parent JOB                       Parent job. If the parent does not succeed, this job is
            cancelled.
    --workflow ID                      Workflow that the job is a step of.
    --step 0..                         Step number in the workflow.
    --after JOB...                     Start only after this job has ended; may be repeated.
    --if-parent-fails IF_PARENT_FAILS  If a job of --after does not succeed: cancel this job (the
            default) or run it.
    --unique KEY                       At most one unfinished job with this key at a time.
    --unique-for DURATION              Keep that key taken for this long from acceptance, not until
            the end.
    --app MODULE:APP                   Validate the arguments against this application and apply its
            defaults.
    """,
    if_parent_fails=click.Choice([one.value for one in ParentPolicy]),
)
@started(False)
@job_options
@click.option(
    "--detached", is_flag=True, default=None, help="Keep it running if its parent does not succeed."
)
async def submit(
    engine: EngineRef,
    /,
    topic: str,
    given: str | None,
    each: str | None,
    wait: bool,
    wait_timeout: float | None,
    app: str | None,
    json: bool,
    **said: Any,
) -> int:
    """Submit a job; prints its id.

    With --wait it prints the result instead, and the exit code says how the job ended. Ctrl-C
    then cancels the job.
    """
    if given is not None and each is not None:
        raise click.UsageError("--input and --each don't go together")
    wait = wait or wait_timeout is not None
    if each is not None and wait:
        raise click.UsageError("--each and --wait don't go together; see 'penstock result'")
    options, application = _options(said), load_app(app) if app else None
    payload = None if given is None else read_object("--input", read_source("--input", given))
    inputs = None if each is None else list(read_lines("--each", read_source("--each", each)))
    async with engine.client(application) as client:
        if "parent" in options:
            options["parent"] = await job_id_of(client.api, options["parent"])
        if "after" in options:
            options["after"] = [await job_id_of(client.api, text) for text in options["after"]]
        if inputs is not None:
            handles = await client.asubmit_many(topic, inputs, **options)
            if json:
                print_json([record(handle.record) for handle in handles])
            else:
                echo_lines(handle.job_id for handle in handles)
            return Exit.OK
        handle = await client.asubmit(topic, payload, **options)
        if not wait:
            print_done(json, record(handle.record), handle.job_id)
            return Exit.OK
        why = saying_why(client.api, handle.job_id)
        async with why, cancelling(handle.acancel) as interrupted:
            job = await handle.await_end(wait_timeout)
        if interrupted:
            return Exit.INTERRUPTED
        return await print_result(client.api, job, json=json)


def _options(said: dict[str, Any]) -> dict[str, Any]:
    """The command's options as those of `Client.submit`, without those not given."""
    period = said.pop("unique_for")
    if period is not None and said["unique"] is None:
        raise click.UsageError("--unique-for goes with --unique KEY")
    if said["if_parent_fails"] is not None and not said["after"]:
        raise click.UsageError("--if-parent-fails goes with --after JOB")
    options = job_fields(said)
    if period is not None:
        options["unique"] = Unique(options["unique"], period=period)
    return options


# -- acts on jobs ------------------------------------------------------------------


@command()
@chosen
@options(
    """
    --children                   And the jobs that they are parents of.
    --wait-timeout DURATION=10s  How long to wait for running work to end.
    """
)
@SHARED["states"]
async def cancel(
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

    return await act(
        engine,
        said,
        "cancel",
        cancel_one,
        lambda api, query: api.cancel_many(replace(query, states=wanted), reason=reason),
        "asked {} to end",
        states=wanted or unfinished,
    )


def _cancelled(job: Job) -> tuple[Exit, str]:
    if job.state is JobState.CANCELLED:
        return Exit.OK, "cancelled"
    if job.is_final:
        return Exit.CONFLICT, f"had ended already: {job.state}"
    return Exit.NOT_YET, f"was asked to end and is still {job.state}"


@command()
@chosen
async def retry(engine: EngineRef, /, **said: Any) -> int:
    """Retry jobs that failed or timed out.

    The jobs named, or all dead ones that match: those that ended FAILED or TIMEOUT and were not
    retried ('penstock ps --dead' lists them). A retry is a new job, which keeps every field of the
    old and passes the safety rules again. Prints the ids of the new jobs, or with filters how many
    there are. `-` reads ids from standard input.
    """

    async def retry_one(api: EngineApi, job_id: str) -> Done:
        new = await api.retry(job_id)
        return Exit.OK, record(new), new.job_id

    return await act(
        *(engine, said, "retry", retry_one),
        lambda api, query: api.retry_many(query),
        "retried {}",
        dead=True,
    )


@command()
@chosen
@options("--snapshot SNAPSHOT=  Only if the job is held by this snapshot of the rules.")
async def approve(engine: EngineRef, /, reason: str, snapshot: str, **said: Any) -> int:
    """Approve jobs that are awaiting approval.

    The jobs named, or all that match, after confirmation. Says of each whether it goes on or needs
    more approvals. `-` reads ids from standard input.
    """

    async def approve_one(api: EngineApi, job_id: str) -> Done:
        job = await api.approvals.approve(job_id, reason=reason, snapshot=snapshot)
        return Exit.OK, record(job), f"{job.job_id} {_approved(job)}"

    return await act(engine, said, "approve", approve_one, awaiting_approval=True)


def _approved(job: Job) -> str:
    hold = job.hold
    if hold is None or hold.approved:
        return "approved: it goes on"
    missing = hold.terms.needed - len(hold.votes)
    return f"approved by {len(hold.votes)} of {hold.terms.needed}: {missing} more needed"


@command()
@chosen
async def reject(engine: EngineRef, /, reason: str, **said: Any) -> int:
    """Reject jobs that are awaiting approval: they end DENIED.

    The jobs named, or all that match, after confirmation. `-` reads ids from standard input.
    """

    async def reject_one(api: EngineApi, job_id: str) -> Done:
        job = await api.approvals.reject(job_id, reason=reason)
        return Exit.OK, record(job), f"{job.job_id} rejected"

    return await act(engine, said, "reject", reject_one, awaiting_approval=True)


# -- the group ---------------------------------------------------------------------


@click.group(cls=Commands)
def job() -> None:
    """Submit, list, show, watch, cancel and retry jobs.

    `penstock submit`, `ps` (list), `show`, `watch`, `logs`, `result`, `cancel`, `retry`,
    `approve` and `reject` are short forms.
    """


job.add_command(submit)
job.add_command(ps, "list")
for one in (show, watch, logs, result, artifacts, steps, cancel, retry, approve, reject):
    job.add_command(one)
