"""Ways from a model's first layer to its last, over the nodes that hold them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import Hop
from penstock.workloads.pipes.net.records import NodeRecord, SegmentRecord, ranges_of, written

HOP_US = 300
"""What a hop costs beside the link, in the choice of a way. An estimate, not a measurement: it
only has to make fewer hops win between equal links. The page of benchmarks has measured costs."""
UNKNOWN_LINK_MS = 1.0
UNKNOWN_LAYER_MS = 1.0
UNTOLD_LINK_MS = 1_000.0
"""Between two nodes that tell of links, but not of this one: it may be new, or broken."""
MOVED_MS = 100.0
"""For a layer that another node computed for this job before: its cache has to be built again."""
APART_MS = 60_000.0
"""Between two nodes that do not reach each other: tried if there is no other way at all."""


@dataclass(frozen=True)
class Route:
    """Hops that together are the whole model, each layer once."""

    hops: tuple[Hop, ...]
    cost: float
    """Milliseconds that one token is expected to take, all round."""
    disagree: tuple[str, ...] = ()
    """Who was passed over because its weights are others."""

    def __str__(self) -> str:
        route = " → ".join(f"{h.node_id} {LayerRange(h.start, h.end)}" for h in self.hops)
        return f"{route} ({self.cost:.1f} ms a token)"


@dataclass(frozen=True)
class NoRoute:
    """Why there is no route."""

    missing: tuple[LayerRange, ...]
    disagree: tuple[str, ...]
    reason: str


def find_route(
    model: str,
    num_layers: int,
    records: Iterable[NodeRecord],
    origin: str,
    local_layers: int,
    load: Mapping[str, float],
    avoid: Collection[str] = frozenset(),
    reference: Sequence[str] = (),
    apart: Collection[frozenset[str]] = frozenset(),
    before: Sequence[Hop] = (),
) -> Route | NoRoute:
    """The quickest way for a job of `origin`, whose first `local_layers` layers stay with it.

    `load` is how many times longer than alone a layer takes on a node (see `loads`); whom it does
    not name has 1. `reference` are fingerprints that the origin knows to be right, layer by layer,
    "" where it does not; it needs none of layers that it holds itself. `apart` are pairs of nodes
    of which one said that it does not reach the other. `before` is the job's route so far: who is
    still there keeps its layers. At equal cost fewer hops win, then the
    smaller ids: the answer depends on nothing but what is given.
    """
    nodes = {r.node_id: r for r in records}
    holdings = _Holdings.of(model, num_layers, nodes, origin, avoid, reference)
    missing = holdings.missing(origin, local_layers)
    if missing:
        return holdings.gap(model, missing)
    holdings.stay(before)
    links = _Links(nodes, apart)
    home = holdings.cost(origin, LayerRange(0, local_layers), load)
    first = ((origin, 0),) if local_layers else ()
    best: dict[str, _Path] = {origin: (home, len(first), first)}
    for stretch in holdings.stretches(local_layers):
        best = {
            node_id: _extended(best, node_id, stretch, links, holdings.cost(node_id, stretch, load))
            for node_id in holdings.holders(stretch.start)
        }
    cost, _, path = min(
        (cost + links.us(node_id, origin), hops, path)
        for node_id, (cost, hops, path) in best.items()
    )
    ends = [start for _, start in path[1:]] + [num_layers]
    hops = tuple(Hop(n, start, end) for (n, start), end in zip(path, ends, strict=True))
    return Route(hops, cost / 1000, holdings.disagree)


def check_hops(
    hops: Sequence[Hop], num_layers: int, nodes: Collection[str] | None = None
) -> str | None:
    """What is wrong with a way that somebody else made, or None. `nodes` are those that are
    known."""
    if not hops:
        return "a way without a hop"
    at = 0
    for hop in hops:
        if hop.end <= hop.start:
            return f"layers {hop.start} to {hop.end} on {hop.node_id} are not a range"
        if hop.start > at:
            return f"no node has layers {LayerRange(at, hop.start)}: a hole before {hop.node_id}"
        if hop.start < at:
            return f"{hop.node_id} begins at layer {hop.start}, which was computed before"
        if nodes is not None and hop.node_id not in nodes:
            return f"{hop.node_id} is not in the network"
        at = hop.end
    if at != num_layers:
        return f"it ends at layer {at} of {num_layers}"
    return None


def loads(records: Iterable[NodeRecord]) -> dict[str, float]:
    """How much longer a layer takes for what a node has to do already. Jobs are computed
    together, so a few more cost little; one that waits for room costs as much as a whole one."""
    return {r.node_id: 1 + r.jobs / 8 + r.waiting for r in records}


_Path = tuple[int, int, tuple[tuple[str, int], ...]]
"""Cost in microseconds (whole ones, so that equal is equal), hops, and where each begins."""


def _extended(
    best: Mapping[str, _Path], node_id: str, stretch: LayerRange, links: _Links, cost: int
) -> _Path:
    """The best way so far that goes on over `stretch` on this node."""
    so_far, hops, path = min(
        (so_far + links.us(before, node_id), hops + _new_hop(path, node_id), path)
        for before, (so_far, hops, path) in best.items()
    )
    if _new_hop(path, node_id):
        path = (*path, (node_id, stretch.start))
    return so_far + cost, hops, path


def _new_hop(path: tuple[tuple[str, int], ...], node_id: str) -> int:
    return int(not path or path[-1][0] != node_id)


class _Links:
    def __init__(self, nodes: Mapping[str, NodeRecord], apart: Collection[frozenset[str]]) -> None:
        self._nodes, self._apart = nodes, apart

    def us(self, one: str, other: str) -> int:
        return HOP_US + round(self._ms(one, other) / 2 * 1000) if one != other else 0

    def _ms(self, one: str, other: str) -> float:
        links = {node: self._nodes[node].links for node in (one, other) if node in self._nodes}
        told = [links[a][b] for a, b in ((one, other), (other, one)) if b in links.get(a, ())]
        if frozenset((one, other)) in self._apart:
            return APART_MS
        if told:
            return max(told)
        return UNTOLD_LINK_MS if any(links.values()) else UNKNOWN_LINK_MS


@dataclass
class _Holdings:
    """Which layers can be computed where."""

    num_layers: int
    layer_us: list[dict[str, int]]
    """For each layer: what it takes on each node that can be used for it."""
    disagree: tuple[str, ...] = ()
    left_out: list[str] = field(default_factory=list)
    """Who has layers that cannot be used, and why."""

    @classmethod
    def of(
        cls,
        model: str,
        num_layers: int,
        nodes: Mapping[str, NodeRecord],
        origin: str,
        avoid: Collection[str],
        reference: Sequence[str],
    ) -> _Holdings:
        held = cls(num_layers, [{} for _ in range(num_layers)])
        segments = [
            (r, s)
            for _, r in sorted(nodes.items())
            for s in r.of(model)
            if s.layers.start < s.layers.end
        ]
        for record, segment in segments:
            if not segment.ready:
                held.left_out.append(f"{record.node_id} is loading {segment.layers}")
        ready = [(r, s) for r, s in segments if s.ready]
        distrusted = distrust(model, num_layers, ready, origin, reference)
        held.disagree = tuple(distrusted.values())
        for record, segment in ready:
            if record.node_id in distrusted:
                continue
            why = _unwanted(record, origin, avoid)
            if why:
                held.left_out.append(f"{record.node_id} ({segment.layers}) {why}")
                continue
            us = round((segment.layer_ms or record.layer_ms or UNKNOWN_LAYER_MS) * 1000)
            for n in range(segment.layers.start, segment.layers.end):
                known = held.layer_us[n].get(record.node_id, us)
                held.layer_us[n][record.node_id] = min(us, known)
        return held

    def missing(self, origin: str, local_layers: int) -> list[int]:
        """Layers that nobody can compute; the first ones only the origin may."""
        return [
            n
            for n, held in enumerate(self.layer_us)
            if not (origin in held if n < local_layers else held)
        ]

    def stay(self, before: Sequence[Hop]) -> None:
        """Make every change of these hops cost something."""
        for hop in before:
            for n in range(hop.start, hop.end):
                held = self.layer_us[n]
                if hop.node_id in held:
                    for node_id in held.keys() - {hop.node_id}:
                        held[node_id] += round(MOVED_MS * 1000)

    def gap(self, model: str, missing: list[int]) -> NoRoute:
        ranges = ranges_of(missing)
        reason = f"no node can compute layers {written(ranges)} of {model}"
        because = [*self.left_out, *self.disagree]
        return NoRoute(ranges, self.disagree, "; ".join([reason, *because]))

    def stretches(self, begin: int) -> list[LayerRange]:
        """Runs of layers between which nothing changes: whoever can compute one of a run can
        compute all of it at the same price. So a change of node within one never pays."""
        cuts = [
            n
            for n in range(begin, self.num_layers)
            if n == begin or self.layer_us[n] != self.layer_us[n - 1]
        ]
        return [LayerRange(a, b) for a, b in zip(cuts, [*cuts[1:], self.num_layers], strict=True)]

    def holders(self, layer: int) -> Iterable[str]:
        return self.layer_us[layer]

    def cost(self, node_id: str, layers: LayerRange, load: Mapping[str, float]) -> int:
        us = sum(self.layer_us[n][node_id] for n in range(layers.start, layers.end))
        return round(us * load.get(node_id, 1.0))


def _unwanted(record: NodeRecord, origin: str, avoid: Collection[str]) -> str:
    """Why a job is not to go there. The origin is always good enough for its own."""
    if record.node_id == origin:
        return ""
    if record.node_id in avoid:
        return "is avoided"
    if record.draining:
        return "is about to leave"
    return "is stalled" if record.stalled else ""


# -- whether nodes that hold a model of one name hold the same model. Pure ----------------
# Each node tells a fingerprint of every layer it holds. One layer that differs is enough: such a
# node has other weights, also where nobody can compare.

Held = Sequence[tuple[NodeRecord, SegmentRecord]]


def distrust(
    model: str, num_layers: int, held: Held, origin: str, reference: Sequence[str]
) -> dict[str, str]:
    """Nodes that no job of `origin` may use, each with the reason.

    What the origin holds itself is right for it, then what it knows (`reference`, "" where it
    does not); beyond that, what most nodes have.
    """
    found: dict[str, str] = {}
    prints: dict[str, dict[int, str]] = {}
    for record, segment in held:
        node_id, layers = record.node_id, range(segment.layers.start, segment.layers.end)
        if segment.num_layers != num_layers or segment.layers.end > num_layers:
            found[node_id] = (
                f"{node_id} has a {model} of {segment.num_layers} layers, not of {num_layers}"
            )
        if len(segment.fingerprints) != len(layers):
            found[node_id] = f"{node_id} tells no fingerprints"
        prints.setdefault(node_id, {}).update(zip(layers, segment.fingerprints, strict=False))
    own = {n: seen for n, seen in enumerate(reference) if seen} | prints.pop(origin, {})
    voters = {n: seen for n, seen in prints.items() if n not in found}
    for node_id, seen in list(voters.items()):
        wrong = [n for n, print_ in seen.items() if own.get(n, print_) != print_]
        if wrong:
            found[node_id] = _differs(node_id, wrong)
            del voters[node_id]
    found.update(_outvoted(voters))
    return dict(sorted(found.items()))


def _outvoted(voters: dict[str, dict[int, str]]) -> dict[str, str]:
    """Those who have to go until all that are left agree: first who differs from most in most
    layers."""
    found: dict[str, str] = {}
    while True:
        wrong = _against_most(voters)
        if not wrong:
            return found
        worst = max(wrong, key=lambda node_id: (len(wrong[node_id]), node_id))
        found[worst] = _differs(worst, wrong[worst])
        voters = {node_id: seen for node_id, seen in voters.items() if node_id != worst}


def _against_most(voters: dict[str, dict[int, str]]) -> dict[str, list[int]]:
    """Who is not with most, and in which layers."""
    votes: dict[int, Counter[str]] = {}
    for seen in voters.values():
        for layer, print_ in seen.items():
            votes.setdefault(layer, Counter())[print_] += 1
    disputed = {
        layer: min(counted, key=lambda one: (-counted[one], one))
        for layer, counted in votes.items()
        if len(counted) > 1
    }
    wrong: dict[str, list[int]] = {}
    for layer, most in disputed.items():
        for node_id, seen in voters.items():
            if seen.get(layer, most) != most:
                wrong.setdefault(node_id, []).append(layer)
    return wrong


def _differs(node_id: str, layers: Sequence[int]) -> str:
    return f"layers {written(ranges_of(layers))} of {node_id} have other weights"
