"""`penstock pipe up`: a whole network of nodes on this machine, in one command."""

from __future__ import annotations

import os
import re
import secrets
import socket
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.journal import keep_journal
from penstock.cli.llm import told
from penstock.cli.pipe_node import node_settings
from penstock.cli.pipe_options import node_options, nodes
from penstock.cli.place import Place, placed

if TYPE_CHECKING:
    from penstock.cli.pipe_children import Children
    from penstock.config import Settings

_PASSED_ON = {
    "pipe_dtype": "--dtype",
    "pipe_context": "--context",
    "pipe_cache": "--cache",
    "pipe_keep": "--keep",
    "pipe_chunk": "--prefill-chunk-size",
    "pipe_drain": "--drain",
}
"""What a child is told as this process was told it."""


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
    said["node_id"] = said["node_id"] or _name()
    settings = _shared(place, said, count)
    keep_journal(verbose=said["verbose"])
    with told():
        return run_service(
            serve(
                place,
                settings,
                json=said["json"],
                no_http=said["no_http"],
                children=_children(settings, count),
            )
        )


def _shared(place: Place, said: dict[str, Any], count: int) -> Settings:
    """The settings of the first node, which leaves the others their part of the machine."""
    from penstock.workloads.pipes.weights.room import machine_memory

    said["end_model"] = True
    settings = node_settings(place, said)
    if not settings.pipe_threads:
        said["threads"] = max(1, (os.cpu_count() or 1) // count)
    if not settings.pipe_memory:
        said["memory"] = machine_memory() * 3 // 4 // count
    return node_settings(place, said)


def _children(settings: Settings, count: int) -> Children:
    from penstock.app.pipes import network_key, pipe_source
    from penstock.cli.pipe_children import Children

    model, source = pipe_source(settings)
    common = ["--model", model, "--source", str(source), "--layers", "auto"]
    common += ["--threads", str(settings.pipe_threads), "--memory", str(settings.pipe_memory)]
    for name, option in _PASSED_ON.items():
        value = getattr(settings, name)
        if value:
            common += [option, str(getattr(value, "value", value))]
    # By its environment: the options of a process can be seen by others.
    environment = {**os.environ, "PENSTOCK_PIPE_KEY": network_key(settings)}
    names = [f"{settings.pipe_node_id}-{number}" for number in range(2, count + 1)]
    return Children(dict.fromkeys(names, common), environment, settings.pipe_drain)


def _name() -> str:
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-") or "node"
    return f"{host[:20]}-{secrets.token_hex(2)}"
