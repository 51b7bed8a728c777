"""`penstock container`: a container worker, the engines, and the images of `oci`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.engine import EngineRef, on_engine
from penstock.cli.engine import run as run_async
from penstock.cli.exits import Exit
from penstock.cli.formats import size
from penstock.cli.groups import Commands
from penstock.cli.options import as_json, listed, verbose
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
)
from penstock.cli.run import run
from penstock.cli.service import Stop, log_to_stderr, run_service

if TYPE_CHECKING:
    from penstock.api.container.facade import ContainerFacade
    from penstock.config import Settings
    from penstock.workloads.container.config import WorkerConfig
    from penstock.workloads.container.engine import Image
    from penstock.workloads.container.engines.oci.images import ImageStore

log = logging.getLogger("penstock.cli")


@click.group(cls=Commands)
def container() -> None:
    """Run and serve container jobs; engines and images."""


@container.command()
@click.option("--host", metavar="HOST", help="Where to listen; by default 127.0.0.1.")
@click.option("--port", type=int, metavar="PORT", help="By default 9000; 0: a free one.")
@click.option(
    "--socket",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Listen on a Unix socket, not at a host and port.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A file with the token that callers must send.",
)
@click.option(
    "--worker-config",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The worker's YAML file.",
)
@click.option("--engine", metavar="NAME", help="auto, docker, podman, oci or unix:///PATH.")
@click.option("--runtime", metavar="NAME", help="runc, crun or runsc; else the engine's choice.")
@click.option(
    *("--concurrency", "max_concurrent_jobs"),
    type=int,
    metavar="N",
    help="How many containers run at once.",
)
@verbose
@on_engine
def serve(engine_ref: EngineRef, /, file: Path | None, verbose: bool, **flags: Any) -> None:
    """Serve container jobs over HTTP, with an engine of its own.

    Jobs and their results are kept in the data directory; unfinished jobs go on after the next
    start, and containers that still run are reattached to. SIGTERM or SIGINT stop it;
    running containers go on, unless its file says 'on_restart: end'. 'penstock ps' and the other
    commands show its jobs.
    """
    from penstock.workloads.container.config import load_config
    from penstock.workloads.container.config import placed as with_folder

    settings = engine_ref.settings()
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
@as_json
@on_engine
def engines(engine: EngineRef, json: bool) -> int:
    """Show which container engines work on this machine.

    Also why the others do not, and what to do about it.
    """
    from rich.text import Text

    from penstock.workloads.container.engines.discovery import candidates

    found = run_async(candidates(engine.settings().containers_dir / "oci"))
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
@click.option("--tag", help="The name to give it; else those that it has.")
@listed
@on_engine
def load(engine: EngineRef, file: Path, tag: str | None, form: Form) -> None:
    """Bring in an image that 'docker save', 'podman save' or 'skopeo copy' wrote."""
    _print_images([_store(engine).load(file, tag or "")], form)


@image.command("import")
@click.argument("tree", type=click.Path(exists=True, path_type=Path))
@click.argument("tag")
@click.option("--cmd", multiple=True, metavar="WORD", help="Its command; a word each time.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable; may be repeated.")
@listed
@on_engine
def import_tree(
    engine: EngineRef, tree: Path, tag: str, cmd: tuple[str, ...], env: tuple[str, ...], form: Form
) -> None:
    """Make an image of a folder, or of a tar file, with a root file system."""
    _print_images([_store(engine).import_tree(tree, tag, cmd=cmd, env=env)], form)


@image.command("list")
@listed
@on_engine
def list_images(engine: EngineRef, form: Form) -> None:
    """List the images."""
    _print_images(list(_store(engine).list()), form)


@image.command("delete")
@click.argument("references", nargs=-1, required=True, metavar="IMAGE…")
@as_json
@on_engine
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
