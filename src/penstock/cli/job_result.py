"""`penstock result`, `job artifacts` and `job steps`: what a job left."""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from penstock.app.client import outcome_of
from penstock.app.finding import find_job
from penstock.cli.exits import Exit
from penstock.cli.formats import moment
from penstock.cli.groups import command
from penstock.cli.options import options
from penstock.cli.output import Form, Row, print_bytes, print_json, print_line, print_list, record
from penstock.core.artifact import Artifact
from penstock.core.errors import WaitTimedOut
from penstock.core.job import Job
from penstock.core.ledger import Step
from penstock.core.steps import MAX_PAGE_ROWS
from penstock.core.text import escaped, harmless
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi, newest_try
from penstock.ports.store import StepQuery


async def _ended(
    api: EngineApi, text: str, wait: bool, wait_timeout: float | None, has: str
) -> Job:
    """The newest try, which has ended. Raises WaitTimedOut."""
    job = await find_job(api, text)
    if wait or wait_timeout is not None:
        return await api.wait(job.job_id, wait_timeout)
    job = await newest_try(api, job)
    if not job.is_final:
        raise WaitTimedOut(
            f"job {job.job_id} is {job.state}: it has {has} yet", hint="--wait waits for it"
        )
    return job


# -- result ------------------------------------------------------------------------


@command()
@options(
    """
    --output FILE  Write it to this file as it is.
    -r, --raw      Print a string without its quotes.
    """
)
async def result(
    reading: EngineApi,
    job: str,
    wait: bool,
    wait_timeout: float | None,
    output: str | None,
    raw: bool,
    json: bool,
) -> int:
    """Print what a job returned.

    Retries are followed. The exit code says how the job ended. With --json it prints the final
    record, and what the job returned as "value".
    """
    ended = await _ended(reading, job, wait, wait_timeout, "no result")
    return await print_result(reading, ended, output=output, raw=raw, json=json)


async def print_result(
    api: EngineApi, job: Job, *, output: str | None = None, raw: bool = False, json: bool = False
) -> int:
    """Print, or write, what an ended job returned; raises the JobEnded of any other end."""
    if json:
        print_json({**record(job), "value": await _value(api, job)})
    data = (await outcome_of(api, job)).payload
    if output is not None:
        _write(output, data)
    elif not json:
        print_bytes(_shown(data, raw))
    return Exit.OK


async def _value(api: EngineApi, job: Job) -> Any:
    """What a job returned, or None."""
    if job.state is not JobState.SUCCEEDED:
        return None
    try:
        return msgspec.json.decode((await outcome_of(api, job)).payload)
    except _NOT_JSON:
        return None


def _write(path: str, data: bytes) -> None:
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> click.BadParameter:
    return click.BadParameter(f"can't write {path}: {error.strerror}", param_hint="--output")


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

# -- artifacts ---------------------------------------------------------------------


@command()
@options(
    """
    --output FILE  Where to save it; '-' is standard output. Without a NAME: the folder for all of
            them.
    """
)
async def artifacts(
    reading: EngineApi,
    job: str,
    name: str | None,
    output: str | None,
    wait: bool,
    wait_timeout: float | None,
    form: Form,
) -> int:
    """List the files that a job left, or save them.

    With a NAME that file is saved, by default under the last part of its name in this folder.
    With --output alone all are saved below that folder. Retries are followed. The SHA-256 of
    what is saved is checked.
    """
    from penstock.app.artifacts import artifact_of, pieces_of, save, target_of, targets

    if output == "-" and name is None:
        raise click.UsageError("'--output -' needs a NAME: one file fits into standard output")
    ended = await _ended(reading, job, wait, wait_timeout, "left nothing")
    left = ended.result.artifacts if ended.result is not None else ()
    try:
        if name is not None:
            artifact = artifact_of(ended, name)
            left, pieces = (artifact,), pieces_of(reading, artifact)
            if output == "-":
                async for piece in pieces:
                    await asyncio.to_thread(sys.stdout.buffer.write, piece)
                sys.stdout.buffer.flush()
                return Exit.OK
            await save(pieces, target_of(artifact, output or "."))
        elif output is not None:
            for artifact, path in targets(left, Path(output)).items():
                await save(pieces_of(reading, artifact), path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritable(str(error.filename or output), error) from error
    if form is Form.JSON or (name is None and output is None):
        print_list(form, left, _artifact, empty="the job left no artifacts")
    return Exit.OK


def _artifact(one: Artifact) -> Row:
    return {
        "NAME": one.name,
        "SIZE": one.size,
        "TYPE": one.media_type,
        "SHA-256": one.sha256[:12],
    }


# -- steps -------------------------------------------------------------------------


@command()
@options(
    """
    --name NAME  Only rows of this name.
    --after 0..  With --name: only rows after this one.
    -n, --limit 1..=100  Maximum number of results.
    """
)
async def steps(
    reading: EngineApi, job: str, name: str | None, after: int | None, limit: int, form: Form
) -> None:
    """List the rows that a job checkpointed, by name and number.

    With --json each line is an object of "name", "n", "key", "outcome", "input", "output",
    "error", "at" and "attempt"; fields without a value are left out.
    """
    if after is not None and name is None:
        raise click.UsageError("--after needs --name")
    rows: list[Step] = []
    job_id = (await find_job(reading, job)).job_id
    last = None if name is None or after is None else (name, after)
    query, left, more = StepQuery(name=name, after=last), limit, True
    while more and left > 0:
        page = await reading.read_steps(job_id, replace(query, limit=min(left, MAX_PAGE_ROWS)))
        for row in page.steps:
            print_line(row) if form is Form.JSON else rows.append(row)
        left, more = left - len(page.steps), page.more
        query = replace(query, after=page.last)
    if form is not Form.JSON:
        hint = "raise --limit, or use --name and --after" if more else ""
        empty = "the job has no checkpointed rows"
        print_list(form, rows, partial(_step, now=time.time()), empty=empty, more=hint)


def _step(row: Step, now: float) -> Row:
    return {
        "NAME": row.name,
        "N": row.n,
        "KEY": row.key,
        "OUTCOME": row.outcome,
        "OUTPUT": row.error or row.output,
        "ATTEMPT": row.attempt,
        "TIME": moment(row.at, now),
    }
