"""Which node holds which layers. Pure: the same members give the same plan everywhere.

A pipe is as quick as its slowest stage, so the layers that nobody has been given by hand are cut
into ranges, one for each node of whom the network may decide, such that the slowest stage is as
quick as can be (see `cutting`). A stage takes what the node has to do anyway, its layers, and the
link to it.

A plan that stands is left alone: to load other layers takes long, and the jobs there have to move.
It is changed where layers are uncovered, and where that makes the slowest stage a fifth quicker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.cutting import cut
from penstock.workloads.pipes.net.records import ranges_of, written
from penstock.workloads.pipes.stages import Holding, Stage, slowest, stage_costs

ENOUGH = 0.8
"""A recut has to make the slowest stage this many times what it was, or less."""


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
    case = _Case.of(num_layers, members, origin, local_layers, links or {})
    ranges, why = case.chosen()
    missing = ranges_of(case.uncovered(ranges))
    if missing:
        why = _shortage(case, missing, layer_bytes)
    else:
        case.add_copies(ranges)
    return Plan(dict(sorted(ranges.items())), missing, case.slowest(ranges) / 1000, why)


@dataclass
class _Case:
    num_layers: int
    begin: int
    stages: Mapping[str, Stage]
    """Every auto node, by id."""
    fixed: list[Holding]
    current: dict[str, LayerRange]
    link: Mapping[tuple[str, str], int]
    origin: str

    @classmethod
    def of(
        cls,
        num_layers: int,
        members: Sequence[Member],
        origin: str,
        local_layers: int,
        links: Mapping[tuple[str, str], float],
    ) -> _Case:
        whole = LayerRange(min(local_layers, num_layers), num_layers)
        fixed: list[Holding] = []
        stages: dict[str, Stage] = {}
        current: dict[str, LayerRange] = {}
        for member in sorted(members, key=lambda m: m.node_id):
            stage = Stage(
                member.node_id, _us(member.layer_ms), max(0, member.room), _us(member.base_ms)
            )
            if not member.auto:
                fixed += [(stage, r) for r in (_within(h, whole) for h in member.held) if r]
                continue
            stages[member.node_id] = stage
            for held in member.held[:1]:
                if 0 <= held.start < held.end <= num_layers and len(held) <= stage.room:
                    current[member.node_id] = held
        link = {pair: _us(ms) for pair, ms in links.items()}
        return cls(num_layers, whole.start, stages, fixed, current, link, origin)

    def chosen(self) -> tuple[dict[str, LayerRange], str]:
        """The plan without copies, and why."""
        anew = self.cut({})
        for kept, why in (
            (self.current, "holes are filled, the rest stays"),
            (self.needed(), "copies fill the holes, the rest stays"),
        ):
            filled = self.cut(kept)
            if self.stands(filled, anew):
                return filled, "it stands" if filled == self.current else why
        return anew, "a new cut"

    def stands(self, filled: Mapping[str, LayerRange], anew: Mapping[str, LayerRange]) -> bool:
        """Whether a cut that begins anew is no reason to move anything."""
        holes, fewest = len(self.uncovered(filled)), len(self.uncovered(anew))
        if holes != fewest:
            return holes < fewest
        return holes > 0 or self.slowest(anew) > ENOUGH * self.slowest(filled)

    def cut(self, kept: Mapping[str, LayerRange]) -> dict[str, LayerRange]:
        """The best ranges for all who are not in `kept`, together with those."""
        held = [*self.fixed, *self.placed(kept)]
        free = [s for n, s in self.stages.items() if n not in kept and s.room > 0]
        whole = LayerRange(self.begin, self.num_layers)
        return {**kept, **cut(whole, free, held, self.link, self.origin, self.current)}

    def needed(self) -> dict[str, LayerRange]:
        """What is held now, without copies that others cover wholly."""
        kept = dict(self.current)
        for node_id in sorted(kept, reverse=True):
            rest = {n: r for n, r in kept.items() if n != node_id}
            if self.uncovered(rest) == self.uncovered(kept):
                kept = rest
        return kept

    def uncovered(self, ranges: Mapping[str, LayerRange]) -> list[int]:
        covered = [r for _, r in self.fixed] + list(ranges.values())
        return [n for n in range(self.begin, self.num_layers) if not any(n in r for r in covered)]

    def placed(self, ranges: Mapping[str, LayerRange]) -> list[Holding]:
        return [(self.stages[n], r) for n, r in sorted(ranges.items())]

    def slowest(self, ranges: Mapping[str, LayerRange]) -> float:
        whole = LayerRange(self.begin, self.num_layers)
        return slowest(self.fixed, self.placed(ranges), whole, self.link, self.origin)

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

    def by_slowness(self, ranges: Mapping[str, LayerRange]) -> list[LayerRange]:
        """The ranges that are held; one with several holders is as slow as its quickest."""
        placed = self.placed(ranges)
        costs = stage_costs(self.fixed, placed, self.begin, self.link, self.origin)
        taking: dict[LayerRange, float] = {}
        for stage, layers in (*self.fixed, *placed):
            cost = costs[stage.node_id]
            taking[layers] = min(cost, taking.get(layers, cost))
        return sorted(taking, key=lambda layers: (-taking[layers], layers))


def _shortage(case: _Case, missing: Sequence[LayerRange], layer_bytes: int) -> str:
    count = sum(map(len, missing))
    fitting = sum(s.room for s in case.stages.values())
    said = f"{count} of {case.num_layers} layers fit nowhere ({written(missing)})"
    if layer_bytes:
        said += f": {count * layer_bytes / 2**20:,.0f} MiB more are needed"
    return f"{said}; nodes that are free to choose have room for {fitting}"


def _within(held: LayerRange, whole: LayerRange) -> LayerRange | None:
    inside = LayerRange(max(held.start, whole.start), min(held.end, whole.end))
    return inside if inside.start < inside.end else None


def _us(ms: float) -> int:
    """Whole microseconds: what is equal stays equal whatever the order of the sums."""
    return round(ms * 1000)
