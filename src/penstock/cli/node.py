"""`penstock node`: one model split over several machines; the text stays on the origin node."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.engine import EngineRef
from penstock.cli.formats import plural, size
from penstock.cli.groups import Commands
from penstock.cli.live import progress, redraw
from penstock.cli.node_screen import NetworkView, figures
from penstock.cli.node_serve import check_key, joined, keyed, start, up
from penstock.cli.options import options
from penstock.cli.output import Form, emit, print_done, print_json, print_list, rich_text
from penstock.core.errors import (
    InvalidRequest,
    Misconfigured,
    NotFound,
    NotRunning,
    PenstockError,
    Unavailable,
)
from penstock.workloads.pipes.status import PipesView, status_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.config import Settings

Look = Callable[[], Awaitable[PipesView]]


@click.group(cls=Commands)
def node() -> None:
    """Split a language model over several machines."""


node.add_command(start)
node.add_command(up)


@node.command("list")
@joined
@keyed
async def list_nodes(engine: EngineRef, join: tuple[str, ...], key: str | None, form: Form) -> None:
    """List the nodes of a network, as 'status' finds them."""
    _, view = await _found(engine, engine.settings(node__key=key), join)
    print_list(form, view.nodes, figures, empty="no nodes; start one with 'penstock node start'")


@node.command()
@joined
@keyed
@options("--watch  Refresh until Ctrl-C.")
async def status(
    engine: EngineRef,
    join: tuple[str, ...],
    key: str | None,
    watch: bool,
    interval: float,
    json: bool,
) -> None:
    """Show which node holds which layers of which model.

    Also whether a model is complete. It asks a node: one that --join names, or one that was started
    on this data directory; else the running engine. A bar shows a node's layers; below them is how
    many copies of each layer there are. With --json it prints what GET /v1/pipes gives.
    """
    if watch and (json or not sys.stdout.isatty()):
        raise click.UsageError("--watch needs a terminal")
    look, view = await _found(engine, engine.settings(node__key=key), join)

    async def page() -> RenderableType:
        from rich.console import Group

        nonlocal view
        try:
            view = await look()
        except PenstockError as error:
            return Group(NetworkView(view), rich_text((error.message, "bold red")))
        return NetworkView(view)

    if watch:
        await redraw(page, max(0.1, interval))
    elif json:
        print_json(view)
    elif view.nodes:
        emit(NetworkView(view))
    else:
        raise NotFound("there is no node", hint="start one with 'penstock node start'")


async def _found(
    engine: EngineRef, settings: Settings, join: tuple[str, ...]
) -> tuple[Look, PipesView]:
    """The first source that answers, with its answer."""
    from penstock.app.nodes import node_files

    if engine.connect:
        return await _engine(engine)
    addresses = join or [one.address for one in node_files(settings.data_dir / "pipes")]
    reasons = []
    for address in addresses:
        look = _node(settings, address)
        try:
            return look, await look()
        except Unavailable as error:
            reasons.append(error.message)
    if join:
        raise Unavailable("; ".join(reasons), hint="is its key this one ('penstock node key')?")
    try:
        return await _engine(engine)
    except NotRunning:
        raise NotRunning(
            f"no node and no engine of {settings.data_dir} answers",
            hint="name one with --join or --connect, or start one with 'penstock node start'",
        ) from None


def _node(settings: Settings, address: str) -> Look:
    from penstock.workloads.pipes.setup import network_key, observe

    check_key(settings)
    key = network_key(settings)

    async def look() -> PipesView:
        try:
            return await observe(address, key)
        except OSError as error:
            raise Unavailable(f"{address}: {error}") from error

    return look


async def _engine(engine: EngineRef) -> tuple[Look, PipesView]:
    async def look() -> PipesView:
        async with engine.api() as api:
            return status_of(await api.workers())

    return look, await look()


@node.command()
@options("--new  Make a new one; the old one is no longer valid.")
def key(engine: EngineRef, new: bool, json: bool) -> None:
    """Print the network's key, which is made if there is none.

    It is kept in the data directory, readable for its owner only. Every machine that has it belongs
    to the network: treat it as a password. Running nodes keep the old key until they are restarted.
    """
    from penstock.workloads.pipes.setup import network_key

    settings = engine.settings()
    if new and settings.node.key:
        raise Misconfigured(
            "the key is not kept in the data directory: the setting node.key has it",
            hint="change it there, or leave it out",
        )
    if new:
        settings.pipe_key_file.unlink(missing_ok=True)
    found = network_key(settings)
    file = "" if settings.node.key else str(settings.pipe_key_file)
    print_done(json, {"key": found, "file": file}, found)


@node.command()
@click.argument("folder", type=click.Path(path_type=Path))
def prepare(engine: EngineRef, model: str, folder: Path, json: bool) -> None:
    """Write a model's layers to files of their own.

    MODEL is as for 'penstock node start'. FOLDER is made, and has a file for each layer: a machine
    that holds layers 0-14 needs config.json, model.safetensors.index.json and layer-000.safetensors
    to layer-014.safetensors; never the others, which turn text into numbers and back.
    """
    from penstock.workloads.pipes.setup import pipe_source

    if folder.exists():
        raise InvalidRequest("FOLDER", f"{folder} exists already: give a new folder")
    name, path = pipe_source(engine.settings(node__model=model))
    with progress(name) as bar:
        # Only now: these take a second to import.
        from penstock.workloads.pipes.weights.prepared import prepare as write
        from penstock.workloads.pipes.weights.source import open_source

        made = write(open_source(path), folder, bar.update)
    count, layers = plural(made.num_layers, "layer"), size(made.layer_bytes)
    print_done(json, made, f"{folder}: {count}, {layers}, and {size(made.end_bytes)} of ends")
