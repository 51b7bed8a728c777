"""`penstock run`: a command in a container, as a job, with its output and its exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.engine import EngineRef, on_engine
from penstock.cli.engine import run as run_async
from penstock.cli.exits import Exit
from penstock.cli.formats import short_id
from penstock.cli.options import DURATION, PAIR, PRIORITY, SIZE, as_json, started
from penstock.cli.output import echo, print_done, print_json, record, warn
from penstock.cli.service import cancelling
from penstock.core.errors import Conflict, NotFound, NotRunning, UnknownTopic
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import JobUpdate, Streamed
from penstock.workloads.container.files.output import read_piece

if TYPE_CHECKING:
    from penstock.app.client import Client
    from penstock.app.containers import Container, Ran
    from penstock.core.job import Job

F = TypeVar("F", bound=Callable[..., Any])

_ENDS = {
    JobState.CANCELLED: Exit.CANCELLED,
    JobState.DENIED: Exit.DENIED,
    JobState.TIMEOUT: Exit.TIMEOUT,
}
"""The exit code of a job whose container has none."""


_MIB = 1 << 20
_WORKER = "worker start --containers auto"
_REFUSED = {
    ("-t", "--tty"): "a job has no terminal; leave it out (-i passes standard input on)",
    ("-p", "--publish"): "ports can't be published; a job ends, it does not serve",
    ("-P", "--publish-all"): "ports can't be published; a job ends, it does not serve",
    ("--privileged",): "jobs have no capabilities, and can't be given any",
    ("--cap-add",): "jobs have no capabilities, and can't be given any",
    ("--device",): "devices can't be passed on; for GPUs there is --gpus",
    ("--mount",): "use -v SOURCE:TARGET:ro for a folder that the worker's 'mounts' list",
    ("--tmpfs",): "jobs have /tmp and /dev/shm (--tmp-size, --shm-size)",
    ("--pull",): "the worker's configuration says when images are pulled ('images.pull')",
    ("--platform",): "the worker runs images of its own machine",
    ("--restart",): "a job that ends has ended; 'penstock retry' runs it again",
    ("--security-opt",): "the worker's configuration sets the walls",
    ("--pid",): "jobs never share the worker's namespaces",
    ("--ipc",): "jobs never share the worker's namespaces; for memory there is --shm-size",
    ("--log-driver",): "the worker keeps the output; 'penstock logs' shows it",
    ("--hostname",): "jobs have no host name of their own",
}
"""Options of Docker that a job can't have, and why."""
_FLAGS = {"--tty", "--publish-all", "--privileged"}


def _docker_options(command: F) -> F:
    """Options of Docker that are refused, with a reason; they are not in the help."""

    def refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            names = "/".join(param.opts)
            raise click.UsageError(f"{names} is not supported: {_REFUSED[(*param.opts,)]}", ctx)

    for names in _REFUSED:
        is_flag = names[-1] in _FLAGS
        option = click.option(
            *names,
            hidden=True,
            expose_value=False,
            is_eager=True,
            callback=refuse,
            is_flag=is_flag,
            multiple=not is_flag,
        )
        command = option(command)
    return command


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("image")
@click.argument("cmd", nargs=-1, type=click.UNPROCESSED)
@click.option(
    *("-e", "--env"),
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable of the container, without a value the one of the same name here; may be"
    " repeated.",
)
@click.option(
    "--env-file",
    multiple=True,
    type=click.File("r"),
    help="A file with such variables, one a line; may be repeated.",
)
@click.option("-m", "--memory", type=SIZE, metavar="SIZE", help="Memory it may use, as 512m.")
@click.option("--cpus", type=float, metavar="N", help="Processors it may use.")
@click.option("--gpus", metavar="WHICH", help="GPUs: 'all', a number, or 'device=0,1'.")
@click.option("--shm-size", type=SIZE, metavar="SIZE", help="Size of /dev/shm.")
@click.option("--tmp-size", type=SIZE, metavar="SIZE", help="Size of /tmp.")
@click.option(
    "--pids", "--pids-limit", type=int, metavar="N", help="Processes it may have at once."
)
@click.option("--timeout", type=DURATION, help="Maximum run time of one attempt.")
@click.option(
    *("-i", "--interactive", "--stdin"),
    "stdin",
    is_flag=True,
    help="Pass standard input on, up to its end. Without it, its input is empty.",
)
@click.option(
    *("-v", "--volume"),
    multiple=True,
    metavar="SOURCE:TARGET:ro",
    help="A folder that the worker's 'mounts' list, read-only; may be repeated.",
)
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
@click.option(
    *("--network", "--net"),
    metavar="NAME",
    help="'none' (the default), 'bridge' or a named network, where the worker allows it.",
)
@click.option("-u", "--user", metavar="UID[:GID]", help="Run as another user than 65534.")
@click.option("-w", "--workdir", metavar="PATH", help="Run in another folder than the image's.")
@click.option(
    "--entrypoint",
    metavar="PROGRAM",
    help="Run this instead of the image's entrypoint and command; '' for none but CMD.",
)
@click.option("--runtime", metavar="NAME", help="Another runtime, as runsc.")
@click.option("--name", metavar="ID", help="The id of the job, which no other job may have.")
@click.option(
    *("-l", "--label"),
    type=PAIR,
    multiple=True,
    metavar="KEY=VALUE",
    help="A label of the job; may be repeated.",
)
@click.option("--priority", type=PRIORITY, help="How urgent it is.")
@click.option("--tenant", help="Its tenant.")
@click.option(
    "--key", help="Idempotency key. Submitting the same key again returns the existing job."
)
@started(True)
@click.option("--rm", is_flag=True, expose_value=False, help="Accepted: it is always removed.")
@click.option("--init", is_flag=True, expose_value=False, hidden=True)
@click.option("--read-only", is_flag=True, expose_value=False, hidden=True)
@_docker_options
@as_json
@on_engine
def run(
    engine: EngineRef,
    /,
    image: str,
    cmd: tuple[str, ...],
    output: Path | None,
    wait: bool,
    json: bool,
    name: str | None,
    label: tuple[tuple[str, str], ...],
    priority: str | None,
    tenant: str | None,
    key: str | None,
    **said: Any,
) -> int:
    """Run a command in a container, as a job.

    IMAGE is an image's name; CMD is put after the entrypoint, as in
    'penstock run alpine:latest echo hello'. Options are those of 'docker run' where they mean the
    same, and come before IMAGE. Its output is shown as it comes, into a pipe byte for byte, and its
    exit code is this command's; without one: 1 failed, 5 cancelled, 6 denied, 7 out of time.
    Ctrl-C cancels the job. If no engine is running, it runs in this process.
    """
    words = cmd[1:] if cmd[:1] == ("--",) else cmd
    wanted = _container(image, words, output is not None, said)
    options: dict[str, Any] = {
        name: value
        for name, value in (
            ("priority", priority),
            ("tenant", tenant),
            ("key", key),
            ("job_id", name),
            ("labels", dict(label) or None),
        )
        if value is not None
    }
    return run_async(_run(engine, wanted, options, output, wait, json))


