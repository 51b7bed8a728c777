"""Which node holds which layers. Pure: the same members give the same plan everywhere.

A pipe is as quick as its slowest stage, so the layers that nobody has been given by hand are cut
into ranges, one for each node of whom the network may decide, such that the slowest stage is as
quick as can be. A stage takes what the node has to do anyway, its layers, and the link to it.

A plan that stands is left alone: to load other layers takes long, and the jobs there have to move.
It is changed where layers are uncovered, and where that makes the slowest stage a fifth quicker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.records import ranges_of, written

ENOUGH = 0.8
"""A recut has to make the slowest stage this many times what it was, or less."""
ALL_ORDERS = 6
"""Up to this many nodes every order along the model is tried; for more, a likely one."""


@dataclass(frozen=True)
class Member:
    """A node as far as placement goes."""

    node_id: str
    layer_ms: float
    """What one token takes in one layer."""
    room: int = 0
    """Layers that fit; counts for auto nodes only."""
    auto: bool = True
    held: tuple[LayerRange, ...] = ()
    """Given by hand, and then untouchable; or, for an auto node, what it was assigned."""
    base_ms: float = 0.0
    """What it has to do for each token beside: the ends, and the local layers."""


@dataclass(frozen=True)
class Plan:
    ranges: Mapping[str, LayerRange]
    """Of the auto nodes; one that is not named holds nothing."""
    missing: tuple[LayerRange, ...] = ()
    slowest_ms: float = 0.0
    reason: str = ""
    """Why it is this one; with layers missing: how many, and how much memory that is."""


def plan(
    num_layers: int,
    members: Sequence[Member],
    *,
    origin: str = "",
    local_layers: int = 0,
    links: Mapping[tuple[str, str], float] | None = None,
    layer_bytes: int = 0,
) -> Plan:
    """Ranges for the auto nodes among `members`.

    The first `local_layers` layers are with every origin anyway and need no cover. `links` are
    milliseconds one way; a pair that is not named has 0.
    """
    case = _Case(num_layers, members, origin, local_layers, links or {})
    ranges, why = case.chosen()
    missing = ranges_of(case.uncovered(ranges))
    if missing:
        why = case.shortage(missing, layer_bytes)
    else:
        case.add_copies(ranges)
    return Plan(dict(sorted(ranges.items())), missing, case.slowest(ranges) / 1000, why)


@dataclass(frozen=True)
class _Stage:
    """A node, in whole microseconds: what is equal stays equal whatever the order of the sums."""

    node_id: str
    layer_us: int
    room: int
    base_us: int

    def cost(self, layers: int, link_us: int) -> int:
        return self.base_us + layers * self.layer_us + link_us

    def fitting(self, bound: int, link_us: int) -> int:
        """The most layers it takes within the bound."""
        left = bound - self.base_us - link_us
        if left < 0:
            return 0
        return min(self.room, left // self.layer_us) if self.layer_us else self.room


Ranges = Mapping[str, LayerRange]
_Held = Sequence[tuple[str, LayerRange]]


class _Case:
    def __init__(
        self,
        num_layers: int,
        members: Sequence[Member],
        origin: str,
        local_layers: int,
        links: Mapping[tuple[str, str], float],
    ) -> None:
        self.begin, self.end, self.origin = min(local_layers, num_layers), num_layers, origin
        self.link = {pair: round(ms * 1000) for pair, ms in links.items()}
        self.stages: dict[str, _Stage] = {}
        self.fixed: list[tuple[str, LayerRange]] = []
        """What was given by hand."""
        self.current: dict[str, LayerRange] = {}
        """What the others hold now."""
        for one in sorted(members, key=lambda m: m.node_id):
            room = max(0, one.room) if one.auto else 0
            us, base = round(one.layer_ms * 1000), round(one.base_ms * 1000)
            self.stages[one.node_id] = _Stage(one.node_id, us, room, base)
            if not one.auto:
                inside = [_within(held, self.begin, self.end) for held in one.held]
                self.fixed += [(one.node_id, held) for held in inside if held]
            elif one.held:
                held = one.held[0]
                if 0 <= held.start < held.end <= num_layers and len(held) <= room:
                    self.current[one.node_id] = held

    # -- what is chosen -------------------------------------------------------------

    def chosen(self) -> tuple[dict[str, LayerRange], str]:
        """The plan without copies, and why."""
        anew = _Cut(self, {}).ranges()
        for kept, why in (
            (self.current, "holes are filled, the rest stays"),
            (self.needed(), "copies fill the holes, the rest stays"),
        ):
            filled = _Cut(self, kept).ranges()
            if self.stands(filled, anew):
                return filled, "it stands" if filled == self.current else why
        return anew, "a new cut"

    def stands(self, filled: Ranges, anew: Ranges) -> bool:
        """Whether a cut that begins anew is no reason to move anything."""
        holes, fewest = len(self.uncovered(filled)), len(self.uncovered(anew))
        if holes != fewest:
            return holes < fewest
        return holes > 0 or self.slowest(anew) > ENOUGH * self.slowest(filled)

    def needed(self) -> dict[str, LayerRange]:
        """What is held now, without copies that others cover wholly."""
        kept = dict(self.current)
        for node_id in sorted(kept, reverse=True):
            rest = {n: r for n, r in kept.items() if n != node_id}
            if self.uncovered(rest) == self.uncovered(kept):
                kept = rest
        return kept

    def add_copies(self, ranges: dict[str, LayerRange]) -> None:
        """Who has nothing yet takes a copy of the slowest range, or of what fits of it."""
        spare = [s for n, s in self.stages.items() if n not in ranges and s.room > 0]
        for stage in sorted(spare, key=lambda s: (-s.room, s.layer_us, s.node_id)):
            wanted = self.by_slowness(ranges)
            fitting = [r for r in wanted if len(r) <= stage.room]
            if fitting:
                ranges[stage.node_id] = fitting[0]
            elif wanted:
                start = wanted[0].start
                ranges[stage.node_id] = LayerRange(start, start + stage.room)

    # -- what it costs --------------------------------------------------------------

    def held(self, ranges: Ranges) -> _Held:
        return [*self.fixed, *sorted(ranges.items())]

    def holders(self, held: _Held) -> dict[int, list[str]]:
        """By layer."""
        found: dict[int, list[str]] = {}
        for node_id, layers in held:
            for n in range(max(self.begin, layers.start), layers.end):
                found.setdefault(n, []).append(node_id)
        return found

    def uncovered(self, ranges: Ranges) -> list[int]:
        holders = self.holders(self.held(ranges))
        return [n for n in range(self.begin, self.end) if n not in holders]

    def link_us(self, near: Iterable[str], node_id: str) -> int:
        """The shortest link from one of these; 0 from a node to itself, or if it is not known."""
        found = (0 if n == node_id else self.link.get((n, node_id), 0) for n in near)
        return min(found, default=0)

    def costs(self, held: _Held) -> dict[str, float]:
        """What each node takes for a token. A layer with several holders is shared by them. What
        was given by hand is counted without the link to it: no plan can change where it is."""
        holders, by_hand = self.holders(held), {node_id for node_id, _ in self.fixed}
        costs: dict[str, float] = {}
        for node_id, layers in held:
            stage = self.stages[node_id]
            cost = costs.get(node_id, float(stage.base_us))
            for n in range(max(self.begin, layers.start), layers.end):
                cost += stage.layer_us / len(holders[n])
            if node_id not in by_hand:
                first = layers.start <= self.begin
                near = [self.origin] if first else holders.get(layers.start - 1, [])
                cost += self.link_us(near, node_id)
            costs[node_id] = cost
        return costs

    def slowest(self, ranges: Ranges) -> float:
        """What the slowest stage takes. A copy that is itself the slowest need not be used, so it
        makes nothing slower."""
        held, found = self.held(ranges), float("inf")
        while costs := self.costs(held):
            worst = max(costs, key=lambda node_id: (costs[node_id], node_id))
            found = min(found, costs[worst])
            rest = [one for one in held if one[0] != worst]
            if self.holders(rest).keys() != self.holders(held).keys():
                return found
            held = rest
        return 0.0

    def by_slowness(self, ranges: Ranges) -> list[LayerRange]:
        """The ranges that are held; one with several holders is as slow as its quickest."""
        held = self.held(ranges)
        costs, taking = self.costs(held), dict[LayerRange, float]()
        for node_id, layers in held:
            taking[layers] = min(costs[node_id], taking.get(layers, costs[node_id]))
        return sorted(taking, key=lambda layers: (-taking[layers], layers))

    def shortage(self, missing: Sequence[LayerRange], layer_bytes: int) -> str:
        count = sum(map(len, missing))
        fitting = sum(s.room for s in self.stages.values())
        said = f"{count} of {self.end} layers fit nowhere ({written(missing)})"
        if layer_bytes:
            said += f": {count * layer_bytes / 2**20:,.0f} MiB more are needed"
        return f"{said}; nodes that are free to choose have room for {fitting}"


_Reached = tuple[int, int, int, int, tuple[tuple[str, LayerRange], ...]]
"""In the order in which smaller is better: minus the layer that is reached, minus the layers that
stay where they were, nodes, microseconds on links; and the ranges."""


class _Cut:
    """The best ranges for all who are not in `kept`, together with those.

    Layers of a model are alike, so a stage's time grows by the same amount with each. Under a bound
    for the slowest stage, whoever reaches further is never worse off: for each set of nodes and the
    last of them only the furthest layer need be remembered. The smallest bound under which most is
    reached is found by bisection over the times that stages can have at all. Of cuts that are
    equally quick it takes the one that leaves most layers where they were.
    """

    def __init__(self, case: _Case, kept: Ranges) -> None:
        self._case, self._kept = case, kept
        self._free = [s for n, s in case.stages.items() if n not in kept and s.room > 0]
        self._holders = case.holders(case.held(kept))
        self._skip, self._gap_end = {case.end: case.end}, {case.end: case.end}
        """For each layer: the next one that nobody holds, and where that gap ends."""
        for n in range(case.end - 1, case.begin - 1, -1):
            held = n in self._holders
            self._skip[n] = self._skip[n + 1] if held else n
            self._gap_end[n] = n if held else max(n + 1, self._gap_end[n + 1])

    def ranges(self) -> dict[str, LayerRange]:
        bounds = self._bounds()

        def layer(bound: int) -> int:
            return -self._reached(bound)[0]

        at = bisect_left(bounds, layer(bounds[-1]), key=layer)
        return {**self._kept, **dict(self._reached(bounds[at])[-1])}

    def _bounds(self) -> list[int]:
        """Every time that the slowest stage can have."""
        case = self._case
        floor, most = int(case.slowest(self._kept)), case.end - case.begin
        found = {floor}
        for stage in self._free:
            for link in {case.link_us([n], stage.node_id) for n in (case.origin, *case.stages)}:
                found.update(stage.cost(n, link) for n in range(1, min(stage.room, most) + 1))
        return sorted(bound for bound in found if bound >= floor)

    def _reached(self, bound: int) -> _Reached:
        """How far the nodes come if no stage may take longer than `bound`."""
        nothing: _Reached = (-self._skip[self._case.begin], 0, 0, 0, ())
        if len(self._free) > ALL_ORDERS:
            ending = [nothing]
            for stage in self._likely_order():
                ending.append(min(self._with(so_far, stage, bound) for so_far in ending))
            return min(ending)
        states: dict[tuple[int, int], _Reached] = {}
        for mask in range(1, 1 << len(self._free)):
            for last, stage in enumerate(self._free):
                if mask & 1 << last:
                    others = mask ^ 1 << last
                    before = [states[others, i] for i in range(len(self._free)) if others & 1 << i]
                    states[mask, last] = min(
                        self._with(one, stage, bound) for one in before or [nothing]
                    )
        return min(states.values(), default=nothing)

    def _likely_order(self) -> list[_Stage]:
        """From the origin to whoever is nearest each time; then as they stand, and by speed."""
        case, left, order, at = self._case, list(self._free), list[_Stage](), self._case.origin
        nobody = LayerRange(case.end, case.end)
        while left:
            near = min(
                left,
                key=lambda s: (
                    case.link_us([at], s.node_id),
                    case.current.get(s.node_id, nobody),
                    s.layer_us,
                ),
            )
            order.append(near)
            left.remove(near)
            at = near.node_id
        return order

    def _with(self, so_far: _Reached, stage: _Stage, bound: int) -> _Reached:
        """The same, and this node after them; the same alone if it can take nothing."""
        start, path, case = -so_far[0], so_far[-1], self._case
        if path and path[-1][1].end == start:
            near = [path[-1][0]]
        else:
            near = [case.origin] if start == case.begin else self._holders.get(start - 1, [])
        link = case.link_us(near, stage.node_id)
        end = min(start + stage.fitting(bound, link), self._gap_end[start])
        if end <= start:
            return so_far
        held = case.current.get(stage.node_id)
        stays = max(0, min(end, held.end) - max(start, held.start)) if held else 0
        return (
            -self._skip[end],
            so_far[1] - stays,
            so_far[2] + 1,
            so_far[3] + link,
            (*path, (stage.node_id, LayerRange(start, end))),
        )


def _within(held: LayerRange, begin: int, end: int) -> LayerRange | None:
    inside = LayerRange(max(held.start, begin), min(held.end, end))
    return inside if inside.start < inside.end else None
