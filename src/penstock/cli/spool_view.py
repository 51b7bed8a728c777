"""`penstock spool result`, `wait`, `list`, `status` and `watch`: the jobs of a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.engine import run
from penstock.cli.exits import Exit
from penstock.cli.formats import Whole, moment, plural, span
from penstock.cli.generation import is_piped
from penstock.cli.groups import command
from penstock.cli.live import TextStream, progress, redraw
from penstock.cli.options import as_lines, options
from penstock.cli.output import (
    Form,
    Listing,
    Row,
    echo,
    echo_lines,
    emit,
    print_done,
    print_json,
    print_line,
    print_list,
    rich_text,
    styled,
    warn,
)
from penstock.cli.selection import job_ids
from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.text import harmless
from penstock.lifecycles.spool import FOLDERS, SPOOL, VISIBLE, Status
from penstock.workloads.spool.client.flow import Flow, JobView, Partial, Position
from penstock.workloads.spool.disk.workspace import Workspace, check_job_id
from penstock.workloads.spool.server.processor import CANCELLED, DEADLINE, TIMEOUT

if TYPE_CHECKING:
    from rich.console import RenderableType

_ENDS = {CANCELLED: Exit.CANCELLED, TIMEOUT: Exit.TIMEOUT, DEADLINE: Exit.TIMEOUT}
"""The exit codes of FAILED jobs by the code in their metadata."""
NO_SERVER = "no server is seen here: 'penstock spool serve' starts one"
_ROWS = 8
"""How many of each kind the board shows."""
_TAIL = 200
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
    words = job_ids(given or (["-"] if is_piped() else []))
    return [check_job_id(word) for word in words]


# -- results -----------------------------------------------------------------------


def warn_if_unserved(flow: Flow) -> None:
    """Warn whoever waits at a terminal that nothing will happen by itself."""
    if sys.stderr.isatty() and flow.counts()[Status.QUEUED] and not flow.is_served():
        echo(NO_SERVER, err=True)


def print_found(found: JobView, *, json: bool = False) -> Exit:
    """Print what an ended job made, or why it failed; the exit code of its end."""
    if json:
        print_json(found.fields())
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


@command()
@options(
    """
    --partial  Of a running job, what there is by now.
    --jsonl    Print a line of JSON for each of several jobs.
    """
)
def result(workspace: Path, job: tuple[str, ...], partial: bool, jsonl: bool, json: bool) -> int:
    """Print what a job made, as it is.

    The id comes on the command line or on standard input; without one it is the job that ended
    last. The exit code says how the job ended; 9: it has no result yet, 3: there is no such job.
    """
    flow = Flow(workspace_at(workspace))
    wanted = ids_given(job) if job or is_piped() else []
    if jsonl:
        codes = []
        for view in map(flow.get, wanted):
            print_line(view.fields())
            codes.append(code_of(view))
        return max(codes, default=Exit.OK)
    if len(wanted) > 1:
        raise click.UsageError("there are several results; say --jsonl for one on each line")
    found = flow.get(wanted[0]) if wanted else flow.latest()
    if found is None:
        hint = f"'penstock spool status {workspace}' counts them"
        raise NotFound(f"no job of {workspace} has ended", hint=hint)
    if not (partial and found.status is Status.RUNNING):
        return print_found(found, json=json)
    part = flow.partial(found.job_id)
    if json:
        progress = msgspec.to_builtins(part.progress)
        print_json({**found.fields(), "partial": part.text, "progress": progress})
    else:
        print_content(part.text.encode())
    return Exit.OK


@command(hidden=True)
@options("--partial  As of 'result'.\n--jsonl  As of 'result'.")
def get(workspace: Path, job: tuple[str, ...], json: bool, **said: bool) -> int:
    """Print what a job made, with the exit codes of the original tool.

    It is 'result' for scripts that were written for that tool: 0 with the result, 1 for a job that
    FAILED or an id that can't be one, 2 for a job that is not ready or not there.
    """
    workspace_at(workspace)
    context = click.get_current_context()
    try:
        code: int = context.invoke(result, workspace=workspace, job=job, json=json, **said)
    except InvalidRequest as error:
        # Not 2, which would tell a script to ask again.
        warn(error.message, error.hint)
        return Exit.FAILED
    return {0: 0, int(Exit.NOT_YET): 2, int(Exit.NOT_FOUND): 2}.get(code, 1)


@command()
@options("--idle  Wait until nothing is queued or running here.")
def wait(
    workspace: Path, job: tuple[str, ...], idle: bool, wait_timeout: float | None, json: bool
) -> int:
    """Wait until jobs have ended; prints their ids.

    The ids come on the command line or on standard input, and are printed in their order, so
    that 'result' can go on with them. The exit code is that of the first that failed; 9 if the
    time was over. With --idle it waits for all jobs here, prints how many have ended, and the
    exit code is 1 if one failed meanwhile.
    """
    flow = Flow(workspace_at(workspace))
    if idle:
        if job:
            raise click.UsageError("--idle waits for all jobs; it takes no ids")
        warn_if_unserved(flow)
        before = flow.counts()[Status.FAILED]
        counts = flow.wait_idle(wait_timeout)
        print_done(
            json,
            {status.value: count for status, count in counts.items()},
            f"{counts[Status.DONE]:,} done, {counts[Status.FAILED]:,} failed",
        )
        return Exit.FAILED if counts[Status.FAILED] > before else Exit.OK
    wanted = ids_given(job)
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


# -- lists -------------------------------------------------------------------------


@command("list")
@options(
    """
    --state STATE... as states  In this state; may be repeated.
    -n, --limit 1..=20          Maximum number of results.
    """,
    states=click.Choice(VISIBLE, case_sensitive=False),
)
def list_jobs(workspace: Path, states: tuple[str, ...], limit: int, form: Form) -> None:
    """List jobs, newest first."""
    flow = Flow(workspace_at(workspace))
    found = [one.job_id for one in flow.list([Status(one) for one in states] or VISIBLE, limit)]
    if form is Form.NAME:
        echo_lines(found)
        return
    now = time.time()
    print_list(
        form,
        [flow.summary(job_id) for job_id in found],
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


def _one_line(text: str) -> str:
    return " ".join(harmless(text).split())


@command()
def status(workspace: Path, job: str | None, json: bool) -> int:
    """Show the state of a job, or the number of jobs by state.

    It is one word: QUEUED, RUNNING, DONE, FAILED or MISSING (exit code 3). On a terminal it also
    says how many jobs are before it, and how long it may take.
    """
    flow = Flow(workspace_at(workspace))
    if job is None:
        counts = flow.counts()
        rows: list[Row] = [
            {"STATUS": styled(one), "JOBS": counts[one], "FOLDER": FOLDERS[one]} for one in VISIBLE
        ]
        print_json({one.value: counts[one] for one in VISIBLE}) if json else emit(Listing(rows))
        return Exit.OK
    try:
        position = flow.position(check_job_id(job))
    except NotFound:
        position = Position(status=Status.MISSING)
    if json:
        print_json({"job_id": job, **msgspec.to_builtins(position)})
    else:
        echo(position.status.value)
        if sys.stderr.isatty() and (words := in_words(position)):
            echo(words, err=True)
    return Exit.NOT_FOUND if position.status is Status.MISSING else Exit.OK


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


# -- watching ----------------------------------------------------------------------


@command()
@as_lines
def watch(workspace: Path, job: str | None, json: bool) -> int:
    """Show a job's text as it comes, or all jobs as they move.

    The exit code says how the job ended. With --json each line is an object with a "type":
    status, piece or end; without an id: moved. Ctrl-C leaves the jobs alone.
    """
    flow = Flow(workspace_at(workspace))
    if job is not None:
        return _watch(flow, check_job_id(job), json)
    try:
        if sys.stdout.isatty() and not json:
            run(redraw(partial(_page, flow)))
        for moved in flow.moves():
            for move in moved:
                if json:
                    print_line(move)
                else:
                    echo(f"{moment(move.at, time.time())}  {move.job_id}  {move.status}")
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    return Exit.OK


def _watch(flow: Flow, job_id: str, json: bool) -> int:
    with nullcontext(_Lines(job_id)) if json else _Text(flow, job_id) as shown:
        while True:
            shown.add(part := flow.partial(job_id))
            if SPOOL.is_final(part.status):
                break
            time.sleep(_LOOK)
    found = flow.get(job_id)
    if json:
        print_line({"type": "end", **found.fields()})
    elif found.status is not Status.DONE:
        say_why(found)
    return code_of(found)


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


async def _page(flow: Flow) -> RenderableType:
    from rich.columns import Columns
    from rich.console import Group

    counts = flow.counts()
    cells = [
        rich_text(styled(one), f" {counts[one]:,}  ", (FOLDERS[one], "dim")) for one in VISIBLE
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
    try:
        part = flow.partial(job_id)
    except NotFound:
        part = Partial(status=Status.MISSING)
    progress = part.progress
    return {
        "RUNNING": Whole(job_id),
        "TOKENS": progress.tokens,
        "PER S": round(progress.tokens_per_second or 0) or None,
        "LEFT": None if progress.eta_s is None else span(progress.eta_s),
        # Its end, in one line: that is where something happens.
        "TEXT": _one_line(part.text[-_TAIL:])[-60:],
    }


def _ended(found: JobView) -> Row:
    meta = found.meta
    made = found.text if found.status is Status.DONE else found.error
    return {
        "ENDED": Whole(found.job_id),
        "STATUS": styled(found.status),
        "TOOK": None if meta.duration_s is None else span(meta.duration_s),
        "TOKENS": meta.completion_tokens,
        "RESULT": _one_line(made[:_TAIL]),
    }
