"""The contiguous cut of a model whose slowest stage is the quickest. Pure.

Layers of a model are alike, so a stage's time grows by the same amount with each. Under a bound
for the slowest stage, whoever reaches further is never worse off: for each set of nodes and the
last of them only the furthest layer need be remembered. The smallest bound under which the end is
reached is found by bisection over the times that stages can have at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.stages import Holding, Links, Stage, nearest, slowest

ALL_ORDERS = 6
"""Up to this many nodes every order along the model is tried; for more, a few likely ones."""


def cut(
    whole: LayerRange,
    free: Sequence[Stage],
    held: Sequence[Holding],
    links: Links,
    origin: str,
    before: Mapping[str, LayerRange],
) -> dict[str, LayerRange]:
    """Ranges for the `free` ones over what of `whole` is not `held`; as far as there is room.

    Of cuts that are equally quick, that one which leaves most layers where they were `before`.
    """
    ground = _Ground(whole, free, held, links, origin, before)
    found = min(ground.quickest(order) for order in ground.orders())
    return ground.evened(found[-1][-1])


_Path = Sequence[tuple[int, int, int]]
"""Ranges as (node, start, end), in order."""
_Reached = tuple[int, int, int, int, tuple[tuple[int, int, int], ...]]
"""In the order in which smaller is better: minus the layer that is reached, minus the layers that
stay where they were, nodes, microseconds on links; and the ranges."""


class _Ground:
    """The layers to cut, and who is free to take them."""

    def __init__(
        self,
        whole: LayerRange,
        free: Sequence[Stage],
        held: Sequence[Holding],
        links: Links,
        origin: str,
        before: Mapping[str, LayerRange],
    ) -> None:
        self.free = sorted(free, key=lambda s: s.node_id)
        self._links, self._origin, self._before = links, origin, before
        self._begin, self._end = whole.start, whole.end
        self._holders: dict[int, list[str]] = {}
        for stage, layers in held:
            for n in range(layers.start, layers.end):
                self._holders.setdefault(n, []).append(stage.node_id)
        self._skip, self._gap_end = self._gaps()
        floor = int(slowest(held, [], whole, links, origin))
        self.bounds = self._bounds(floor)

    def _gaps(self) -> tuple[dict[int, int], dict[int, int]]:
        """For each layer: the next one that nobody holds, and where that gap ends."""
        skip, gap_end = {self._end: self._end}, {self._end: self._end}
        for n in range(self._end - 1, self._begin - 1, -1):
            held = n in self._holders
            skip[n] = skip[n + 1] if held else n
            gap_end[n] = n if held else max(n + 1, gap_end[n + 1])
        return skip, gap_end

    def _bounds(self, floor: int) -> list[int]:
        """Every time that the slowest stage can have."""
        most = self._end - self._begin
        near = [self._origin, *(s.node_id for s in self.free), *_flat(self._holders.values())]
        found = {floor}
        for stage in self.free:
            for link in {nearest([n], stage.node_id, self._links) for n in near}:
                found.update(stage.cost(n, link) for n in range(1, min(stage.room, most) + 1))
        return sorted(bound for bound in found if bound >= floor)

    def orders(self) -> list[list[int] | None]:
        """None stands for all of them."""
        count = len(self.free)
        if count <= ALL_ORDERS:
            return [None]
        nobody = LayerRange(self._end, self._end)
        by_place = sorted(
            range(count), key=lambda i: (self._before.get(self.free[i].node_id, nobody), i)
        )
        by_speed = sorted(range(count), key=lambda i: (self.free[i].layer_us, i))
        return [by_place, by_speed, self._by_nearness()]

    def _by_nearness(self) -> list[int]:
        left, order, at = set(range(len(self.free))), list[int](), self._origin
        while left:
            near = min(left, key=lambda i: (self._links.get((at, self.free[i].node_id), 0), i))
            order.append(near)
            left.remove(near)
            at = self.free[near].node_id
        return order

    def quickest(self, order: list[int] | None) -> tuple[int, int, _Reached]:
        """As far as can be, and under the smallest bound that allows it."""

        def layer(bound: int) -> int:
            return -self.reached(bound, order)[0]

        at = bisect_left(self.bounds, layer(self.bounds[-1]), key=layer)
        found = self.reached(self.bounds[at], order)
        return found[0], self.bounds[at], found

    def reached(self, bound: int, order: list[int] | None) -> _Reached:
        """How far the nodes come if no stage may take longer than `bound`."""
        nothing: _Reached = (-self._skip[self._begin], 0, 0, 0, ())
        if order is None:
            return self._in_any_order(bound, nothing)
        ending: list[_Reached] = [nothing]
        for i in order:
            ending.append(min(self._with(so_far, i, bound) for so_far in ending))
        return min(ending)

    def _in_any_order(self, bound: int, nothing: _Reached) -> _Reached:
        best = nothing
        states: dict[tuple[int, int], _Reached] = {(0, -1): nothing}
        for mask in range(1, 1 << len(self.free)):
            for last in range(len(self.free)):
                without = mask & ~(1 << last)
                if without == mask:
                    continue
                states[mask, last] = found = min(
                    self._with(states[without, i], last, bound)
                    for i in (range(len(self.free)) if without else (-1,))
                    if (without, i) in states
                )
                best = min(best, found)
        return best

    def _with(self, so_far: _Reached, i: int, bound: int) -> _Reached:
        """The same, and node `i` after them; the same alone if it can take nothing."""
        start, stage = -so_far[0], self.free[i]
        path = so_far[-1]
        link = self._link_to(path, start, stage)
        end = min(start + stage.fitting(bound, link), self._gap_end[start])
        if end <= start:
            return so_far
        held = self._before.get(stage.node_id)
        kept = max(0, min(end, held.end) - max(start, held.start)) if held else 0
        return (
            -self._skip[end],
            so_far[1] - kept,
            so_far[2] + 1,
            so_far[3] + link,
            (*path, (i, start, end)),
        )

    def evened(self, path: _Path) -> dict[str, LayerRange]:
        """The same stages, with borders moved so that neighbours take about as long as each
        other: none becomes slower than the slower of the two was."""
        nodes = [self.free[i] for i, _, _ in path]
        ranges = [LayerRange(start, end) for _, start, end in path]
        links = [self._link_to(path[:k], ranges[k].start, node) for k, node in enumerate(nodes)]
        joined = [k for k in range(len(path) - 1) if ranges[k].end == ranges[k + 1].start]
        moved = True
        while moved:
            moved = False
            for k, shift in product(joined, (-1, 1)):
                border = ranges[k].end + shift
                pair = LayerRange(ranges[k].start, border), LayerRange(border, ranges[k + 1].end)
                now = max(nodes[j].cost(len(ranges[j]), links[j]) for j in (k, k + 1))
                fits = all(
                    p.start < p.end and len(p) <= n.room
                    for p, n in zip(pair, nodes[k:], strict=False)
                )
                if fits and now > max(
                    nodes[j].cost(len(p), links[j]) for j, p in enumerate(pair, start=k)
                ):
                    ranges[k], ranges[k + 1] = pair
                    moved = True
        return {node.node_id: r for node, r in zip(nodes, ranges, strict=True)}

    def _link_to(self, path: _Path, start: int, stage: Stage) -> int:
        """From whoever has the layer before: the last of the path, or one who holds it."""
        if path and path[-1][2] == start:
            near = [self.free[path[-1][0]].node_id]
        elif start == self._begin:
            near = [self._origin]
        else:
            near = self._holders.get(start - 1, [])
        return nearest(near, stage.node_id, self._links)


def _flat(lists: Iterable[list[str]]) -> set[str]:
    return {item for items in lists for item in items}
