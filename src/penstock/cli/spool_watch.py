"""`penstock spool watch`: a job's text as it is made, or all jobs as they move."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.exits import Exit
from penstock.cli.paper import console, print_line
from penstock.cli.spool_board import print_moves, show_board
from penstock.cli.spool_found import code_of, say_why, view_of
from penstock.cli.spool_jobs import placed, workspace_at
from penstock.cli.spool_list import in_words
from penstock.cli.terminal import echo_content
from penstock.lifecycles.spool import SPOOL, Status
from penstock.workloads.spool.flow import Flow
from penstock.workloads.spool.ids import check_job_id

if TYPE_CHECKING:
    from penstock.workloads.spool.found import Partial

_LOOK = 0.05
"""Seconds between looks at a job whose text is being made."""
_SELDOM = 0.5
"""Seconds between looks at its place in the queue."""


@click.command()
@placed
@click.argument("id", required=False, metavar="[ID]")
@click.option("--json", "json", is_flag=True, help="Print JSON lines.")
def watch(workspace: Path, id: str | None, json: bool) -> int:
    """Show a job's text as it comes; without an id, jobs as they move.

    The exit code says how the job ended. With --json each line is an object with a "type":
    status, piece or end; without an id: moved. Ctrl-C leaves the jobs alone.
    """
    flow = Flow(workspace_at(workspace))
    if id is not None:
        return _watch(flow, check_job_id(id), json)
    try:
        if sys.stdout.isatty() and not json:
            show_board(flow)
        else:
            print_moves(flow, json=json)
    except KeyboardInterrupt:
        pass
    return Exit.OK


def _watch(flow: Flow, job_id: str, json: bool) -> int:
    page: _Lines | _Text = _Lines(job_id) if json else _Text(flow, job_id)
    with page:
        for part in _parts(flow, job_id):
            page.add(part)
    found = flow.get(job_id)
    if json:
        print_line({"type": "end", **view_of(found)})
    elif found.status is not Status.DONE:
        say_why(found)
    return code_of(found)


def _parts(flow: Flow, job_id: str) -> Iterator[Partial]:
    """What it has said, whenever one looks, up to its end. Raises NotFound."""
    while True:
        part = flow.partial(job_id)
        yield part
        if SPOOL.is_final(part.status):
            return
        time.sleep(_LOOK)


class _Lines:
    """JSON lines."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._status: Status | None = None
        self._text = ""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def add(self, part: Partial) -> None:
        if part.status is not self._status:
            self._status = part.status
            self._print("status", status=part.status.value)
        if part.text and part.text != self._text:
            again = not part.text.startswith(self._text)
            said = part.text if again else part.text[len(self._text) :]
            self._text = part.text
            self._print("piece", text=said, again=again)

    def _print(self, kind: str, **facts: Any) -> None:
        print_line({"type": kind, "job_id": self._job_id, **facts})


class _Text:
    """The text on standard output; on a terminal, until there is some, why there is none."""

    def __init__(self, flow: Flow, job_id: str) -> None:
        self._flow, self._job_id = flow, job_id
        self._text = ""
        self._looked = 0.0
        self._status = console(err=True).status("") if sys.stderr.isatty() else None

    def __enter__(self) -> None:
        if self._status is not None:
            self._status.start()

    def __exit__(self, *error: object) -> None:
        self._settle()
        if self._text and sys.stdout.isatty() and not self._text.endswith("\n"):
            self._write("\n")

    def add(self, part: Partial) -> None:
        if part.status is Status.FAILED:
            return
        if not part.text.startswith(self._text):
            # It was begun again, by another server.
            self._write("\n")
            self._text = ""
        if said := part.text[len(self._text) :]:
            self._settle()
            self._text = part.text
            self._write(said)
        elif not self._text and not SPOOL.is_final(part.status):
            self._tell(part.status)

    def _tell(self, status: Status) -> None:
        if self._status is None or time.monotonic() - self._looked < _SELDOM:
            return
        self._looked = time.monotonic()
        words = in_words(self._flow.position(self._job_id))
        self._status.update(": ".join(filter(None, (status.value, words))))

    def _settle(self) -> None:
        if self._status is not None:
            self._status.stop()

    def _write(self, text: str) -> None:
        echo_content(text, nl=False)
        sys.stdout.flush()
