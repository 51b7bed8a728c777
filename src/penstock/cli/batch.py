"""`penstock batch`: files of requests to language models, answered in their own time."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import click
import msgspec

from penstock.cli.groups import Commands
from penstock.cli.paper import Listing, emit, facts, print_json
from penstock.cli.parameters import as_json, limited
from penstock.cli.place import Place, ask_engine, placed
from penstock.cli.terminal import echo
from penstock.cli.words import moment
from penstock.core.errors import InvalidRequest, NotFound
from penstock.ports.engine_api import EngineApi
from penstock.workloads.llm.batches import Batch, BatchStoreQuery

_PART = 1 << 20
_LOOK = 0.5
"""Seconds between two looks at a batch that is waited for."""


@click.group(cls=Commands)
def batch() -> None:
    """Submit, list and read batches of requests to language models."""


@batch.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--endpoint", help="As /v1/chat/completions; by default that of the first line.")
@click.option("--tenant", default="default", help="Its tenant.")
@click.option("--wait", is_flag=True, help="Wait for its end.")
@as_json
@placed
@click.pass_obj
def submit(
    place: Place, file: Path, endpoint: str | None, tenant: str, wait: bool, json: bool
) -> None:
    """Submit a file of requests, one JSON object on each line.

    A line has custom_id, method (POST), url (the endpoint) and body, as in OpenAI's batch files.
    """
    wanted = endpoint or _endpoint(file)

    async def make(api: EngineApi) -> Batch:
        upload = await api.batches.begin_upload()
        try:
            with file.open("rb") as source:
                while part := await asyncio.to_thread(source.read, _PART):
                    await api.batches.write_upload(upload, part)
            kept = await api.batches.keep_upload(upload, file.name, "batch", tenant=tenant)
        except BaseException:
            await api.batches.drop_upload(upload)
            raise
        made = await api.batches.create(kept.id, wanted)
        while wait and not made.has_ended:
            await asyncio.sleep(_LOOK)
            made = await api.batches.get(made.id)
        return made

    made = ask_engine(place, make)
    print_json(msgspec.to_builtins(made)) if json else echo(f"{made.id} {made.status}")
    if made.status == "failed":
        _complain(made)
        sys.exit(1)


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


@batch.command("list")
@limited(20, most=1000)
@as_json
@placed
@click.pass_obj
def list_batches(place: Place, limit: int, json: bool) -> None:
    """List batches, the newest first."""
    found = ask_engine(place, lambda api: api.batches.list(BatchStoreQuery(limit=limit)))
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        echo("no batches; submit one with 'penstock batch submit FILE'", err=True)
    else:
        emit(_listing(found, time.time()))


def _listing(found: list[Batch], now: float) -> Listing:
    columns = ("BATCH", "STATUS", "ENDPOINT", "LINES", "DONE", "FAILED", "CREATED")
    listing = Listing(
        *columns, flexible=("ENDPOINT",), right=("LINES", "DONE", "FAILED", "CREATED")
    )
    for one in found:
        counts = one.request_counts
        numbers = (counts.total, counts.completed, counts.failed)
        created = moment(one.created_at, now)
        listing.add(one.id, one.status.value, one.endpoint, *map(str, numbers), created)
    return listing


@batch.command()
@click.argument("batch_id", metavar="BATCH")
@as_json
@placed
@click.pass_obj
def show(place: Place, batch_id: str, json: bool) -> None:
    """Show one batch, and what is wrong with its lines."""
    found = ask_engine(place, lambda api: api.batches.get(batch_id))
    if json:
        print_json(msgspec.to_builtins(found))
        return
    counts, now = found.request_counts, time.time()
    pairs = [
        ("status", found.status.value),
        ("endpoint", found.endpoint),
        ("lines", f"{counts.total}: {counts.completed} done, {counts.failed} failed"),
        ("created", moment(found.created_at, now)),
        ("ended", "" if found.ended_at is None else moment(found.ended_at, now)),
        ("input", found.input_file_id),
        ("output", found.output_file_id or ""),
        ("errors", found.error_file_id or ""),
    ]
    emit(found.id, facts(pairs))
    _complain(found)


def _complain(found: Batch) -> None:
    for error in found.errors:
        where = f"line {error.line}: " if error.line is not None else ""
        echo(f"{where}{error.message}", err=True)


@batch.command()
@click.argument("batch_id", metavar="BATCH")
@as_json
@placed
@click.pass_obj
def cancel(place: Place, batch_id: str, json: bool) -> None:
    """Cancel a batch; what was answered stays in its files."""
    found = ask_engine(place, lambda api: api.batches.cancel(batch_id))
    print_json(msgspec.to_builtins(found)) if json else echo(f"{found.id} {found.status}")


@batch.command()
@click.argument("batch_id", metavar="BATCH")
@click.option("--errors", is_flag=True, help="The lines that failed, instead of the answers.")
@placed
@click.pass_obj
def output(place: Place, batch_id: str, errors: bool) -> None:
    """Print the answers of a batch, one JSON object on each line."""

    async def read(api: EngineApi) -> None:
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

    ask_engine(place, read)