def _container(image: str, cmd: tuple[str, ...], outputs: bool, said: dict[str, Any]) -> Container:
    from penstock.app.containers import container

    given = {
        "env": _env(said.pop("env"), said.pop("env_file")) or None,
        "memory_mb": _mebibytes("--memory", said.pop("memory")),
        "shm_mb": _mebibytes("--shm-size", said.pop("shm_size")),
        "tmp_mb": _mebibytes("--tmp-size", said.pop("tmp_size")),
        "mounts": dict(map(_mount, said.pop("volume"))) or None,
        "network": _NETWORKS.get(said["network"], said.pop("network")),
        "gpus": _gpus(said.pop("gpus")),
        "entrypoint": _entrypoint(said.pop("entrypoint")),
        "stdin": sys.stdin.buffer.read() if said.pop("stdin") else b"",
        "inputs": dict(map(_input, said.pop("inputs"))) or None,
        **said,
    }
    options = {name: value for name, value in given.items() if value is not None}
    return container(image, *cmd, outputs=outputs, attach=True, **options)


_NETWORKS = {"none": False, "bridge": True}


def _env(given: tuple[str, ...], files: tuple[Any, ...]) -> dict[str, str]:
    """The variables. As in Docker, one without a value that is not set here is left out."""
    lines = [line.strip() for file in files for line in file]
    found = {}
    for entry in (*(line for line in lines if line and not line.startswith("#")), *given):
        name, equals, value = entry.partition("=")
        if not name:
            raise click.BadParameter(f"{entry!r} is not NAME or NAME=VALUE", param_hint="--env")
        if equals or name in os.environ:
            found[name] = value if equals else os.environ[name]
    return found


def _mebibytes(option: str, size: int | None) -> float | None:
    if size is not None and size < _MIB:
        raise click.BadParameter(
            f"{size} bytes is less than 1 MiB; write {size}m for MiB", param_hint=option
        )
    return None if size is None else size / _MIB


def _gpus(text: str | None) -> str | None:
    """As Docker has it: `all`, a number, or `device=` with ids, maybe in quotes."""
    return None if text is None else text.strip("\"'").removeprefix("device=")


def _entrypoint(program: str | None) -> list[str] | None:
    """As Docker has it: one word, and an empty one for none."""
    return None if program is None else [program] if program else []


def _mount(text: str) -> tuple[str, Path]:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    hint = "--volume"
    if not target:
        raise click.BadParameter(f"{text!r} is not SOURCE:TARGET:ro", param_hint=hint)
    if "/" not in source:
        raise click.BadParameter(
            f"{source!r} is not a path; there are no named volumes", param_hint=hint
        )
    if "ro" not in mode.split(","):
        raise click.BadParameter(
            f"{text!r} would be writable; write {source}:{target}:ro. What the container makes, it"
            " leaves in /output (see --output)",
            param_hint=hint,
        )
    return target, Path(source).expanduser().absolute()


