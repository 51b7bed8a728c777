"""`penstock batch`: files of requests to language models, answered in their own time."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import click
import msgspec

from penstock.app.service import cancelling, poll
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import Whole, moment
from penstock.cli.groups import Commands
from penstock.cli.nouns import Noun
from penstock.cli.options import options, started
from penstock.cli.output import (
    Form,
    Row,
    echo,
    print_done,
    print_one,
    row_facts,
    styled,
)
from penstock.core.errors import InvalidRequest, NotFound, WaitTimedOut
from penstock.ports.engine_api import EngineApi
from penstock.workloads.llm.batches import Batch, FileUpload, PageQuery

_PART = 1 << 20
_LOOK = 0.5
"""Seconds between two looks at a batch that is waited for."""


@click.group(cls=Commands)
def batch() -> None:
    """Submit, list and read batches of requests to language models."""


@batch.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@options(
    """
    --endpoint ENDPOINT      As /v1/chat/completions; by default that of the first line.
    --tenant TENANT=default  Its tenant.
    """
)
@started(False)
async def submit(
    engine: EngineRef,
    file: Path,
    endpoint: str | None,
    tenant: str,
    wait: bool,
    wait_timeout: float | None,
    json: bool,
) -> int:
    """Submit a file of requests, one JSON object on each line.

    A line has custom_id, method (POST), url (the endpoint) and body, as in OpenAI's batch files.
    With --wait, Ctrl-C cancels the batch.
    """
    wanted = endpoint or _endpoint(file)
    async with engine.api() as api:
        upload = FileUpload(api.batches)
        try:
            with file.open("rb") as source:
                while part := await asyncio.to_thread(source.read, _PART):
                    await upload.write(part)
            kept = await upload.keep(file.name, tenant=tenant)
        except BaseException:
            await upload.drop()
            raise
        made, interrupted = await api.batches.create(kept.id, wanted), list[str]()
        if wait or wait_timeout is not None:

            async def look() -> bool | None:
                nonlocal made
                made = await api.batches.get(made.id)
                return made.has_ended or None

            async with cancelling(lambda _: api.batches.cancel(made.id)) as interrupted:
                if not await poll(look, wait_timeout, _LOOK):
                    raise WaitTimedOut(f"the batch {made.id} is still {made.status}")
    print_done(json, made, f"{made.id} {made.status}")
    if interrupted:
        return Exit.INTERRUPTED
    if made.status == "failed":
        _complain(made)
        return Exit.FAILED
    return Exit.OK


def _endpoint(file: Path) -> str:
    """Of the first line."""
    with file.open("rb") as source:
        line = source.readline(_PART)
    try:
        return str(msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))["url"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        raise InvalidRequest(
            "file", "its first line is not a request with a url", hint="or give --endpoint"
        ) from None


def _row(one: Batch, now: float) -> Row:
    counts = one.request_counts
    return {
        "BATCH": Whole(one.id),
        "STATUS": styled(one.status),
        "ENDPOINT": one.endpoint,
        "LINES": counts.total,
        "DONE": counts.completed,
        "FAILED": counts.failed,
        "CREATED": moment(one.created_at, now),
        "+ENDED": "" if one.ended_at is None else moment(one.ended_at, now),
        "+INPUT": one.input_file_id,
        "+OUTPUT": one.output_file_id,
        "+ERRORS": one.error_file_id,
    }


BATCHES = Noun(
    batch,
    _row,
    lambda api, limit: api.batches.list(PageQuery(limit=limit)),
    "no batches; submit one with 'penstock batch submit FILE'",
)
BATCHES.list(
    "List batches, the newest first.", options("-n, --limit 1..1000=20  Maximum number of results.")
)


@batch.command()
async def show(api: EngineApi, batch_id: str, form: Form) -> None:
    """Show one batch, and what is wrong with its lines."""
    found = await api.batches.get(batch_id)
    row = _row(found, time.time())
    print_one(form, found, found.id, lambda: [f"batch {found.id}", row_facts(row)])
    if form is not Form.JSON:
        _complain(found)


def _complain(found: Batch) -> None:
    for error in found.errors:
        where = f"line {error.line}: " if error.line is not None else ""
        echo(f"{where}{error.message}", err=True)


@batch.command()
async def cancel(api: EngineApi, batch_id: str, json: bool) -> None:
    """Cancel a batch; what was answered stays in its files."""
    found = await api.batches.cancel(batch_id)
    print_done(json, found, f"{found.id} {found.status}")


@batch.command()
@options("--errors  The lines that failed, instead of the answers.")
async def result(api: EngineApi, batch_id: str, errors: bool) -> None:
    """Print the answers of a batch, one JSON object on each line."""
    found = await api.batches.get(batch_id)
    file_id = found.error_file_id if errors else found.output_file_id
    if file_id is None:
        what = "errors" if errors else "answers"
        raise NotFound(f"the batch {batch_id} has no {what} (it is {found.status})")
    start, part = 0, b""
    while not start or len(part) == _PART:  # only the last part is shorter
        part = await api.batches.read_file(file_id, start, _PART)
        sys.stdout.buffer.write(part)
        start += _PART
