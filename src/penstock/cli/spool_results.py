"""`penstock spool get` and `wait`: the results of jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.paper import console, print_json, print_line
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.spool_options import ids_given, is_piped, placed, workspace_at
from penstock.cli.terminal import echo, harmless
from penstock.core.errors import InvalidRequest, NotFound
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.job_view import JobView
from penstock.workloads.spool.disk.closing import EMBEDDING
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.outcomes import CANCELLED, DEADLINE, TIMEOUT

if TYPE_CHECKING:
    from rich.text import Text

STYLES = {
    Status.QUEUED: "cyan",
    Status.RUNNING: "yellow",
    Status.DONE: "green",
    Status.FAILED: "red",
    Status.MISSING: "dim",
}
_ENDS = {CANCELLED: Exit.CANCELLED, TIMEOUT: Exit.TIMEOUT, DEADLINE: Exit.TIMEOUT}
"""The exit codes of FAILED jobs by the code in their metadata."""
NO_SERVER = "no server is seen here: 'penstock spool serve' starts one"


def styled(status: Status) -> Text:
    from rich.text import Text

    return Text(status.value, STYLES[status])


def wait_for(workspace: Workspace, job_id: str, timeout: float | None) -> JobView:
    flow = Flow(workspace)
    warn_if_unserved(flow)
    try:
        return flow.wait(job_id, timeout)
    except KeyboardInterrupt:
        say_how_to_go_on(workspace, job_id)
        raise


def warn_if_unserved(flow: Flow) -> None:
    """Tell who waits at a terminal for what would never come by itself."""
    if sys.stderr.isatty() and flow.counts()[Status.QUEUED] and not flow.is_served():
        echo(NO_SERVER, err=True)


def say_how_to_go_on(workspace: Workspace, job_id: str) -> None:
    again = f"penstock spool {{}} {workspace.path} {job_id}"
    echo(f"\npenstock: job {job_id} goes on", err=True)
    echo(f"  follow it with '{again.format('watch')}'", err=True)
    echo(f"  end it with '{again.format('cancel')}'", err=True)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error while many jobs are gone through; none where nobody looks."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console(err=True),
        transient=True,
        disable=total < 2 or not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def print_found(found: JobView, *, json: bool = False) -> Exit:
    """Print what an ended job made, or why it failed; the exit code of its end."""
    if json:
        print_json(view_of(found))
    elif found.status is Status.DONE:
        print_content(found.content or b"")
    else:
        say_why(found)
    return code_of(found)


def print_content(content: bytes) -> None:
    """As it is; a terminal gets a whole last line, and nothing that drives it."""
    if sys.stdout.isatty():
        echo(content.decode("utf-8", "replace").removesuffix("\n"))
    else:
        click.echo(content, nl=False)  # noqa: TID251 (bytes, into a pipe)


def say_why(found: JobView) -> None:
    if found.status is Status.FAILED:
        why = harmless(found.error)
        if not why.startswith(found.meta.code):
            why = f"{found.meta.code}: {why}"
        said = f"job {found.job_id} FAILED: {why}"
    elif found.status is Status.MISSING:
        said = f"there is no job {found.job_id} here"
    else:
        said = f"job {found.job_id} is {found.status}: it has no result yet"
    echo(f"penstock: {said}", err=True)


def code_of(found: JobView) -> Exit:
    match found.status:
        case Status.DONE:
            return Exit.OK
        case Status.FAILED:
            return _ENDS.get(found.meta.code, Exit.FAILED)
        case Status.MISSING:
            return Exit.NOT_FOUND
        case _:
            return Exit.NOT_YET


def view_of(found: JobView) -> dict[str, Any]:
    """A job as its JSON: where it is, its metadata, and what it made."""
    view: dict[str, Any] = {"job_id": found.job_id, "status": found.status.value}
    if found.status is Status.MISSING:
        return view
    fields = msgspec.to_builtins(found.meta)
    known = {name: value for name, value in fields.items() if value not in (None, "", ())}
    view = {**known.pop("other", {}), **known, **view}
    if found.status is Status.DONE:
        view |= _made(found)
    elif found.status is Status.FAILED:
        view["error"] = found.error
    return view


def _made(found: JobView) -> dict[str, Any]:
    if EMBEDDING in found.artifacts and found.content is not None:
        try:
            return {"embedding": msgspec.json.decode(found.content)}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # what lies there is shown as it is
    return {"result": found.text}


NOT_READY = 2
"""The original's exit code for a job that has no result yet; its other two are 0 and 1."""


