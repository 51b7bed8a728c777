"""All jobs of a spool as they move from folder to folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.cli.paper import Listing, console, print_line
from penstock.cli.spool_found import NO_SERVER, styled
from penstock.cli.terminal import echo, harmless
from penstock.cli.words import moment, span
from penstock.core.errors import NotFound
from penstock.lifecycles.spool import FOLDERS, SPOOL, VISIBLE, Status
from penstock.workloads.spool.flow import Flow
from penstock.workloads.spool.found import Found, Partial

if TYPE_CHECKING:
    from rich.console import RenderableType

_PERIOD = 0.25
_ROWS = 8
"""How many of each kind are shown."""
_TAIL = 200
_SHOWN = tuple(status for status in FOLDERS if status in VISIBLE)


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
        Text.assemble(styled(one), f" {counts[one]:,}  ", (FOLDERS[one], "dim")) for one in _SHOWN
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


def _ended(flow: Flow, ended: list[Found]) -> RenderableType:
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
