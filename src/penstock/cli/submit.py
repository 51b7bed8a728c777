"""`penstock submit`: one job, or one for each line of a file."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.exits import Exit
from penstock.cli.ids import meant_or_given
from penstock.cli.paper import print_json, record
from penstock.cli.parameters import (
    DURATION,
    MOMENT,
    PRIORITY,
    as_json,
    read_lines,
    read_object,
    read_source,
    several,
)
from penstock.cli.place import Place, client_at, placed, run
from penstock.cli.result import print_result, value_of
from penstock.cli.terminal import echo
from penstock.core.job import ParentPolicy, RetryPolicy, Unique
from penstock.ports.engine_api import EngineApi


@click.command()
@click.argument("topic")
@click.option("--input", "given", metavar="JSON|@FILE|-", help="The arguments, a JSON object.")
@click.option(
    "--each", metavar="@FILE|-", help="Submit a job for each line, a JSON object; all or none."
)
@click.option("--wait", is_flag=True, help="Wait for the end; print the result.")
@click.option("--wait-timeout", type=DURATION, help="Wait no longer than this; the job goes on.")
@click.option("--priority", type=PRIORITY, help="How urgent it is.")
@several("--env", "Passed on to the job; may be repeated.")
@several("--label", "Kept with the job; may be repeated.")
@click.option("--id", "job_id", help="Its id; the same id again is the same job.")
@click.option("--key", help="An idempotency key: the same key again is the same job.")
@click.option("--timeout", type=DURATION, help="How long one attempt may run.")
@click.option("--deadline", type=MOMENT, metavar="TIME|+DURATION", help="When it must have ended.")
@click.option("--delay", type=DURATION, help="How long to wait before it may start.")
@click.option("--retries", type=click.IntRange(0), help="How often to try again if it fails.")
@click.option("--idempotent/--not-idempotent", default=None, help="Whether it may run twice.")
@click.option("--tenant", help="Whom it belongs to.")
@click.option("--parent", metavar="JOB", help="The job that it is a child of: it ends with it.")
@click.option("--detached", is_flag=True, default=None, help="It goes on if its parent fails.")
@click.option("--workflow", metavar="ID", help="The workflow that it is a step of.")
@click.option("--step", type=click.IntRange(0), help="Its place in the workflow.")
@click.option(
    "--after",
    multiple=True,
    metavar="JOB",
    help="Wait until this job has ended; may be repeated.",
)
@click.option(
    "--if-parent-fails",
    type=click.Choice([one.value for one in ParentPolicy]),
    help="What to do if one of those does not succeed; else it is cancelled.",
)
@click.option(
    "--unique", metavar="KEY", help="While a job with this key is there, no other is made."
)
@click.option(
    "--unique-for", type=DURATION, help="So long after it was accepted, rather than to its end."
)
@click.option("--capability", help="What it is going to do, as safety rules know it.")
@click.option("--risk-tag", "risk_tags", multiple=True, help="For safety rules; may be repeated.")
@click.option("--cost", "estimated_cost", type=float, help="An estimate, for safety rules.")
@click.option(
    "--app",
    metavar="MODULE:APP",
    help="Check the arguments against this application, and take its defaults.",
)
@as_json
@placed
@click.pass_obj
def submit(
    place: Place,
    /,
    topic: str,
    given: str | None,
    each: str | None,
    wait: bool,
    wait_timeout: float | None,
    app: str | None,
    json: bool,
    **options: Any,
) -> int:
    """Submit a job; prints its id.

    With --wait it prints the result instead, and the exit code says how the job ended.
    """
    if given is not None and each is not None:
        raise click.UsageError("--input and --each don't go together")
    if each is not None and wait:
        raise click.UsageError("--each and --wait don't go together; see 'penstock result'")
    if each is not None:
        inputs = list(read_lines("--each", read_source("--each", each)))
        return run(_submit_each(place, topic, inputs, _options(options), app, json))
    payload = None if given is None else read_object("--input", read_source("--input", given))
    patience = (wait or wait_timeout is not None, wait_timeout)
    submitted: list[str] = []
    work = _submit(place, topic, payload, _options(options), app, json, patience, submitted)
    try:
        return run(work)
    except KeyboardInterrupt:
        if submitted:
            _say_how_to_go_on(place, submitted[0])
            return Exit.INTERRUPTED
        raise


async def _submit(
    place: Place,
    topic: str,
    payload: dict[str, Any] | None,
    options: Any,
    app: str | None,
    json: bool,
    patience: tuple[bool, float | None],
    submitted: list[str],
) -> int:
    async with client_at(place, _application(app)) as client:
        handle = await client.asubmit(topic, payload, **await _named(client.api, options))
        submitted.append(handle.job_id)
        if not patience[0]:
            print_json(record(handle.record)) if json else echo(handle.job_id)
            return Exit.OK
        job = await handle.await_end(patience[1])
        if json:
            print_json({**record(job), "value": await value_of(client.api, job)})
        return await print_result(client.api, job, silent=json)


async def _submit_each(
    place: Place,
    topic: str,
    inputs: list[dict[str, Any]],
    options: Any,
    app: str | None,
    json: bool,
) -> int:
    async with client_at(place, _application(app)) as client:
        handles = await client.asubmit_many(topic, inputs, **await _named(client.api, options))
    if json:
        print_json([record(handle.record) for handle in handles])
    else:
        echo("".join(f"{handle.job_id}\n" for handle in handles), nl=False)
    return Exit.OK


async def _named(api: EngineApi, options: dict[str, Any]) -> dict[str, Any]:
    """The same, with whole ids of the jobs that it names."""
    named = dict(options)
    if "parent" in named:
        named["parent"] = await meant_or_given(api, named["parent"])
    if "after" in named:
        named["after"] = [await meant_or_given(api, text) for text in named["after"]]
    return named


def _options(said: dict[str, Any]) -> dict[str, Any]:
    """The command's options as those of `Client.submit`, without those not given."""
    period = said.pop("unique_for")
    if period is not None and said["unique"] is None:
        raise click.UsageError("--unique-for goes with --unique KEY")
    if said["if_parent_fails"] is not None and not said["after"]:
        raise click.UsageError("--if-parent-fails goes with --after JOB")
    renamed = {"workflow": "workflow_id", "step": "step_index", "label": "labels"}
    options = {
        renamed.get(name, name): value for name, value in said.items() if value not in (None, ())
    }
    for name in ("env", "labels"):
        if name in options:
            options[name] = dict(options[name])
    if period is not None:
        options["unique"] = Unique(options["unique"], period=period)
    if (retries := options.pop("retries", None)) is not None:
        options["retry"] = RetryPolicy(retries=retries)
    return options


def _application(reference: str | None) -> Any:
    from penstock.app import load_app

    return load_app(reference) if reference else None


def _say_how_to_go_on(place: Place, job_id: str) -> None:
    again = f"penstock {place.spelled()}"
    echo(f"\npenstock: job {job_id} goes on", err=True)
    echo(f"  follow it with '{again}watch {job_id}'", err=True)
    echo(f"  end it with '{again}cancel {job_id}'", err=True)