@click.command()
@placed
@click.argument("ids", nargs=-1, metavar="[ID…]")
@click.option("--partial", is_flag=True, help="Of a running job, what there is by now.")
@click.option("--jsonl", is_flag=True, help="Print a line of JSON for each of several jobs.")
@as_json
def get(workspace: Path, ids: tuple[str, ...], partial: bool, jsonl: bool, json: bool) -> int:
    """Print what a job made, as it is.

    The id comes on the command line or on standard input; without one it is the job that
    ended last. Exit code 1: it failed, and standard error says why; 2: it is not ready, or
    there is no such job.
    """
    flow = Flow(workspace_at(workspace))
    try:
        wanted = ids_given(ids) if ids or is_piped() else []
    except InvalidRequest as error:
        # Not 2, which would tell a script to ask again.
        echo(f"penstock: {error.message}\n  {error.hint}", err=True)
        return Exit.FAILED
    if jsonl:
        return max([_print_line(flow.get(one)) for one in wanted], default=Exit.OK)
    if len(wanted) > 1:
        raise click.UsageError("several results in a row can't be told apart; say --jsonl")
    found = flow.get(wanted[0]) if wanted else _latest(flow)
    if partial and found.status is Status.RUNNING:
        return _print_partial(flow, found, json)
    print_found(found, json=json)
    return _code(found)


def _code(found: JobView) -> int:
    ends = {Status.DONE: Exit.OK, Status.FAILED: Exit.FAILED}
    return ends.get(found.status, NOT_READY)


def _print_line(found: JobView) -> int:
    print_line(view_of(found))
    return _code(found)


def _latest(flow: Flow) -> JobView:
    found = flow.latest()
    if found is None:
        path = flow.workspace.path
        raise NotFound(
            f"no job of {path} has ended", hint=f"'penstock spool status {path}' counts them"
        )
    return found


def _print_partial(flow: Flow, found: JobView, json: bool) -> int:
    part = flow.partial(found.job_id)
    if json:
        progress = msgspec.to_builtins(part.progress)
        print_json({**view_of(found), "partial": part.text, "progress": progress})
    else:
        print_content(part.text.encode())
    return Exit.OK


@click.command()
@placed
@click.argument("ids", nargs=-1, metavar="[ID…]")
@click.option("--idle", is_flag=True, help="Wait until nothing is queued or running here.")
@click.option("--timeout", type=DURATION, help="Wait no longer than this; the jobs go on.")
@as_json
def wait(
    workspace: Path, ids: tuple[str, ...], idle: bool, timeout: float | None, json: bool
) -> int:
    """Wait until jobs have ended; prints their ids.

    The ids come on the command line or on standard input, and are printed in their order, so
    that 'get' can go on with them. The exit code is that of the first that failed; 9 if the
    time was over. With --idle it waits for all jobs here, prints how many have ended, and the
    exit code is 1 if one failed meanwhile.
    """
    flow = Flow(workspace_at(workspace))
    if idle:
        if ids:
            raise click.UsageError("--idle waits for all jobs; it takes no ids")
        warn_if_unserved(flow)
        return _wait_idle(flow, timeout, json)
    wanted = ids_given(ids)
    if not wanted:
        raise click.UsageError("say which jobs: their ids, ids on standard input, or --idle")
    warn_if_unserved(flow)
    return _wait_for(flow, wanted, timeout, json)


def _wait_for(flow: Flow, ids: Sequence[str], timeout: float | None, json: bool) -> int:
    end = None if timeout is None else time.monotonic() + timeout
    code, told = Exit.OK, []
    with counting("waiting", len(ids)) as count:
        for job_id in ids:
            found = flow.wait(job_id, None if end is None else max(0.0, end - time.monotonic()))
            count()
            code = code or code_of(found)
            told.append({"job_id": job_id, "status": found.status.value})
            if found.status is Status.FAILED:
                say_why(found)
            if not json:
                echo(job_id)
    if json:
        print_json(told)
    return code


def _wait_idle(flow: Flow, timeout: float | None, json: bool) -> int:
    before = flow.counts()[Status.FAILED]
    counts = flow.wait_idle(timeout)
    if json:
        print_json({status.value: count for status, count in counts.items()})
    else:
        echo(f"{counts[Status.DONE]:,} done, {counts[Status.FAILED]:,} failed")
    return Exit.FAILED if counts[Status.FAILED] > before else Exit.OK
