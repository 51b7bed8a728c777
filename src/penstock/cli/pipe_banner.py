"""What a node says of itself when it is there, and how another machine joins it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.cli.pipe_screen import held
from penstock.cli.place import Place
from penstock.cli.words import size
from penstock.workloads.llm.values import PIPE_TOPICS
from penstock.workloads.pipes.views import view_of

if TYPE_CHECKING:
    from penstock.config import Settings
    from penstock.workloads.pipes.node import Node

_LOOPBACK = ("127.", "[::1]", "localhost")


def facts_of(node: Node, url: str, children: Mapping[str, int]) -> dict[str, Any]:
    """For programs: who and where it is."""
    return {
        "node_id": node.node_id,
        "address": node.address,
        "model": node.config.model,
        "end_model": node.config.end_model,
        "url": url,
        "pid": os.getpid(),
        "children": dict(children),
    }


def banner(
    place: Place, settings: Settings, url: str, node: Node, children: Mapping[str, int]
) -> str:
    """`children` are nodes that are processes of this one, by name."""
    from penstock import __version__

    what = "origin" if node.config.end_model else "layer node"
    lines = [f"penstock {__version__}, {what} {node.node_id}, process {os.getpid()}"]
    facts = _facts(place, settings, url, node)
    if children:
        facts.append(("children", ", ".join(f"{name} ({pid})" for name, pid in children.items())))
    lines += [f"  {name:<10}  {value}" for name, value in facts if value]
    return "\n".join([*lines, "ready; Ctrl-C stops it"])


def _facts(place: Place, settings: Settings, url: str, node: Node) -> list[tuple[str, str]]:
    record = node.record
    model, here = node.config.model, view_of([record]).nodes[0]
    layers = held(here, model) if record.segments else ""
    auto = "as the network decides" if record.auto else ""
    facts = [
        ("model", f"{model}, {record.num_layers} layers, {node.config.source}"),
        ("layers", ", ".join(filter(None, (layers, auto))) or "none"),
        ("computes", _computes(here.segments[0].dtype if here.segments else "", record.threads)),
        ("memory", f"{size(record.weights)} of weights, {size(record.cache_total)} for caches"),
        ("listening", node.address + _reach(node.address)),
    ]
    if url:
        facts += [("data", str(settings.data_dir)), ("http", f"{url} (OpenAI API: {url}/v1)")]
    if node.config.end_model:
        facts += [
            ("talk", f"penstock {place.spelled()}chat"),
            ("submit", f"penstock {place.spelled()}submit {PIPE_TOPICS}{model} --input '{{…}}'"),
        ]
    return [*facts, ("to join it", _joining(node)), ("key", _key_place(place, settings))]


def _computes(dtype: str, threads: int) -> str:
    count = f"{threads} thread" + ("" if threads == 1 else "s")
    return f"in {dtype}, {count}" if dtype else count


def _reach(address: str) -> str:
    if address.startswith(_LOOPBACK):
        return " (for this machine only; see --listen)"
    return ""


def _joining(node: Node) -> str:
    model = shlex.quote(node.config.model)
    return f"penstock pipe node --model {model} --join {node.address} --key @FILE"


def _key_place(place: Place, settings: Settings) -> str:
    """Where FILE is made from; the key itself is never shown unasked."""
    if settings.pipe_key.startswith("@"):
        return f"FILE is a copy of {settings.pipe_key[1:]}"
    if settings.pipe_key:
        return "FILE has the key that this node was given"
    return f"FILE has what 'penstock {place.spelled()}pipe key' prints here"
