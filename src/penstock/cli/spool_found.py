"""Jobs of a spool as they are shown: their result, their JSON, the code of their end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.paper import console, print_json
from penstock.cli.terminal import echo, harmless
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.ending import EMBEDDING
from penstock.workloads.spool.flow import Flow
from penstock.workloads.spool.found import Found
from penstock.workloads.spool.serving.outcomes import CANCELLED, DEADLINE, TIMEOUT
from penstock.workloads.spool.workspace import Workspace

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


def wait_for(workspace: Workspace, job_id: str, timeout: float | None) -> Found:
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


def print_found(found: Found, *, json: bool = False) -> Exit:
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


def say_why(found: Found) -> None:
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


def code_of(found: Found) -> Exit:
    match found.status:
        case Status.DONE:
            return Exit.OK
        case Status.FAILED:
            return _ENDS.get(found.meta.code, Exit.FAILED)
        case Status.MISSING:
            return Exit.NOT_FOUND
        case _:
            return Exit.NOT_YET


def view_of(found: Found) -> dict[str, Any]:
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


def _made(found: Found) -> dict[str, Any]:
    if EMBEDDING in found.artifacts and found.content is not None:
        try:
            return {"embedding": msgspec.json.decode(found.content)}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # what lies there is shown as it is
    return {"result": found.text}
