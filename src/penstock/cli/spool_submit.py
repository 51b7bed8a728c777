"""`penstock spool submit`: one job, or one for each line of a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from penstock.cli.exits import Exit
from penstock.cli.paper import print_json
from penstock.cli.parameters import DURATION, MOMENT, PRIORITY, as_json, read_object, read_source
from penstock.cli.spool_options import asked, check_folder, is_piped, options_of, placed, read_asked
from penstock.cli.spool_results import counting, print_found, wait_for
from penstock.cli.terminal import echo
from penstock.core.errors import InvalidRequest
from penstock.workloads.spool.client.work import Submission, Work, checked
from penstock.workloads.spool.config import JobKind, Sync
from penstock.workloads.spool.disk.workspace import Workspace


class Beside(Struct, frozen=True, kw_only=True):
    """What a job has that is no option of its generation."""

    embed: bool = False
    images: tuple[str, ...] = ()
    parent: str | None = None
    tags: tuple[str, ...] = ()


@click.command()
@placed
@click.argument("prompt", nargs=-1, metavar="[PROMPT…]")
@click.option("-f", "--file", metavar="FILE", help="The prompt is in this file.")
@click.option(
    "--jsonl",
    metavar="FILE|-",
    help='A job for each line, as {"prompt": "…", "max_tokens": 20}; options here hold for all.',
)
@click.option("--wait", is_flag=True, help="Wait for the end; print the result.")
@click.option("--wait-timeout", type=DURATION, help="Wait no longer than this; the job goes on.")
@asked
@click.option("--logprobs", type=int, metavar="N", help="Tell so many alternatives per token.")
@click.option("--raw", is_flag=True, help="Give the model the prompt without its chat template.")
@click.option("--embed", is_flag=True, help="Make a vector of it, not an answer.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="An image that the prompt is about; may be repeated.",
)
@click.option("--parent", metavar="ID", help="The job whose conversation it goes on with.")
@click.option("--tag", "tags", multiple=True, help="Kept with the job; may be repeated.")
@click.option("--priority", type=PRIORITY, help="How urgent it is.")
@click.option("--deadline", type=MOMENT, metavar="TIME|+DURATION", help="When it must have ended.")
@click.option("--timeout", type=DURATION, help="How long it may run.")
@click.option("--no-sync", is_flag=True, help="Faster, but an id may not survive power loss.")
@as_json
def submit(
    workspace: Path,
    prompt: tuple[str, ...],
    file: str | None,
    jsonl: str | None,
    wait: bool,
    wait_timeout: float | None,
    no_sync: bool,
    json: bool,
    **said: Any,
) -> int:
    """Submit a prompt; prints its id and nothing else.

    The prompt is given as words, in a file, or on standard input. The id is printed when the
    job survives power loss. With --wait it prints the result instead, and the exit code says
    how the job ended.
    """
    waits = wait or wait_timeout is not None
    if jsonl is not None and (prompt or file is not None):
        raise click.UsageError("--jsonl has the prompts; there can't be another one")
    if jsonl is not None and waits:
        raise click.UsageError("--jsonl and --wait don't go together; see 'penstock spool wait'")
    check_folder(workspace)
    place = Workspace(workspace, sync=Sync.NONE if no_sync else Sync.FULL)
    given = read_asked(said)
    if jsonl is not None:
        return _submit_lines(place, list(_lines(jsonl, given)), json)
    job = _submission(_prompt(prompt, file), given)
    checked(job)  # before a workspace is made for it
    [job_id] = Work(place).submit_many([job])
    if waits:
        return print_found(wait_for(place, job_id, wait_timeout), json=json)
    print_json({"job_id": job_id}) if json else echo(job_id)
    return Exit.OK


def _submit_lines(place: Workspace, jobs: Sequence[Submission], json: bool) -> int:
    if not jobs:
        raise click.UsageError("--jsonl has no lines")
    ids = []
    with counting("submitting", len(jobs)) as count:
        for job_id in Work(place).submit_many(jobs):
            ids.append(job_id)
            count()
            if not json:
                echo(job_id)
    if json:
        print_json([{"job_id": job_id} for job_id in ids])
    return Exit.OK


# -- the prompt ---------------------------------------------------------------------


def _prompt(words: Sequence[str], file: str | None) -> str | bytes:
    if words and file is not None:
        raise click.UsageError("two prompts: words and --file; give one of them")
    if file is not None:
        return read_source("--file", "-" if file == "-" else f"@{file}")
    if words and words[0] != "-":
        return " ".join(words)
    if len(words) > 1:
        raise click.UsageError("two prompts: '-' for standard input, and words; give one of them")
    if not words and not is_piped():
        raise click.UsageError(
            "there is no prompt: give it as words, with -f FILE, or on standard input"
        )
    text = sys.stdin.buffer.read().removesuffix(b"\n")
    if not text:
        raise click.UsageError("there is no prompt: standard input is empty")
    return text


def _submission(prompt: str | bytes, given: dict[str, Any]) -> Submission:
    """Raises InvalidRequest, which names the field."""
    own = {name: given[name] for name in Beside.__struct_fields__ if name in given}
    try:
        beside = msgspec.convert(own, Beside)
    except msgspec.ValidationError as error:
        message, _, where = str(error).replace("`", "").partition(" - at $.")
        raise InvalidRequest(where, message[0].lower() + message[1:]) from error
    options = options_of({name: value for name, value in given.items() if name not in own})
    if options.deadline is not None and options.deadline <= time.time():
        raise InvalidRequest("deadline", "is already past")
    return Submission(
        prompt=prompt,
        kind=JobKind.EMBED if beside.embed else JobKind.TEXT,
        options=options,
        images=tuple(map(Path, beside.images)),
        parent=beside.parent,
        tags=beside.tags,
    )


# -- many of them -------------------------------------------------------------------


def _lines(source: str, given: dict[str, Any]) -> Iterator[Submission]:
    """All of them are looked at before the first is submitted."""
    text = read_source("--jsonl", "-" if source == "-" else f"@{source}")
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"line {number}: "
            try:
                job = _line(read_object("--jsonl", line, where), given)
                checked(job)
            except InvalidRequest as error:
                raise InvalidRequest("--jsonl", where + error.message, hint=error.hint) from error
            yield job


def _line(line: dict[str, Any], given: dict[str, Any]) -> Submission:
    prompt = line.pop("prompt", None)
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt", "is missing" if prompt is None else "is not a string")
    return _submission(prompt, {**given, **line})
