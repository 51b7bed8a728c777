"""`penstock container`: a container worker, the engines, and the images of `oci`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.groups import Commands
from penstock.cli.journal import keep_journal
from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, placed
from penstock.cli.place import run as run_async
from penstock.cli.terminal import echo
from penstock.cli.words import size

if TYPE_CHECKING:
    from penstock.api.container.facade import ContainerFacade
    from penstock.config import Settings
    from penstock.workloads.container.config import WorkerConfig
    from penstock.workloads.container.engine import Image
    from penstock.workloads.container.engines.oci.images import ImageStore

log = logging.getLogger("penstock.cli")


@click.group(cls=Commands)
def container() -> None:
    """Serve container jobs over HTTP; engines and images."""


@container.command()
@click.option("--host", metavar="HOST", help="Where to listen; 127.0.0.1 if nothing is said.")
@click.option("--port", type=int, metavar="PORT", help="9000 if nothing is said; 0: a free one.")
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
    "--config",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The worker's YAML file.",
)
@click.option("--engine", metavar="NAME", help="auto, docker, podman, oci or unix:///PATH.")
@click.option("--runtime", metavar="NAME", help="runc, crun or runsc; else the engine's choice.")
@click.option("--concurrency", type=int, metavar="N", help="How many containers run at once.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@placed
@click.pass_obj
def serve(
    place: Place,
    file: Path | None,
    host: str | None,
    port: int | None,
    socket: Path | None,
    token_file: Path | None,
    engine: str | None,
    runtime: str | None,
    concurrency: int | None,
    verbose: bool,
) -> None:
    """Serve container jobs over HTTP, with an engine of its own.

    Jobs and their results are kept in the data directory; what was accepted is taken up again at
    the next start, and containers that still run are reattached to. SIGTERM or SIGINT stop it;
    running containers go on, unless its file says 'on_restart: end'. 'penstock ps' and the other
    commands show its jobs.
    """
    from penstock.cli.service import run_service
    from penstock.workloads.container.config import load_config
    from penstock.workloads.container.config import placed as with_folder

    flags = {
        "host": host,
        "port": port,
        "socket": socket,
        "token_file": token_file,
        "engine": engine,
        "runtime": runtime,
        "max_concurrent_jobs": concurrency,
    }
    settings = place.settings()
    config = with_folder(load_config(file, flags=flags), settings)
    keep_journal(verbose=verbose)
    run_service(_serve(config, settings))


async def _serve(config: WorkerConfig, settings: Settings) -> None:
    from penstock.app.container_worker import container_worker
    from penstock.cli.service import Stop

    stop = Stop()
    stop.listen()
    async with container_worker(config, settings) as (facade, server):
        echo(await _banner(config, facade, server.url, settings))
        await stop.asked.wait()
    log.info("stopped")


async def _banner(
    config: WorkerConfig, facade: ContainerFacade, url: str, settings: Settings
) -> str:
    from penstock import __version__

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
    lines = [f"penstock {__version__}, container worker {config.worker_id}"]
    lines += [f"  {name:<10}  {value}" for name, value in facts]
    return "\n".join([*lines, *health.problems, "ready; Ctrl-C stops it"])


@container.command()
@as_json
@placed
@click.pass_obj
def engines(place: Place, json: bool) -> int:
    """Say which engines work on this machine, and why one doesn't."""
    from rich.text import Text

    from penstock.workloads.container.engines.discovery import candidates

    found = run_async(candidates(place.settings().containers_dir / "oci"))
    if json:
        print_json(msgspec.to_builtins(found))
    else:
        listing = Listing("engine", "works", "found", flexible=("found",), folded=("found",))
        for one in found:
            works = Text("yes", "green") if one.works else Text("no", "yellow")
            facts = f"{one.facts.version}, {one.where}" if one.facts else one.problem
            listing.add(one.name, works, facts)
            if one.facts and one.problem:
                listing.add("", "", one.problem)
            if one.advice:
                listing.add("", "", one.advice)
        emit(listing)
    return Exit.OK if any(one.works for one in found) else Exit.UNAVAILABLE


@container.group(cls=Commands)
def image() -> None:
    """Images of the engine 'oci'; others have their own tools."""


def _store(place: Place) -> ImageStore:
    from penstock.app.engine import make_private
    from penstock.workloads.container.engines.oci.images import ImageStore

    settings = place.settings()
    make_private(settings.data_dir)
    return ImageStore(settings.containers_dir / "oci" / "images")


@image.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tag", help="The name to give it; else those that it has.")
@as_json
@placed
@click.pass_obj
def load(place: Place, file: Path, tag: str | None, json: bool) -> None:
    """Bring in an image that 'docker save', 'podman save' or 'skopeo copy' wrote."""
    _print_images([_store(place).load(file, tag or "")], json)


@image.command("import")
@click.argument("tree", type=click.Path(exists=True, path_type=Path))
@click.argument("tag")
@click.option("--cmd", multiple=True, metavar="WORD", help="Its command; a word each time.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable; may be repeated.")
@as_json
@placed
@click.pass_obj
def import_tree(
    place: Place, tree: Path, tag: str, cmd: tuple[str, ...], env: tuple[str, ...], json: bool
) -> None:
    """Make an image of a folder, or of a tar file, with a root file system."""
    _print_images([_store(place).import_tree(tree, tag, cmd=cmd, env=env)], json)


@image.command("ls")
@as_json
@placed
@click.pass_obj
def list_images(place: Place, json: bool) -> None:
    """List them."""
    _print_images(list(_store(place).list()), json)


@image.command("rm")
@click.argument("references", nargs=-1, required=True, metavar="IMAGE…")
@as_json
@placed
@click.pass_obj
def remove(place: Place, references: tuple[str, ...], json: bool) -> None:
    """Remove images, by tag or id; with --json prints what was removed."""
    store = _store(place)
    for reference in references:
        store.remove(reference)
    if json:
        print_json({"removed": references})


def _print_images(images: list[Image], json: bool) -> None:
    if json:
        print_json([_image(one) for one in images])
        return
    listing = Listing("image", "id", "size", right=("size",), flexible=("image",))
    for one in images:
        listing.add(", ".join(one.tags) or "(no tag)", one.id[:19], size(one.size))
    if images:
        emit(listing)
    else:
        echo("no images; 'penstock container image load FILE' brings one in", err=True)


def _image(one: Image) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(one)
    return fields
