"""`penstock pipe up`: a whole network of nodes on this machine, in one command."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from penstock.cli.answers import Patience
from penstock.cli.llm import told
from penstock.cli.pipe_children import Children
from penstock.cli.pipe_node import node_settings
from penstock.cli.pipe_options import node_options, nodes
from penstock.cli.place import Place, placed
from penstock.config.settings import PipeDtype
from penstock.workloads.pipes.config import AUTO

if TYPE_CHECKING:
    from penstock.config import Settings
    from penstock.workloads.pipes.weights.source import Source

_OWN = ("end_model", "node_id", "layers", "listen", "advertise", "join", "local_layers")
"""What is said of this node, and not of its children."""


@click.command()
@node_options(nodes)
@placed
@click.pass_obj
def up(place: Place, /, **said: Any) -> int:
    """Start a whole network on this machine.

    This process handles the text and holds its share of the layers, as 'penstock pipe node
    --end-model' does; the other nodes are its children, which end with it. One that dies is
    started again. --memory and --threads are what each node has; else they share what is there.
    """
    from penstock.cli.pipe_serve import serve
    from penstock.cli.service import run_service

    if place.connect:
        raise click.UsageError("--connect makes no sense here: an engine is started")
    count: int = said["nodes"]
    said |= {"end_model": True, "node_id": said["node_id"] or _name()}
    settings = shared(node_settings(place, said), count)
    with told():
        with Patience("looking at the model"):
            source = open_model(settings)
            ranges = cut(source, settings, count)
        with Patience("measuring"):
            settings = measured_once(source, settings)
        own = replace(settings, pipe_layers=ranges.pop(settings.pipe_node_id, "none"))
        return run_service(serve(place, own, said, _children(own, ranges)))


def open_model(settings: Settings) -> Source:
    from penstock.workloads.pipes.setup import pipe_source
    from penstock.workloads.pipes.weights.source import open_source

    return open_source(pipe_source(settings)[1])


def measured_once(source: Source, settings: Settings) -> Settings:
    """All compute in the same: measuring at the same time, each would find something else."""
    from penstock.workloads.pipes.measure import measured
    from penstock.workloads.pipes.model.shape import Shape

    if settings.pipe_dtype.value != AUTO:
        return settings
    choice = measured(Shape.of(source.config), settings.pipe_threads)
    return replace(settings, pipe_dtype=PipeDtype(choice.dtype))


def shared(settings: Settings, count: int) -> Settings:
    """Each node has its part of the machine, unless it is said what it has."""
    from penstock.workloads.pipes.weights.room import machine_memory

    return replace(
        settings,
        pipe_threads=settings.pipe_threads or max(1, (os.cpu_count() or 1) // count),
        pipe_memory=settings.pipe_memory or machine_memory() * 3 // 4 // count,
    )


def cut(source: Source, settings: Settings, count: int) -> dict[str, str]:
    """The layers of each node, by name. All are equally fast, and the first has the ends too.

    They are said once and for all: whoever dies comes back with the same, and nobody else has to
    load them meanwhile.
    """
    from penstock.workloads.pipes.model.shape import Shape
    from penstock.workloads.pipes.placement import Member, plan

    shape = Shape.of(source.config)
    ends = shape.vocabulary * shape.hidden / source.layer_values(0)
    first = settings.pipe_node_id
    names = [first, *(f"{first}-{number}" for number in range(2, count + 1))]
    found = plan(
        shape.num_layers,
        [Member(name, 1.0, shape.num_layers, base_ms=ends * (name == first)) for name in names],
        origin=first,
        local_layers=settings.pipe_local_layers,
    )
    return {name: str(found.ranges[name]) for name in names if name in found.ranges}


def _children(settings: Settings, ranges: Mapping[str, str]) -> Children:
    from penstock.workloads.pipes.setup import network_key, pipe_source

    model, source = pipe_source(settings)
    given = replace(settings, pipe_model=model, pipe_source=source, pipe_key=network_key(settings))
    commands = {name: ("--node-id", name, "--layers", layers) for name, layers in ranges.items()}
    return Children(commands, {**os.environ, **_environment(given)}, settings.pipe_drain)


def _environment(settings: Settings) -> dict[str, str]:
    """What a child is told, the key too: options of a process can be seen by others."""
    names = [name for name in settings.__struct_fields__ if name.startswith("pipe_")]
    return {
        f"PENSTOCK_{name.upper()}": _text(getattr(settings, name))
        for name in names
        if name.removeprefix("pipe_") not in _OWN
    } | {"PENSTOCK_DATA_DIR": str(settings.data_dir)}


def _text(value: Any) -> str:
    if isinstance(value, str | Path):
        return str(value)
    return msgspec.json.encode(value).decode()


def _name() -> str:
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-") or "node"
    return f"{host[:20]}-{secrets.token_hex(2)}"
