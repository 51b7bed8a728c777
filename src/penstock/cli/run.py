"""`penstock run`: a command in a container, as a job, with its output and its exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.interrupt import interruptible
from penstock.cli.paper import print_json, record
from penstock.cli.parameters import DURATION, PRIORITY, as_json, several
from penstock.cli.place import Place, client_at, placed
from penstock.cli.place import run as run_async
from penstock.cli.terminal import echo, echo_content
from penstock.cli.words import short_id
from penstock.core.errors import NotRunning, PenstockError
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import Logged

if TYPE_CHECKING:
    from penstock.app.client import Client, JobHandle
    from penstock.app.containers import Container
    from penstock.config import Settings
    from penstock.core.job import Job
    from penstock.workloads.container.executor import Ran

_ENDS = {
    JobState.CANCELLED: Exit.CANCELLED,
    JobState.DENIED: Exit.DENIED,
    JobState.TIMEOUT: Exit.TIMEOUT,
}
"""The exit code of a job whose container has none."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("image")
@click.argument("cmd", nargs=-1, type=click.UNPROCESSED)
@several("--env", "A variable of the container; may be repeated.")
@click.option("--memory", type=float, metavar="MB", help="Memory it may use.")
@click.option("--cpus", type=float, metavar="N", help="Processors it may use.")
@click.option("--pids", type=int, metavar="N", help="Processes it may have at once.")
@click.option("--timeout", type=DURATION, help="How long it may run.")
@click.option("-i", "--stdin", is_flag=True, help="Pass standard input on, up to its end.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="FILE[:PATH]",
    help="A file that it finds in /input; may be repeated.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Give it a folder /output, and copy what it leaves there into this one.",
)
@click.option("--network", is_flag=True, help="With a network, where the worker allows it.")
@click.option("--user", metavar="UID[:GID]", help="Run as another user than 65534.")
@click.option("--workdir", metavar="PATH", help="Run in another folder than the image's.")
@click.option("--runtime", metavar="NAME", help="Another runtime, as runsc.")
@click.option("--priority", type=PRIORITY, help="How urgent it is.")
@click.option("--tenant", help="Whom it belongs to.")
@click.option("--key", help="An idempotency key: the same key again is the same job.")
@click.option("-d", "--detach", is_flag=True, help="Print the job's id, and leave it to run.")
@as_json
@placed
@click.pass_obj
def run(
    place: Place,
    /,
    image: str,
    cmd: tuple[str, ...],
    inputs: tuple[str, ...],
    output: Path | None,
    detach: bool,
    json: bool,
    priority: str | None,
    tenant: str | None,
    key: str | None,
    **said: Any,
) -> int:
    """Run a command in a container, as a job.

    IMAGE is an image's name; CMD is put after its entrypoint, as in
    'penstock run alpine:latest -- echo hello'. Its output is shown as it comes, and its exit
    code is this command's; without one: 1 failed, 5 cancelled, 6 denied, 7 out of time.
    Ctrl-C ends the container. If no engine is running, it runs in this process.
    """
    words = cmd[1:] if cmd[:1] == ("--",) else cmd
    wanted = _container(image, words, inputs, output is not None, said)
    options: dict[str, Any] = {
        name: value
        for name, value in (("priority", priority), ("tenant", tenant), ("key", key))
        if value is not None
    }
    return run_async(_run(place, wanted, options, output, detach, json))


def _container(
    image: str, cmd: tuple[str, ...], inputs: tuple[str, ...], outputs: bool, said: dict[str, Any]
) -> Container:
    from penstock.app.containers import container

    given = {"memory_mb": said.pop("memory"), "env": dict(said.pop("env")) or None, **said}
    if given.pop("stdin"):
        given["stdin"] = sys.stdin.buffer.read()
    if not given["network"]:
        del given["network"]
    options = {name: value for name, value in given.items() if value is not None}
    return container(image, *cmd, inputs=dict(map(_input, inputs)), outputs=outputs, **options)


def _input(text: str) -> tuple[str, Path]:
    source, _, target = text.partition(":")
    path = Path(source)
    if not path.is_file():
        raise click.BadParameter(f"there is no file {source}", param_hint="--input")
    return target or path.name, path


async def _run(
    place: Place,
    wanted: Container,
    options: dict[str, Any],
    output: Path | None,
    detach: bool,
    json: bool,
) -> int:
    async with _engine(place, detach) as client:
        handle = await wanted.asubmit(client, **options)
        if detach:
            print_json(record(handle.record)) if json else echo(handle.job_id)
            return Exit.OK
        async with interruptible(handle) as interrupted:
            await _show(handle, silent=json)
        job = await handle.await_end()
        return await _told(client, job, output, json, bool(interrupted))


@asynccontextmanager
async def _engine(place: Place, detach: bool) -> AsyncIterator[Client]:
    """The engine that runs, or else one in this process."""
    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(client_at(place))
        except NotRunning:
            if place.connect or detach:
                raise
            client = await stack.enter_async_context(_own_engine(place.settings()))
        yield client  # if it is lost from here on, it is waited for: it has the job


def _own_engine(settings: Settings) -> AbstractAsyncContextManager[Client]:
    from penstock.app.application import App

    if not settings.containers:
        settings = msgspec.structs.replace(settings, containers="auto")
    return App().run(settings=settings)


async def _show(handle: JobHandle[Any], *, silent: bool) -> None:
    """What the container writes, as it comes: each stream to ours."""
    async for update in handle.afollow():
        if isinstance(update, Logged) and not silent:
            line = update.line
            echo_content(line.text, err=line.level != "stdout")


async def _told(
    client: Client, job: Job, output: Path | None, json: bool, interrupted: bool
) -> int:
    from penstock.workloads.container.executor import ran, result_pointer

    pointer = result_pointer(job)
    end = ran(job, await client.aread(pointer) if pointer else b"")
    if output is not None:
        await asyncio.to_thread(_save, end, output)
    if json:
        print_json({**msgspec.to_builtins(end), "state": job.state.value})
    elif end.error_code is not None and end.error_code != "NON_ZERO_EXIT":
        echo(f"penstock: {end.error_code}: {end.error_message}", err=True)
        echo(f"  job {short_id(job.job_id)}; see 'penstock show {job.job_id}'", err=True)
    for reason in end.skipped:
        echo(f"penstock: not kept: {reason}", err=True)
    if interrupted:
        return Exit.INTERRUPTED
    if end.exit_code is not None:
        return end.exit_code
    return _ENDS.get(job.state, Exit.FAILED)


def _save(end: Ran, folder: Path) -> None:
    root = folder.resolve()
    for artifact in end.artifacts:
        path = root / artifact.path
        if not path.resolve().is_relative_to(root):
            raise PenstockError(f"the artifact {artifact.path!r} lies outside of {folder}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(end.read(artifact.path))
