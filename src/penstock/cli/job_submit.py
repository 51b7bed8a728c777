"""`penstock submit`: one job, or one for each line of a file."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.engine import EngineRef, run
from penstock.cli.exits import Exit
from penstock.cli.groups import command
from penstock.cli.job_result import print_result
from penstock.cli.options import (
    job_fields,
    job_options,
    options,
    read_lines,
    read_object,
    read_source,
    started,
)
from penstock.cli.output import echo, print_done, print_json, record
from penstock.cli.selection import job_id_of
from penstock.cli.service import cancelling
from penstock.core.job import ParentPolicy, Unique
from penstock.ports.engine_api import EngineApi


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
def submit(
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
    options, application = _options(said), _application(app)
    payload = None if given is None else read_object("--input", read_source("--input", given))
    inputs = None if each is None else list(read_lines("--each", read_source("--each", each)))

    async def submitted() -> int:
        async with engine.client(application) as client:
            named = await _named(client.api, options)
            if inputs is not None:
                handles = await client.asubmit_many(topic, inputs, **named)
                if json:
                    print_json([record(handle.record) for handle in handles])
                else:
                    echo("".join(f"{handle.job_id}\n" for handle in handles), nl=False)
                return Exit.OK
            handle = await client.asubmit(topic, payload, **named)
            if not wait:
                print_done(json, record(handle.record), handle.job_id)
                return Exit.OK
            async with cancelling(handle.acancel) as interrupted:
                job = await handle.await_end(wait_timeout)
            if interrupted:
                return Exit.INTERRUPTED
            return await print_result(client.api, job, json=json)

    return run(submitted())


async def _named(api: EngineApi, options: dict[str, Any]) -> Any:
    """The same, with whole ids of the jobs that it names."""
    named = dict(options)
    if "parent" in named:
        named["parent"] = await job_id_of(api, named["parent"])
    if "after" in named:
        named["after"] = [await job_id_of(api, text) for text in named["after"]]
    return named


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


def _application(reference: str | None) -> Any:
    from penstock.app import load_app

    return load_app(reference) if reference else None
