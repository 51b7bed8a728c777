"""`penstock result`: what a job returned."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from penstock.app.client import outcome_of
from penstock.cli.exits import Exit
from penstock.cli.ids import meant
from penstock.cli.paper import print_bytes, print_json, record
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.place import Place, placed, reading_at, run
from penstock.cli.terminal import escaped, harmless
from penstock.core.errors import WaitTimedOut
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi, newest_try


@click.command()
@click.argument("job")
@click.option("--wait", is_flag=True, help="Wait for the end.")
@click.option("--timeout", type=DURATION, help="Wait no longer than this; the job goes on.")
@click.option("--output", metavar="FILE", help="Write it to this file as it is.")
@click.option("-r", "--raw", is_flag=True, help="Print a string without its quotes.")
@as_json
@placed
@click.pass_obj
def result(
    place: Place,
    job: str,
    wait: bool,
    timeout: float | None,
    output: str | None,
    raw: bool,
    json: bool,
) -> int:
    """Print what a job returned.

    Retries are followed. The exit code says how the job ended. With --json it prints the
    final record, and what it returned as "value".
    """
    return run(_result(place, job, wait or timeout is not None, timeout, output, raw, json))


async def _result(
    place: Place,
    text: str,
    wait: bool,
    timeout: float | None,
    output: str | None,
    raw: bool,
    json: bool,
) -> int:
    async with reading_at(place) as api:
        job = await meant(api, text)
        ended = await api.wait(job.job_id, timeout) if wait else await _last(api, job)
        if json:
            print_json({**record(ended), "value": await value_of(api, ended)})
        return await print_result(api, ended, output=output, raw=raw, silent=json)


async def _last(api: EngineApi, job: Job) -> Job:
    job = await newest_try(api, job)
    if not job.is_final:
        raise WaitTimedOut(
            f"job {job.job_id} is {job.state}: it has no result yet", hint="--wait waits for it"
        )
    return job


async def print_result(
    api: EngineApi, job: Job, *, output: str | None = None, raw: bool = False, silent: bool = False
) -> int:
    """Print, or write, what an ended job returned; raises the JobEnded of any other end."""
    data = (await outcome_of(api, job)).payload
    if output is not None:
        _write(output, data)
    elif not silent:
        print_bytes(_shown(data, raw))
    return Exit.OK


async def value_of(api: EngineApi, job: Job) -> Any:
    """What a job returned, or None."""
    if job.state is not JobState.SUCCEEDED:
        return None
    try:
        return msgspec.json.decode((await outcome_of(api, job)).payload)
    except _NOT_JSON:
        return None


def _write(path: str, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise click.BadParameter(
            f"can't write {path}: {error.strerror}", param_hint="--output"
        ) from error


def _shown(data: bytes, raw: bool) -> bytes:
    if not sys.stdout.isatty():
        return _text(data) if raw else data
    try:
        data.decode()
        document = msgspec.json.format(data, indent=2)
    except _NOT_JSON:
        if not data.isascii():
            raise click.UsageError("the result is not text; write it with --output") from None
        document = data
    if raw or document is data:
        return harmless(_text(data).decode("utf-8", "replace")).encode()
    return escaped(document)


def _text(data: bytes) -> bytes:
    """The text that a JSON string stands for; all else as it is."""
    try:
        return msgspec.json.decode(data, type=str).encode()
    except _NOT_JSON:
        return data


_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
