"""`penstock run` and `penstock container`: commands in containers as jobs, engines and images."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.app import App
from penstock.app.service import Stop, cancelling, log_to_stderr, run_service
from penstock.cli.engine import EngineRef
from penstock.cli.exits import ENDS, Exit
from penstock.cli.formats import short_id, size
from penstock.cli.groups import Commands, command
from penstock.cli.live import saying_why
from penstock.cli.options import PRIORITY, job_fields, options, started
from penstock.cli.output import (
    Form,
    Listing,
    Row,
    Wrapped,
    banner,
    echo,
    emit,
    print_done,
    print_json,
    print_list,
    record,
    warn,
)
from penstock.core.errors import Conflict, NotFound, NotRunning, UnknownTopic

if TYPE_CHECKING:
    from penstock.api.container.facade import ContainerFacade
    from penstock.app.client import Client
    from penstock.app.containers import Container, OutputFollower
    from penstock.config import Settings
    from penstock.core.job import Job
    from penstock.workloads.container.config import WorkerConfig
    from penstock.workloads.container.engine import Image
    from penstock.workloads.container.engines.oci.images import ImageStore


F = TypeVar("F", bound=Callable[..., Any])

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
_JOB = ("priority", "tenant", "key", "job_id", "label")
"""Options of the job; the others are those of its container."""
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


@command(context_settings={"allow_interspersed_args": False})
@click.argument("cmd", nargs=-1, type=click.UNPROCESSED)
@options(
    """
    -e, --env NAME[=VALUE]...  A variable of the container, without a value the one of the same name
            here; may be repeated.
    --env-file FILENAME...     A file with such variables, one a line; may be repeated.
    -m, --memory SIZE          Memory it may use, as 512m.
    --cpus NUMBER              Processors it may use.
    --gpus WHICH               GPUs: 'all', a number, or 'device=0,1'.
    --shm-size SIZE            Size of /dev/shm.
    --tmp-size SIZE            Size of /tmp.
    --pids, --pids-limit N as pids  Processes it may have at once.
    --timeout DURATION         Maximum run time of one attempt.
    -i, --interactive, --stdin  Pass standard input on, up to its end. Without it, its input is
            empty.
    -v, --volume SOURCE:TARGET:ro...  A folder that the worker's 'mounts' list, read-only; may be
            repeated.
    --input FILE[:PATH]... as inputs  A file that it finds in /input; may be repeated.
    --output DIRECTORY         Give it a folder /output, and copy what it leaves there into this
            one.
    --network, --net NAME as network  'none' (the default), 'bridge' or a named network, where the
            worker allows it.
    -u, --user UID[:GID]       Run as another user than 65534.
    -w, --workdir PATH         Run in another folder than the image's.
    --entrypoint PROGRAM       Run this instead of the image's entrypoint and command; '' for none
            but CMD.
    --runtime NAME             Another runtime, as runsc.
    --name ID as job_id        The id of the job, which no other job may have.
    -l, --label KEY=VALUE...   A label of the job; may be repeated.
    --priority PRIORITY        How urgent it is.
    --tenant TENANT            Its tenant.
    --key KEY                  Idempotency key. Submitting the same key again returns the existing
            job.
    """,
    env_file=click.File("r"),
    output=click.Path(file_okay=False, path_type=Path),
    priority=PRIORITY,
)
@started(True)
@click.option("--rm", is_flag=True, expose_value=False, help="Accepted: it is always removed.")
@click.option("--init", is_flag=True, expose_value=False, hidden=True)
@click.option("--read-only", is_flag=True, expose_value=False, hidden=True)
@_docker_options
async def run(
    engine: EngineRef,
    /,
    image: str,
    cmd: tuple[str, ...],
    output: Path | None,
    wait: bool,
    json: bool,
    **said: Any,
) -> int:
    """Run a command in a container, as a job.

    IMAGE is an image's name; CMD is put after the entrypoint, as in
    'penstock run alpine:latest echo hello'. Options are those of 'docker run' where they mean the
    same, and come before IMAGE. Its output is shown as it comes, into a pipe byte for byte, and its
    exit code is this command's; without one: 1 failed, 5 cancelled, 6 denied, 7 out of time.
    Ctrl-C cancels the job. If no engine is running, it runs in this process.
    """
    from penstock.app.containers import OutputFollower

    words = cmd[1:] if cmd[:1] == ("--",) else cmd
    options = job_fields({name: said.pop(name) for name in _JOB})
    wanted = _container(image, words, output is not None, said)
    async with engine.client_or(partial(_own_engine, engine, wait)) as (client, _):
        await _check_name(client, options.get("job_id"))
        try:
            handle = await wanted.asubmit(client, **options)
        except UnknownTopic as error:
            error.hint = f"start a worker that does: {engine.command(_WORKER)}"
            raise
        if not wait:
            print_done(json, record(handle.record), handle.job_id)
            return Exit.OK
        shown = OutputFollower(_write, () if json else ("stdout", "stderr"))
        why = saying_why(client.api, handle.job_id)
        async with why, cancelling(handle.acancel) as interrupted:
            await shown.follow(handle.afollow())
        job = await handle.await_end()
        code = await _told(engine, client, job, output, json, shown)
        return Exit.INTERRUPTED if interrupted else code


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
    settings = engine.settings()
    if not wait:
        hint = "-d leaves the job to an engine: 'penstock up --containers auto' starts one"
        raise NotRunning(f"no engine answers at {settings.data_dir}", hint=hint)
    if not settings.containers.engine:
        settings = settings.changed(containers__engine="auto")
    return App().run(settings=settings)


_decode: dict[str, Callable[[bytes], str]] = {}


async def _write(stream: str, data: bytes) -> None:
    """On our own stream: into a file or pipe byte for byte, on a terminal without what would drive
    it."""
    file = getattr(sys, stream)
    if file.isatty():
        decode = _decode.setdefault(stream, getincrementaldecoder("utf-8")("replace").decode)
        await asyncio.to_thread(echo, decode(data), nl=False, err=stream == "stderr")
    else:
        await asyncio.to_thread(file.buffer.write, data)
        await asyncio.to_thread(file.buffer.flush)


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
    shown: OutputFollower,
) -> int:
    from penstock.app.artifacts import targets
    from penstock.app.containers import ran, result_pointer

    pointer = result_pointer(job)
    end = ran(client, job, await client.aread(pointer) if pointer else b"")
    left = {one.artifact: one for one in end.artifacts}
    missing = await shown.complete(end)
    for stream, text in missing.items():
        warn(f"{stream}: {text} are missing here; the worker keeps no more ('max_log_bytes')")
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
    if end.exit_code is not None:
        return end.exit_code if not missing or end.exit_code else Exit.FAILED
    return ENDS.get(job.state, Exit.FAILED)


# -- a worker, engines and images --------------------------------------------------


log = logging.getLogger("penstock.cli")
_PATH = click.Path(path_type=Path)


@click.group(cls=Commands)
def container() -> None:
    """Run and serve container jobs; engines and images."""


@container.command()
@options(
    """
    --host HOST                         Where to listen; by default 127.0.0.1.
    --port PORT                         By default 9000; 0: a free one.
    --socket PATH                       Listen on a Unix socket, not at a host and port.
    --token-file FILE                   A file with the token that callers must send.
    --worker-config FILE as file        The worker's YAML file.
    --engine NAME as container_engine   auto, docker, podman, oci or unix:///PATH.
    --runtime NAME                      runc, crun or runsc; else the engine's choice.
    --concurrency N as max_concurrent_jobs  How many containers run at once.
    """,
    port=int,
    socket=_PATH,
    token_file=_PATH,
    file=_PATH,
)
def serve(
    engine: EngineRef, /, file: Path | None, container_engine: str, verbose: bool, **flags: Any
) -> None:
    """Serve container jobs over HTTP, with an engine of its own.

    Jobs and their results are kept in the data directory; unfinished jobs go on after the next
    start, and containers that still run are reattached to. SIGTERM or SIGINT stop it;
    running containers go on, unless its file says 'on_restart: end'. 'penstock ps' and the other
    commands show its jobs.
    """
    from penstock.workloads.container.config import load_config
    from penstock.workloads.container.config import placed as with_folder

    settings = engine.settings()
    flags["engine"] = container_engine
    config = with_folder(load_config(file, flags=flags), settings)
    log_to_stderr(verbose=verbose)
    run_service(_serve(config, settings))


async def _serve(config: WorkerConfig, settings: Settings) -> None:
    from penstock.app.container_worker import container_worker

    stop = Stop()
    stop.listen()
    async with container_worker(config, settings) as (facade, server):
        echo(await _banner(config, facade, server.url, settings))
        await stop.asked.wait()
    log.info("stopped")


async def _banner(
    config: WorkerConfig, facade: ContainerFacade, url: str, settings: Settings
) -> str:
    health = await facade.health()
    engine = health.engine
    images = ", ".join(config.images.allowed)
    facts = [
        ("listening", url if config.socket else f"{url} (read {url}/docs)"),
        ("callers", "must send the token" if config.token else "anybody on this machine"),
        ("engine", f"{engine['name']} {engine['version']}"),
        ("at once", f"{config.max_concurrent_jobs} containers"),
        ("images", "any" if images == "*" else images),
        ("folder", str(settings.data_dir)),
    ]
    if health.running_jobs or health.queued_jobs:
        found = f"{health.running_jobs} running and {health.queued_jobs} queued jobs"
        facts.append(("resumed", found))
    return banner(f"container worker {config.worker_id}", facts, *health.problems)


@container.command()
async def engines(engine: EngineRef, json: bool) -> int:
    """Show which container engines work on this machine.

    Also why the others do not, and what to do about it.
    """
    from rich.text import Text

    from penstock.workloads.container.engines.discovery import candidates

    found = await candidates(engine.settings().containers_dir / "oci")
    rows: list[Row] = []
    for one in found:
        works = Text("yes", "green") if one.works else Text("no", "yellow")
        facts = f"{one.facts.version}, {one.where}" if one.facts else one.problem
        rows.append({"ENGINE": one.name, "WORKS": works, "FOUND": Wrapped(facts)})
        for more in (one.problem if one.facts else "", one.advice):
            if more:
                rows.append({"ENGINE": "", "WORKS": "", "FOUND": Wrapped(more)})
    print_json(found) if json else emit(Listing(rows))
    return Exit.OK if any(one.works for one in found) else Exit.UNAVAILABLE


@container.group(cls=Commands)
def image() -> None:
    """Images of the engine 'oci'; others have their own tools."""


def _store(engine: EngineRef) -> ImageStore:
    from penstock.app.engine import make_private
    from penstock.workloads.container.engines.oci.images import ImageStore

    settings = engine.settings()
    make_private(settings.data_dir)
    return ImageStore(settings.containers_dir / "oci" / "images")


@image.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@options("--tag TAG  The name to give it; else those that it has.")
def load(engine: EngineRef, file: Path, tag: str | None, form: Form) -> None:
    """Bring in an image that 'docker save', 'podman save' or 'skopeo copy' wrote."""
    _print_images([_store(engine).load(file, tag or "")], form)


@image.command("import")
@click.argument("tree", type=click.Path(exists=True, path_type=Path))
@options(
    """
    --cmd WORD...        Its command; a word each time.
    --env NAME=VALUE...  A variable; may be repeated.
    """
)
def import_tree(
    engine: EngineRef, tree: Path, tag: str, cmd: tuple[str, ...], env: tuple[str, ...], form: Form
) -> None:
    """Make an image of a folder, or of a tar file, with a root file system."""
    _print_images([_store(engine).import_tree(tree, tag, cmd=cmd, env=env)], form)


@image.command("list")
def list_images(engine: EngineRef, form: Form) -> None:
    """List the images."""
    _print_images(list(_store(engine).list()), form)


@image.command("delete")
@click.argument("references", nargs=-1, required=True, metavar="IMAGE...")
def delete(engine: EngineRef, references: tuple[str, ...], json: bool) -> None:
    """Delete images, by tag or id; with --json prints what was deleted."""
    store = _store(engine)
    for reference in references:
        store.remove(reference)
    print_done(json, {"removed": references}, f"deleted {', '.join(references)}")


def _print_images(images: list[Image], form: Form) -> None:
    print_list(
        form,
        images,
        lambda one: {
            "IMAGE": ", ".join(one.tags) or "(no tag)",
            "ID": one.id[:19],
            "SIZE": size(one.size),
        },
        name=lambda one: one.tags[0] if one.tags else one.id,
        empty="no images; load one with 'penstock container image load FILE'",
    )


container.add_command(run, "run")
