"""`penstock spool`: a folder is the queue, a local model does the work."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from penstock.cli.engine import run
from penstock.cli.exits import Exit
from penstock.cli.formats import plural
from penstock.cli.generation import generation_options, is_piped, options_of, read_given
from penstock.cli.groups import Commands
from penstock.cli.live import progress
from penstock.cli.options import (
    PRIORITY,
    converted,
    options,
    read_object,
    read_source,
    started,
)
from penstock.cli.output import echo, echo_lines, print_done, print_json, warn
from penstock.cli.selection import Done, each
from penstock.cli.spool_serve import serve
from penstock.cli.spool_view import (
    check_folder,
    get,
    ids_given,
    list_jobs,
    print_found,
    result,
    status,
    wait,
    warn_if_unserved,
    watch,
    workspace_at,
)
from penstock.core.errors import InvalidRequest, WaitTimedOut
from penstock.lifecycles.spool import SPOOL, Status
from penstock.workloads.spool.client import changes
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import Submission, Work, checked
from penstock.workloads.spool.config import JobKind, Sync
from penstock.workloads.spool.disk.workspace import Workspace


@click.group(cls=Commands)
def spool() -> None:
    """Queue prompts in a folder for a local model."""


# -- submitting --------------------------------------------------------------------


class JobFiles(Struct, frozen=True, kw_only=True):
    """What a job has that is no option of its generation."""

    embed: bool = False
    images: tuple[str, ...] = ()
    parent: str | None = None
    tags: tuple[str, ...] = ()


@spool.command()
@click.argument("prompt", nargs=-1, metavar="[PROMPT...]")
@options(
    """
    -f, --file FILE  The prompt is in this file.
    --jsonl FILE|-   A job for each line, as {"prompt": "…", "max_tokens": 20}; options here hold
            for all.
    """
)
@started(False)
@generation_options
@options(
    """
    --logprobs N               Print this many alternatives per token.
    --raw                      Give the model the prompt without its chat template.
    --embed                    Make a vector of it, not an answer.
    --image FILE... as images  An image that the prompt is about; may be repeated.
    --parent ID                The job whose conversation it goes on with.
    --tag TAG... as tags       Label of the job; may be repeated.
    --priority PRIORITY        How urgent it is.
    --deadline TIME|+DURATION  Time by which it must have ended.
    --timeout DURATION         Maximum run time of one attempt.
    --no-sync                  Faster, but an id may not survive power loss.
    """,
    priority=PRIORITY,
)
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
    how the job ended; Ctrl-C then cancels the job.
    """
    waits = wait or wait_timeout is not None
    if jsonl is not None and (prompt or file is not None):
        raise click.UsageError("--jsonl has the prompts; there can't be another one")
    if jsonl is not None and waits:
        raise click.UsageError("--jsonl and --wait don't go together; see 'penstock spool wait'")
    check_folder(workspace)
    place = Workspace(workspace, sync=Sync.NONE if no_sync else Sync.FULL)
    given = read_given(said)
    if jsonl is not None:
        return _submit_lines(place, list(_lines(jsonl, given)), json)
    job = _submission(_prompt(prompt, file), given)
    checked(job)  # before a workspace is made for it
    [job_id] = Work(place).submit_many([job])
    if waits:
        try:
            flow = Flow(place)
            warn_if_unserved(flow)
            return print_found(flow.wait(job_id, wait_timeout), json=json)
        except KeyboardInterrupt:
            warn("cancelling")
            changes.cancel(place, job_id, "SIGINT at the terminal")
            return Exit.INTERRUPTED
    print_done(json, {"job_id": job_id}, job_id)
    return Exit.OK


def _submit_lines(place: Workspace, jobs: Sequence[Submission], json: bool) -> int:
    if not jobs:
        raise click.UsageError("--jsonl has no lines")
    ids = []
    with progress("submitting", len(jobs)) as bar:
        for job_id in Work(place).submit_many(jobs):
            ids.append(job_id)
            bar.advance()
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
    own = {name: given[name] for name in JobFiles.__struct_fields__ if name in given}
    beside = converted(own, JobFiles)
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


# -- cancelling, retrying, deleting ------------------------------------------------


@spool.command()
@options("--wait-timeout DURATION=10s  How long to wait for running work to end.")
def cancel(
    workspace: Path, job: tuple[str, ...], reason: str, wait_timeout: float, json: bool
) -> int:
    """Cancel jobs; a running one stops within a token.

    They are FAILED afterwards, with the code CANCELLED. Says of each which won: the
    cancellation, or an end that came first (exit code 4). The ids come on the command line or
    on standard input.
    """
    place = workspace_at(workspace)
    flow = Flow(place)

    async def cancel_one(job_id: str) -> Done:
        status = flow.status(job_id)
        code, said = Exit.CONFLICT, f"had ended already: {status}"
        if not SPOOL.is_final(status):
            status = changes.cancel(place, job_id, reason or "cancelled by its user")
            try:
                found = flow.wait(job_id, wait_timeout)
            except WaitTimedOut:
                code, said = Exit.NOT_YET, f"was asked to end and is still {flow.status(job_id)}"
            else:
                status, said = found.status, f"had ended already: {found.status}"
                if found.meta.code == changes.CANCELLED:
                    code, said = Exit.OK, "cancelled"
        view = {"job_id": job_id, "status": status.value, "cancelled": code is Exit.OK}
        return code, view, f"{job_id} {said}"

    return run(each(_named(job), cancel_one, json=json))


@spool.command()
def retry(workspace: Path, job: tuple[str, ...], json: bool) -> int:
    """Submit jobs that have ended once more; prints the new ids.

    The new job has the same files and options as the old one, which stays where it is. The
    ids come on the command line or on standard input.
    """
    place = workspace_at(workspace)

    async def again(job_id: str) -> Done:
        new = changes.retry(place, job_id)
        return Exit.OK, {"job_id": new, "retry_of": job_id}, new

    return run(each(_named(job), again, json=json))


def _named(given: tuple[str, ...]) -> list[str]:
    ids = ids_given(given)
    if not ids:
        raise click.UsageError("say which jobs: their ids, or ids on standard input")
    return ids


@spool.command()
@options(
    """
    --older-than DURATION  Those that ended longer ago than this.
    --keep 0..             All but the last N.
    --done                 Only jobs that are DONE.
    --failed               Only jobs that are FAILED.
    --dry-run              Only print which ones.
    """
)
def prune(
    workspace: Path,
    older_than: float | None,
    keep: int | None,
    done: bool,
    failed: bool,
    dry_run: bool,
    json: bool,
) -> None:
    """Delete jobs that have ended, by age or by number.

    With both conditions, a job is deleted that meets one of them; --keep counts DONE and FAILED
    jobs separately. Files of submitters that were killed are deleted too.
    """
    if older_than is None and keep is None:
        raise click.UsageError("say which: --older-than 7d, --keep 100, or both")
    wanted = [Status.DONE] * done + [Status.FAILED] * failed
    states = wanted or sorted(SPOOL.final)
    gone = changes.clean(workspace_at(workspace), older_than, keep, states, dry_run=dry_run)
    if json:
        print_json({"removed": [] if dry_run else gone, "matched": gone})
    elif dry_run:
        echo_lines(gone)
        warn(f"{plural(len(gone), 'job')} would be deleted")
    else:
        echo(f"deleted {plural(len(gone), 'job')}")


for command in (serve, result, get, list_jobs, status, wait, watch):
    spool.add_command(command)
