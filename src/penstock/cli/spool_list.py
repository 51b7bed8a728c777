"""`penstock spool list`, `status` and `watch`: the jobs of a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct

from penstock.cli.exits import Exit
from penstock.cli.paper import Listing, console, emit, print_json, print_line
from penstock.cli.parameters import as_json
from penstock.cli.spool_options import STATUS, placed, workspace_at
from penstock.cli.spool_results import NO_SERVER, code_of, say_why, styled, view_of
from penstock.cli.terminal import echo, echo_content, harmless
from penstock.cli.words import moment, plural, span
from penstock.core.errors import NotFound
from penstock.lifecycles.spool import FOLDERS, SPOOL, VISIBLE, Status
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.job_view import JobView, Partial, Position
from penstock.workloads.spool.disk.files import Unfit
from penstock.workloads.spool.disk.ids import check_job_id, submitted_near
from penstock.workloads.spool.disk.meta import time_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_PERIOD = 0.25
_ROWS = 8
"""How many of each kind are shown."""
_TAIL = 200
_COUNTED = tuple(status for status in FOLDERS if status in VISIBLE)


class Move(Struct, frozen=True, kw_only=True, tag="moved"):
    """A job that is somewhere else than at the last look."""

    at: float
    job_id: str
    status: Status
    """MISSING if it was cleaned away."""


def moves(flow: Flow) -> Iterator[list[Move]]:
    """What has moved since the look before; first where everything that has not ended is."""
    before = {one.job_id: one.status for one in flow.list()}
    now = time.time()
    yield [
        Move(at=now, job_id=job_id, status=status)
        for job_id, status in reversed(before.items())
        if not SPOOL.is_final(status)
    ]
    while True:
        time.sleep(_PERIOD)
        after = {one.job_id: one.status for one in flow.list()}
        now = time.time()
        moved = [
            Move(at=now, job_id=job_id, status=status)
            for job_id, status in reversed(after.items())
            if before.get(job_id) is not status
        ]
        gone = [
            Move(at=now, job_id=job_id, status=Status.MISSING)
            for job_id in before
            if job_id not in after
        ]
        before = after
        yield moved + gone


def print_moves(flow: Flow, *, json: bool) -> None:
    """A line for each, for ever."""
    for moved in moves(flow):
        for move in moved:
            if json:
                print_line(move)
            else:
                said = f"{moment(move.at, time.time())}  {move.job_id}  {move.status}"
                echo(said)
        sys.stdout.flush()


def show_board(flow: Flow) -> None:
    """Draw it again and again, for ever."""
    from rich.live import Live

    with Live(_page(flow), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(_PERIOD)
            live.update(_page(flow), refresh=True)


def _page(flow: Flow) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    title = Text.assemble(("spool", "bold"), f" {flow.workspace.path}   Ctrl-C leaves")
    parts: list[RenderableType] = [title, Text(), _folders(flow)]
    if not flow.is_served():
        parts.append(Text(NO_SERVER, "yellow"))
    running = [one.job_id for one in flow.list([Status.RUNNING], _ROWS)]
    if running:
        parts += [Text(), _running(flow, running)]
    ended = [flow.get(one.job_id) for one in flow.list(SPOOL.final, _ROWS)]
    if ended:
        parts += [Text(), _ended(flow, ended)]
    return Group(*parts)


def _folders(flow: Flow) -> RenderableType:
    from rich.columns import Columns
    from rich.text import Text

    counts = flow.counts()
    cells = [
        Text.assemble(styled(one), f" {counts[one]:,}  ", (FOLDERS[one], "dim")) for one in _COUNTED
    ]
    return Columns(cells, padding=(0, 3))


def _running(flow: Flow, ids: list[str]) -> RenderableType:
    listing = Listing(
        *("RUNNING", "TOKENS", "PER S", "LEFT", "TEXT"),
        flexible=("TEXT",),
        right=("TOKENS", "PER S", "LEFT"),
    )
    for job_id in sorted(ids):
        part = _partial(flow, job_id)
        progress = part.progress
        listing.add(
            job_id,
            f"{progress.tokens:,}",
            f"{progress.tokens_per_second:.0f}" if progress.tokens_per_second else "",
            "" if progress.eta_s is None else span(progress.eta_s),
            _tail(part.text),
        )
    return listing


def _partial(flow: Flow, job_id: str) -> Partial:
    try:
        return flow.partial(job_id)
    except NotFound:
        return Partial(status=Status.MISSING)


def _ended(flow: Flow, ended: list[JobView]) -> RenderableType:
    listing = Listing(
        *("ENDED", "STATUS", "TOOK", "TOKENS", "RESULT"),
        flexible=("RESULT",),
        right=("TOOK", "TOKENS"),
    )
    for found in ended:
        meta = found.meta
        made = found.text if found.status is Status.DONE else found.error
        listing.add(
            found.job_id,
            styled(found.status),
            "" if meta.duration_s is None else span(meta.duration_s),
            "" if meta.completion_tokens is None else f"{meta.completion_tokens:,}",
            " ".join(harmless(made[:_TAIL]).split()),
        )
    return listing


def _tail(text: str) -> str:
    """Its end, in one line: that is where something happens."""
    return " ".join(harmless(text[-_TAIL:]).split())[-60:]


_SHOWN = 20
_BEGINNING = 120


class Row(Struct, frozen=True, kw_only=True):
    """A job in the list, as much of it as is shown."""

    job_id: str
    status: Status
    submitted_at: float
    prompt: str
    """Its beginning, in one line."""
    tokens: int | None = None
    """Of the answer, so far."""
    seconds: float | None = None
    """For which it ran."""
    code: str = ""
    tags: tuple[str, ...] = ()


@click.command("ls")
@placed
@click.option("--status", "states", type=STATUS, multiple=True, help="In this state; repeatable.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1),
    default=_SHOWN,
    show_default=True,
    help="At most so many.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only ids.")
@as_json
def list_jobs(
    workspace: Path, states: tuple[str, ...], limit: int, quiet: bool, json: bool
) -> None:
    """List jobs, newest first."""
    flow = Flow(workspace_at(workspace))
    found = flow.list([Status(one) for one in states] or VISIBLE, limit)
    if quiet:
        echo("".join(f"{one.job_id}\n" for one in found), nl=False)
        return
    rows = [_row(flow, flow.get(one.job_id)) for one in found]
    if json:
        print_json(msgspec.to_builtins(rows))
    elif rows:
        emit(_listing(rows))
    else:
        echo("no jobs", err=True)


def _row(flow: Flow, found: JobView) -> Row:
    meta = found.meta
    tokens, seconds = meta.completion_tokens, meta.duration_s
    if found.status is Status.RUNNING:
        tokens = _running_tokens(flow, found.job_id)
    return Row(
        job_id=found.job_id,
        status=found.status,
        submitted_at=time_of(meta.submitted_at) or submitted_near(found.job_id),
        prompt=_beginning(flow, found.job_id),
        tokens=tokens,
        seconds=seconds,
        code=meta.code,
        tags=meta.tags,
    )


def _running_tokens(flow: Flow, job_id: str) -> int | None:
    try:
        return flow.partial(job_id).progress.tokens
    except NotFound:
        return None


def _beginning(flow: Flow, job_id: str) -> str:
    try:
        text = flow.prompt(job_id)
    except (NotFound, Unfit):
        return ""
    line = " ".join(harmless(text[: 4 * _BEGINNING]).split())
    return line if len(line) <= _BEGINNING else line[:_BEGINNING] + "…"


def _listing(rows: list[Row]) -> Listing:
    listing = Listing(
        *("ID", "STATUS", "AGE", "TOOK", "TOKENS", "PROMPT"),
        flexible=("PROMPT",),
        right=("AGE", "TOOK", "TOKENS"),
    )
    now = time.time()
    for row in rows:
        listing.add(
            row.job_id,
            styled(row.status),
            span(now - row.submitted_at),
            "" if row.seconds is None else span(row.seconds),
            "" if row.tokens is None else f"{row.tokens:,}",
            row.prompt,
        )
    return listing


@click.command()
@placed
@click.argument("id", required=False, metavar="[ID]")
@as_json
def status(workspace: Path, id: str | None, json: bool) -> int:
    """Say where a job is; without an id, how many are where.

    It is one word: QUEUED, RUNNING, DONE, FAILED or MISSING (exit code 3). On a terminal it also
    says how many jobs are before it, and how long it may take.
    """
    flow = Flow(workspace_at(workspace))
    if id is None:
        return _print_counts(flow, json)
    place = _position(flow, check_job_id(id))
    if json:
        print_json({"job_id": id, **msgspec.to_builtins(place)})
    else:
        echo(place.status.value)
        if sys.stderr.isatty() and (words := in_words(place)):
            echo(words, err=True)
    return Exit.NOT_FOUND if place.status is Status.MISSING else Exit.OK


def _position(flow: Flow, job_id: str) -> Position:
    try:
        return flow.position(job_id)
    except NotFound:
        return Position(status=Status.MISSING)


def in_words(place: Position) -> str:
    """What there is to say of a job that has not ended."""
    soon = "" if place.eta_s is None else f"done in about {span(place.eta_s)}"
    if place.status is Status.RUNNING:
        return soon
    if place.status is not Status.QUEUED:
        return ""
    if not place.served:
        return NO_SERVER
    first = f"{plural(place.ahead, 'job')} before it" if place.ahead else "next"
    return ", ".join(filter(None, (first, f"{place.running:,} running", soon)))


def _print_counts(flow: Flow, json: bool) -> int:
    counts = {one: flow.counts()[one] for one in FOLDERS if one in VISIBLE}
    if json:
        print_json({one.value: count for one, count in counts.items()})
        return Exit.OK
    listing = Listing("STATUS", "JOBS", "FOLDER", right=("JOBS",))
    for one, count in counts.items():
        listing.add(styled(one), f"{count:,}", FOLDERS[one])
    emit(listing)
    return Exit.OK


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
