"""`penstock spool result`, `wait`, `list`, `status` and `watch`: the jobs of a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct

from penstock.cli.engine import run
from penstock.cli.exits import Exit
from penstock.cli.formats import Whole, moment, plural, span
from penstock.cli.generation import is_piped, piped
from penstock.cli.live import TextStream, progress, redraw
from penstock.cli.options import as_json, as_lines, limited, listed, wait_timeout
from penstock.cli.output import (
    Form,
    Listing,
    Row,
    echo,
    emit,
    harmless,
    print_done,
    print_json,
    print_line,
    print_list,
    rich_text,
    styled,
    warn,
)
from penstock.core.errors import InvalidRequest, NotFound
from penstock.lifecycles.spool import FOLDERS, SPOOL, VISIBLE, Status
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.job_view import JobView, Partial, Position
from penstock.workloads.spool.disk.closing import EMBEDDING
from penstock.workloads.spool.disk.files import Unfit
from penstock.workloads.spool.disk.ids import check_job_id, submitted_near
from penstock.workloads.spool.disk.meta import time_of
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.outcomes import CANCELLED, DEADLINE, TIMEOUT

if TYPE_CHECKING:
    from rich.console import RenderableType

in_workspace = click.argument("workspace", type=click.Path(path_type=Path))
"""A spool has no engine to be found: its folder is always the first argument."""
STATUS = click.Choice([one.value for one in VISIBLE], case_sensitive=False)
_ENDS = {CANCELLED: Exit.CANCELLED, TIMEOUT: Exit.TIMEOUT, DEADLINE: Exit.TIMEOUT}
"""The exit codes of FAILED jobs by the code in their metadata."""
NO_SERVER = "no server is seen here: 'penstock spool serve' starts one"
_ROWS = 8
"""How many of each kind the board shows."""
_TAIL = 200
_BEGINNING = 120
_PERIOD = 0.25
_LOOK = 0.05
"""Seconds between looks at a job whose text is being made."""
_SELDOM = 0.5
"""Seconds between looks at its place in the queue."""


def check_folder(path: Path) -> None:
    """Nothing but a folder may lie where a workspace is to be."""
    if path.exists() and not path.is_dir():
        raise InvalidRequest("workspace", f"{path} is a file, not a folder")


def workspace_at(path: Path) -> Workspace:
    """One that exists. Raises NotFound."""
    check_folder(path)
    workspace = Workspace(path)
    if not workspace.folder(Status.QUEUED).is_dir():
        what = f"{path} is not a workspace" if path.exists() else f"there is not a workspace {path}"
        raise NotFound(what, hint=f"'penstock spool submit {path} \"…\"' creates one")
    return workspace


def ids_given(given: Sequence[str]) -> list[str]:
    """The ids on the command line; without any, or for `-`, those on standard input."""
    words: list[str] = []
    for text in given or ("-",):
        words += piped().decode("utf-8", "replace").split() if text == "-" else [text]
    return [check_job_id(word) for word in words]


# -- results -----------------------------------------------------------------------


def wait_for(workspace: Workspace, job_id: str, timeout: float | None) -> JobView:
    flow = Flow(workspace)
    warn_if_unserved(flow)
    try:
        return flow.wait(job_id, timeout)
    except KeyboardInterrupt:
        say_how_to_go_on(workspace, job_id)
        raise


def warn_if_unserved(flow: Flow) -> None:
    """Warn whoever waits at a terminal that nothing will happen by itself."""
    if sys.stderr.isatty() and flow.counts()[Status.QUEUED] and not flow.is_served():
        echo(NO_SERVER, err=True)


def say_how_to_go_on(workspace: Workspace, job_id: str) -> None:
    again = f"penstock spool {{}} {workspace.path} {job_id}"
    warn(
        f"job {job_id} goes on",
        f"follow it with '{again.format('watch')}'",
        f"cancel it with '{again.format('cancel')}'",
    )


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
    warn(said)


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


@click.command()
@in_workspace
@click.argument("ids", nargs=-1, metavar="[ID…]")
@click.option("--partial", is_flag=True, help="Of a running job, what there is by now.")
@click.option("--jsonl", is_flag=True, help="Print a line of JSON for each of several jobs.")
@as_json
def result(workspace: Path, ids: tuple[str, ...], partial: bool, jsonl: bool, json: bool) -> int:
    """Print what a job made, as it is.

    The id comes on the command line or on standard input; without one it is the job that ended
    last. The exit code says how the job ended; 9: it has no result yet, 3: there is no such job.
    """
    flow = Flow(workspace_at(workspace))
    wanted = ids_given(ids) if ids or is_piped() else []
    if jsonl:
        codes = []
        for found in map(flow.get, wanted):
            print_line(view_of(found))
            codes.append(code_of(found))
        return max(codes, default=Exit.OK)
    if len(wanted) > 1:
        raise click.UsageError("there are several results; say --jsonl for one on each line")
    found = flow.get(wanted[0]) if wanted else _latest(flow)
    if partial and found.status is Status.RUNNING:
        return _print_partial(flow, found, json)
    return print_found(found, json=json)


@click.command(hidden=True)
@in_workspace
@click.argument("ids", nargs=-1, metavar="[ID…]")
@click.option("--partial", is_flag=True, hidden=True)
@click.option("--jsonl", is_flag=True, hidden=True)
@as_json
@click.pass_context
def get(ctx: click.Context, /, **said: Any) -> int:
    """Print what a job made, with the exit codes of the original tool.

    It is 'result' for scripts that were written for that tool: 0 with the result, 1 for a job that
    FAILED or an id that can't be one, 2 for a job that is not ready or not there.
    """
    workspace_at(said["workspace"])
    try:
        code: int = ctx.invoke(result, **said)
    except InvalidRequest as error:
        # Not 2, which would tell a script to ask again.
        warn(error.message, error.hint)
        return Exit.FAILED
    return {0: 0, int(Exit.NOT_YET): 2, int(Exit.NOT_FOUND): 2}.get(code, 1)


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
@in_workspace
@click.argument("ids", nargs=-1, metavar="[ID…]")
@click.option("--idle", is_flag=True, help="Wait until nothing is queued or running here.")
@wait_timeout
@as_json
def wait(
    workspace: Path, ids: tuple[str, ...], idle: bool, wait_timeout: float | None, json: bool
) -> int:
    """Wait until jobs have ended; prints their ids.

    The ids come on the command line or on standard input, and are printed in their order, so
    that 'result' can go on with them. The exit code is that of the first that failed; 9 if the
    time was over. With --idle it waits for all jobs here, prints how many have ended, and the
    exit code is 1 if one failed meanwhile.
    """
    flow = Flow(workspace_at(workspace))
    if idle:
        if ids:
            raise click.UsageError("--idle waits for all jobs; it takes no ids")
        warn_if_unserved(flow)
        return _wait_idle(flow, wait_timeout, json)
    wanted = ids_given(ids)
    if not wanted:
        raise click.UsageError("say which jobs: their ids, ids on standard input, or --idle")
    warn_if_unserved(flow)
    return _wait_for(flow, wanted, wait_timeout, json)


def _wait_for(flow: Flow, ids: Sequence[str], timeout: float | None, json: bool) -> int:
    end = None if timeout is None else time.monotonic() + timeout
    code, told = Exit.OK, []
    with progress("waiting", len(ids)) as bar:
        for job_id in ids:
            found = flow.wait(job_id, None if end is None else max(0.0, end - time.monotonic()))
            bar.advance()
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
    print_done(
        json,
        {status.value: count for status, count in counts.items()},
        f"{counts[Status.DONE]:,} done, {counts[Status.FAILED]:,} failed",
    )
    return Exit.FAILED if counts[Status.FAILED] > before else Exit.OK


# -- lists -------------------------------------------------------------------------


class JobSummary(Struct, frozen=True, kw_only=True):
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


@click.command("list")
@in_workspace
@click.option(
    "--state", "states", type=STATUS, multiple=True, help="In this state; may be repeated."
)
@limited(20)
@listed
def list_jobs(workspace: Path, states: tuple[str, ...], limit: int, form: Form) -> None:
    """List jobs, newest first."""
    flow = Flow(workspace_at(workspace))
    found = [one.job_id for one in flow.list([Status(one) for one in states] or VISIBLE, limit)]
    if form is Form.NAME:
        echo("".join(f"{job_id}\n" for job_id in found), nl=False)
        return
    now = time.time()
    print_list(
        form,
        [_summary(flow, flow.get(job_id)) for job_id in found],
        lambda one: {
            "ID": Whole(one.job_id),
            "STATUS": styled(one.status),
            "AGE": span(now - one.submitted_at),
            "TOOK": None if one.seconds is None else span(one.seconds),
            "TOKENS": one.tokens,
            "PROMPT": one.prompt,
        },
        name=lambda one: one.job_id,
        empty="no jobs",
    )


def _summary(flow: Flow, found: JobView) -> JobSummary:
    meta = found.meta
    running = found.status is Status.RUNNING
    return JobSummary(
        job_id=found.job_id,
        status=found.status,
        submitted_at=time_of(meta.submitted_at) or submitted_near(found.job_id),
        prompt=_beginning(flow, found.job_id),
        tokens=_partial(flow, found.job_id).progress.tokens if running else meta.completion_tokens,
        seconds=meta.duration_s,
        code=meta.code,
        tags=meta.tags,
    )


def _partial(flow: Flow, job_id: str) -> Partial:
    try:
        return flow.partial(job_id)
    except NotFound:
        return Partial(status=Status.MISSING)


def _beginning(flow: Flow, job_id: str) -> str:
    try:
        text = flow.prompt(job_id)
    except (NotFound, Unfit):
        return ""
    line = " ".join(harmless(text[: 4 * _BEGINNING]).split())
    return line if len(line) <= _BEGINNING else line[:_BEGINNING] + "…"


@click.command()
@in_workspace
@click.argument("id", required=False, metavar="[ID]")
@as_json
def status(workspace: Path, id: str | None, json: bool) -> int:
    """Show the state of a job, or the number of jobs by state.

    It is one word: QUEUED, RUNNING, DONE, FAILED or MISSING (exit code 3). On a terminal it also
    says how many jobs are before it, and how long it may take.
    """
    flow = Flow(workspace_at(workspace))
    if id is None:
        return _print_counts(flow, json)
    position = _position(flow, check_job_id(id))
    if json:
        print_json({"job_id": id, **msgspec.to_builtins(position)})
    else:
        echo(position.status.value)
        if sys.stderr.isatty() and (words := in_words(position)):
            echo(words, err=True)
    return Exit.NOT_FOUND if position.status is Status.MISSING else Exit.OK


def _position(flow: Flow, job_id: str) -> Position:
    try:
        return flow.position(job_id)
    except NotFound:
        return Position(status=Status.MISSING)


def in_words(position: Position) -> str:
    """What there is to say of a job that has not ended."""
    soon = "" if position.eta_s is None else f"done in about {span(position.eta_s)}"
    if position.status is Status.RUNNING:
        return soon
    if position.status is not Status.QUEUED:
        return ""
    if not position.served:
        return NO_SERVER
    first = f"{plural(position.ahead, 'job')} before it" if position.ahead else "next"
    return ", ".join(filter(None, (first, f"{position.running:,} running", soon)))


def _print_counts(flow: Flow, json: bool) -> int:
    counts = flow.counts()
    if json:
        print_json({one.value: counts[one] for one in _COUNTED})
        return Exit.OK
    rows: list[Row] = [
        {"STATUS": styled(one), "JOBS": counts[one], "FOLDER": FOLDERS[one]} for one in _COUNTED
    ]
    emit(Listing(rows))
    return Exit.OK


_COUNTED = tuple(status for status in FOLDERS if status in VISIBLE)

# -- watching ----------------------------------------------------------------------


@click.command()
@in_workspace
@click.argument("id", required=False, metavar="[ID]")
@as_lines
def watch(workspace: Path, id: str | None, json: bool) -> int:
    """Show a job's text as it comes, or all jobs as they move.

    The exit code says how the job ended. With --json each line is an object with a "type":
    status, piece or end; without an id: moved. Ctrl-C leaves the jobs alone.
    """
    flow = Flow(workspace_at(workspace))
    if id is not None:
        return _watch(flow, check_job_id(id), json)
    try:
        if sys.stdout.isatty() and not json:
            run(redraw(partial(_page, flow)))
        else:
            _print_moves(flow, json=json)
    except KeyboardInterrupt:
        pass
    return Exit.OK


def _watch(flow: Flow, job_id: str, json: bool) -> int:
    if json:
        lines = _Lines(job_id)
        for part in _parts(flow, job_id):
            lines.add(part)
    else:
        with _Text(flow, job_id) as text:
            for part in _parts(flow, job_id):
                text.add(part)
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


class _Text(TextStream):
    """The text; on a terminal, until there is some, why there is none."""

    def __init__(self, flow: Flow, job_id: str) -> None:
        super().__init__()
        self._flow, self._job_id = flow, job_id
        self._looked = 0.0

    def add(self, part: Partial) -> None:
        if part.status is not Status.FAILED:
            self.show(part.text)
        waits = not self.text and not SPOOL.is_final(part.status) and sys.stderr.isatty()
        if waits and time.monotonic() - self._looked > _SELDOM:
            self._looked = time.monotonic()
            words = in_words(self._flow.position(self._job_id))
            self.spinner.say(": ".join(filter(None, (part.status.value, words))))


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


def _print_moves(flow: Flow, *, json: bool) -> None:
    """A line for each, for ever."""
    for moved in moves(flow):
        for move in moved:
            if json:
                print_line(move)
            else:
                echo(f"{moment(move.at, time.time())}  {move.job_id}  {move.status}")
        sys.stdout.flush()


async def _page(flow: Flow) -> RenderableType:
    from rich.columns import Columns
    from rich.console import Group

    counts = flow.counts()
    cells = [
        rich_text(styled(one), f" {counts[one]:,}  ", (FOLDERS[one], "dim")) for one in _COUNTED
    ]
    title = rich_text(("spool", "bold"), f" {flow.workspace.path}   Ctrl-C leaves")
    parts: list[RenderableType] = [title, "", Columns(cells, padding=(0, 3))]
    if not flow.is_served():
        parts.append(rich_text((NO_SERVER, "yellow")))
    running = sorted(one.job_id for one in flow.list([Status.RUNNING], _ROWS))
    ended = [flow.get(one.job_id) for one in flow.list(SPOOL.final, _ROWS)]
    for rows in ([_running(flow, one) for one in running], list(map(_ended, ended))):
        if rows:
            parts += ["", Listing(rows)]
    return Group(*parts)


def _running(flow: Flow, job_id: str) -> Row:
    part = _partial(flow, job_id)
    progress = part.progress
    return {
        "RUNNING": Whole(job_id),
        "TOKENS": progress.tokens,
        "PER S": round(progress.tokens_per_second or 0) or None,
        "LEFT": None if progress.eta_s is None else span(progress.eta_s),
        # Its end, in one line: that is where something happens.
        "TEXT": " ".join(harmless(part.text[-_TAIL:]).split())[-60:],
    }


def _ended(found: JobView) -> Row:
    meta = found.meta
    made = found.text if found.status is Status.DONE else found.error
    return {
        "ENDED": Whole(found.job_id),
        "STATUS": styled(found.status),
        "TOOK": None if meta.duration_s is None else span(meta.duration_s),
        "TOKENS": meta.completion_tokens,
        "RESULT": " ".join(harmless(made[:_TAIL]).split()),
    }
