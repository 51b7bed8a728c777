"""What has changed between two looks at the nodes, in a line each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from msgspec import Struct

from penstock.cli.pipe_screen import held, way, why_not
from penstock.workloads.pipes.status import NodeView, PipesView, PipeView


class What(StrEnum):
    JOINED = "joined"
    LOST = "lost"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"


STYLES = {
    What.JOINED: "cyan",
    What.LOST: "red",
    What.LOADING: "yellow",
    What.READY: "green",
    What.DRAINING: "magenta",
    What.COMPLETE: "bold green",
    What.INCOMPLETE: "bold red",
}


class News(Struct, frozen=True, kw_only=True):
    """Something that happened to a node, or to a model's pipe."""

    what: What
    about: str
    """The node, or the model."""
    text: str = ""


def news(
    before: PipesView, after: PipesView, reasons: Mapping[str, str] | None = None
) -> list[News]:
    """First of nodes, then what that means for the models. `reasons` are those of losses."""
    return [*_of_nodes(before, after, reasons or {}), *_of_pipes(before, after)]


def _of_nodes(before: PipesView, after: PipesView, reasons: Mapping[str, str]) -> Iterator[News]:
    known = {node.node_id: node for node in before.nodes}
    there = {node.node_id: node for node in after.nodes}
    for node_id in known.keys() - there.keys():
        parts = (reasons.get(node_id, ""), f"it had {_held(known[node_id]) or 'no layers'}")
        yield News(what=What.LOST, about=node_id, text="; ".join(filter(None, parts)))
    for node_id, node in there.items():
        then = known.get(node_id)
        if then is None or then.boot != node.boot:
            yield News(what=What.JOINED, about=node_id, text=_joined(node))
        elif (then.state, _layers(then)) != (node.state, _layers(node)):
            yield from _moved(node)


def _moved(node: NodeView) -> Iterator[News]:
    if node.state in (What.LOADING, What.READY, What.DRAINING):
        yield News(what=What(node.state), about=node.node_id, text=_held(node))


def _of_pipes(before: PipesView, after: PipesView) -> Iterator[News]:
    known = {pipe.model: pipe for pipe in before.pipes}
    for pipe in after.pipes:
        then = known.get(pipe.model)
        if then is not None and (then.complete, _why(then)) == (pipe.complete, _why(pipe)):
            continue
        what = What.COMPLETE if pipe.complete else What.INCOMPLETE
        yield News(what=what, about=pipe.model, text=way(pipe) if pipe.complete else _why(pipe))


def _why(pipe: PipeView) -> str:
    """A pipe that is complete stays what it is, whichever way is the quickest now."""
    return "" if pipe.complete else why_not(pipe)


def _layers(node: NodeView) -> tuple[tuple[str, str], ...]:
    return tuple((segment.model, segment.layers) for segment in node.segments)


def _held(node: NodeView) -> str:
    models = dict.fromkeys([*(one.model for one in node.segments), *node.end_models])
    return "; ".join(f"{model} {held(node, model)}" for model in models)


def _joined(node: NodeView) -> str:
    held = _held(node)
    return f"{node.address}, {held}" if held else node.address