def _input(text: str) -> tuple[str, Path]:
    source, _, target = text.partition(":")
    path = Path(source)
    if not path.is_file():
        raise click.BadParameter(f"there is no file {source}", param_hint="--input")
    return target or path.name, path


async def _run(
    engine: EngineRef,
    wanted: Container,
    options: dict[str, Any],
    output: Path | None,
    wait: bool,
    json: bool,
) -> int:
    own = partial(_own_engine, engine, wait)
    async with engine.client_or(own) as (client, _):
        await _check_name(client, options.get("job_id"))
        try:
            handle = await wanted.asubmit(client, **options)
        except UnknownTopic as error:
            error.hint = f"start a worker that does: {engine.command(_WORKER)}"
            raise
        if not wait:
            print_done(json, record(handle.record), handle.job_id)
            return Exit.OK
        shown = _Shown(silent=json)
        async with cancelling(handle.acancel) as interrupted:
            await shown.follow(handle.afollow())
        job = await handle.await_end()
        return await _told(engine, client, job, output, json, bool(interrupted), shown)


async def _check_name(client: Client, name: str | None) -> None:
    """A job with the same id and the same request would count as the same submission."""
    if name is None:
        return
    with suppress(NotFound):
        await client.aget(name)
        raise Conflict(f"--name: there is a job {name!r} already", hint="choose another name")


def _own_engine(
    engine: EngineRef, wait: bool, running: Client | None
) -> AbstractAsyncContextManager[Client]:
    from penstock.app.application import App

    settings = engine.settings()
    if not wait:
        hint = "-d leaves the job to an engine: 'penstock up --containers auto' starts one"
        raise NotRunning(f"no engine answers at {settings.data_dir}", hint=hint)
    if not settings.containers.engine:
        settings = settings.changed(containers__engine="auto")
    return App().run(settings=settings)


class _Shown:
    """What the container writes, on our own streams, as it comes: into a file or pipe byte for
    byte, on a terminal without what would drive it. What did not come is written at the end."""

    def __init__(self, *, silent: bool) -> None:
        self._written = {} if silent else {"stdout": 0, "stderr": 0}
        """Bytes of each stream."""
        self._decode = {
            stream: getincrementaldecoder("utf-8")("replace").decode
            for stream in self._written
            if getattr(sys, stream).isatty()
        }
        self._next: tuple[int, int] | None = None
        """Attempt and number of the next piece; None before the first."""

    async def follow(self, updates: AsyncIterator[JobUpdate]) -> None:
        async for update in updates:
            if isinstance(update, Streamed):
                place = (update.attempt, update.n)
                if place == (self._next or (update.attempt, 1)):
                    self._next = (update.attempt, update.n + 1)
                    await self._write(*read_piece(update.text))

    async def _write(self, stream: str, data: bytes) -> None:
        if stream not in self._written:
            return
        self._written[stream] += len(data)
        if stream in self._decode:
            text = self._decode[stream](data)
            await asyncio.to_thread(echo, text, nl=False, err=stream == "stderr")
        else:
            file = getattr(sys, stream).buffer
            await asyncio.to_thread(file.write, data)
            await asyncio.to_thread(file.flush)

    async def complete(self, end: Ran) -> bool:
        """Write what did not come while it ran; False if something is missing."""
        whole = True
        for stream, done in self._written.items():
            total, left = getattr(end, f"{stream}_count").bytes, await end.aoutput(stream)
            if done < total == len(left):
                await self._write(stream, left[done:])
            elif done < total:
                whole = False
                warn(
                    f"{stream}: {total - done:,} of {total:,} bytes are missing here;"
                    " the worker keeps no more ('max_log_bytes')"
                )
        return whole


_TOLD = (
    *("job_id", "exit_code", "stdout", "stderr", "error_code", "error_message", "skipped"),
    *("peak_memory_bytes", "cpu_seconds"),
)
"""Of a result, with `--json`."""


async def _told(
    engine: EngineRef,
    client: Client,
    job: Job,
    output: Path | None,
    json: bool,
    interrupted: bool,
    shown: _Shown,
) -> int:
    from penstock.app.artifacts import targets
    from penstock.app.containers import ran, result_pointer

    pointer = result_pointer(job)
    end = ran(client, job, await client.aread(pointer) if pointer else b"")
    left = {one.artifact: one for one in end.artifacts}
    whole = await shown.complete(end)
    if output is not None:
        for artifact, path in targets(left, output).items():
            await left[artifact].asave(path)
    if json:
        told = {name: getattr(end, name) for name in _TOLD}
        print_json({**told, "artifacts": [*left], "state": job.state.value})
    elif end.error_code is not None and end.error_code != "NON_ZERO_EXIT":
        warn(
            f"{end.error_code}: {end.error_message}",
            f"see '{engine.command(f'show {short_id(job.job_id)}')}'",
        )
    for reason in end.skipped:
        warn(f"not kept: {reason}")
    if interrupted:
        return Exit.INTERRUPTED
    if end.exit_code is not None:
        return end.exit_code if whole or end.exit_code else Exit.FAILED
    return _ENDS.get(job.state, Exit.FAILED)
