"""What the parts of a cut model cost, each on its node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.workloads.pipes.config import LayerRange

Holding = tuple["Stage", LayerRange]
Links = Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Stage:
    """A node with the layers it may get; times in whole microseconds."""

    node_id: str
    layer_us: int
    room: int
    base_us: int = 0

    def cost(self, layers: int, link_us: int) -> int:
        return self.base_us + layers * self.layer_us + link_us

    def fitting(self, bound: int, link_us: int) -> int:
        """The most layers it takes within the bound."""
        left = bound - self.base_us - link_us
        if left < 0:
            return 0
        return min(self.room, left // self.layer_us) if self.layer_us else self.room


def stage_costs(
    given: Sequence[Holding], placed: Sequence[Holding], begin: int, links: Links, origin: str
) -> dict[str, float]:
    """What each node takes for a token. A layer with several holders is shared by them. What was
    given by hand is counted without the link to it: no plan can change where it is."""
    holders = _holders((*given, *placed))
    costs: dict[str, float] = {}
    for at, (stage, layers) in enumerate((*given, *placed)):
        cost = costs.get(stage.node_id, float(stage.base_us))
        for n in range(max(begin, layers.start), layers.end):
            cost += stage.layer_us / len(holders[n])
        if at >= len(given):
            near = [origin] if layers.start <= begin else holders.get(layers.start - 1, [])
            cost += nearest(near, stage.node_id, links)
        costs[stage.node_id] = cost
    return costs


def slowest(
    given: Sequence[Holding],
    placed: Sequence[Holding],
    whole: LayerRange,
    links: Links,
    origin: str,
) -> float:
    """What the slowest stage takes. A copy that is itself the slowest need not be used, so it
    makes nothing slower."""
    found = float("inf")
    while True:
        costs = stage_costs(given, placed, whole.start, links, origin)
        found = min(found, max(costs.values(), default=0.0))
        worst = max(costs, key=lambda node_id: (costs[node_id], node_id), default="")
        left = [[h for h in held if h[0].node_id != worst] for held in (given, placed)]
        covered = _covered((*given, *placed), whole)
        if not worst or _covered((*left[0], *left[1]), whole) != covered:
            return found
        given, placed = left


def nearest(near: Iterable[str], node_id: str, links: Links) -> int:
    """The shortest link from one of these; 0 from a node to itself, or if it is not known."""
    return min((0 if n == node_id else links.get((n, node_id), 0) for n in near), default=0)


def _holders(held: Iterable[Holding]) -> dict[int, list[str]]:
    holders: dict[int, list[str]] = {}
    for stage, layers in held:
        for n in range(layers.start, layers.end):
            holders.setdefault(n, []).append(stage.node_id)
    return holders


def _covered(held: Iterable[Holding], whole: LayerRange) -> set[int]:
    return {n for n in _holders(held) if n in whole}
