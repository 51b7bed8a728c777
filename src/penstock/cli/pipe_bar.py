"""A model's layers in a row of cells: which of them a node holds, how often each is held. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from penstock.workloads.pipes.status import NodeView

if TYPE_CHECKING:
    from rich.text import Text

T = TypeVar("T")

_WIDEST = 3
"""Cells that a layer has at most."""
_MARK = 10


class Held(IntEnum):
    """What a node has of a layer."""

    NOTHING = 0
    LOADING = 1
    READY = 2


class Glyphs(Struct, frozen=True):
    """The signs of a bar."""

    nothing: str = "·"
    loading: str = "▒"
    ready: str = "█"
    missing: str = "✗"

    @classmethod
    def for_encoding(cls, encoding: str | None) -> Glyphs:
        """Those that can be written there."""
        signs = cls()
        try:
            "".join((signs.nothing, signs.loading, signs.ready, signs.missing)).encode(
                encoding or "ascii"
            )
        except (UnicodeEncodeError, LookupError):
            return cls(nothing=".", loading="+", ready="#", missing="X")
        return signs


def held_by(node: NodeView, model: str, num_layers: int) -> list[Held]:
    """Layer by layer. What is loading is loaded from its first layer on."""
    held = [Held.NOTHING] * num_layers
    for segment in node.segments:
        if segment.model != model:
            continue
        for layer in range(max(0, segment.start), min(num_layers, segment.end)):
            state = Held.READY if segment.state == "ready" else Held.LOADING
            held[layer] = max(held[layer], state)
    return held


def copies(nodes: Iterable[NodeView], model: str, num_layers: int) -> tuple[list[int], list[bool]]:
    """How often each layer is ready, and whether it is being loaded somewhere."""
    ready, loading = [0] * num_layers, [False] * num_layers
    for node in nodes:
        for layer, state in enumerate(held_by(node, model, num_layers)):
            ready[layer] += state is Held.READY
            loading[layer] |= state is Held.LOADING
    return ready, loading


def width_of(num_layers: int, room: int) -> int:
    """Cells of a bar that fits: some for each layer, or several layers in one."""
    if num_layers > room:
        return max(1, room)
    return num_layers * min(_WIDEST, room // num_layers)


def spread(values: Sequence[T], width: int, joined: Callable[[Sequence[T]], T]) -> list[T]:
    """One value for each cell; where several share one, what `joined` makes of them."""
    count = len(values)
    if width >= count:
        return [value for value in values for _ in range(width // count)]
    edges = [cell * count // width for cell in range(width + 1)]
    return [joined(values[a:b]) for a, b in pairwise(edges)]


def ruler(num_layers: int, width: int) -> str:
    """Numbers of layers above their cells."""
    cells = [" "] * width
    step = _MARK if width >= num_layers else _MARK * (num_layers // width + 1)
    for layer in range(0, num_layers, step):
        at = layer * width // num_layers
        for offset, digit in enumerate(str(layer)):
            if at + offset < width:
                cells[at + offset] = digit
    return "".join(cells)


def holding(node: NodeView, model: str, num_layers: int, width: int, glyphs: Glyphs) -> Text:
    """What one node holds."""
    signs = {
        Held.NOTHING: (glyphs.nothing, "dim"),
        Held.LOADING: (glyphs.loading, "yellow"),
        Held.READY: (glyphs.ready, "magenta" if node.state == "draining" else "green"),
    }
    cells = spread(held_by(node, model, num_layers), width, max)
    return _joined(signs[cell] for cell in cells)


def coverage(
    nodes: Sequence[NodeView], model: str, num_layers: int, width: int, glyphs: Glyphs
) -> Text:
    """How often each layer is ready: where it is not at all, no job can pass."""
    ready, loading = copies(nodes, model, num_layers)
    wide = max(1, width // num_layers)

    def sign(count: int, comes: bool) -> tuple[str, str]:
        if count:
            return (str(count) if count < 10 else "+").ljust(wide), "green"
        return ("0".ljust(wide), "yellow") if comes else (glyphs.missing * wide, "bold red")

    cells = min(width, num_layers)
    return _joined(map(sign, spread(ready, cells, min), spread(loading, cells, all)))


def _joined(signs: Iterable[tuple[str, str]]) -> Text:
    from rich.text import Text

    runs = groupby(signs, key=lambda one: one[1])
    return Text.assemble(*(("".join(sign for sign, _ in run), style) for style, run in runs))
