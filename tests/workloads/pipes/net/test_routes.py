"""Ways over the nodes that hold a model's layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.pipes.nodes import MODEL, node, segment

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import Hop
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.routes import (
    HOP_US,
    UNKNOWN_LINK_MS,
    NoRoute,
    Route,
    check_hops,
    find_route,
    loads,
)

LAYERS = 10


def route(
    *records: NodeRecord,
    origin: str = "o",
    local: int = 0,
    load: dict[str, float] | None = None,
    avoid: frozenset[str] = frozenset(),
    reference: tuple[str, ...] = (),
    apart: frozenset[frozenset[str]] = frozenset(),
) -> Route | NoRoute:
    return find_route(MODEL, LAYERS, records, origin, local, load or {}, avoid, reference, apart)


def hops(found: Route | NoRoute) -> list[tuple[str, int, int]]:
    assert isinstance(found, Route), found
    return [(h.node_id, h.start, h.end) for h in found.hops]


def gap(found: Route | NoRoute) -> NoRoute:
    assert isinstance(found, NoRoute), found
    return found


def test_a_way_goes_over_who_holds_the_layers() -> None:
    found = route(node("o"), node("a", segment(0, 4, LAYERS)), node("b", segment(4, 10, LAYERS)))
    assert hops(found) == [("a", 0, 4), ("b", 4, 10)]
    assert str(found) == f"a 0-3 → b 4-9 ({found.cost:.1f} ms a token)"  # type: ignore[union-attr]


def test_the_first_layers_stay_with_the_origin_whoever_else_has_them() -> None:
    quick = node("a", segment(0, 10, LAYERS, ms=0.01))
    slow = node("o", segment(0, 3, LAYERS, ms=5.0))
    assert hops(route(quick, slow, local=2)) == [("o", 0, 2), ("a", 2, 10)]


def test_without_its_own_first_layers_an_origin_has_no_way() -> None:
    loading = node("o", segment(0, 1, LAYERS, ready=False))
    found = gap(route(node("a", segment(0, 10, LAYERS)), loading, local=1))
    assert found.missing == (LayerRange(0, 1),)
    assert "o is loading 0-0" in found.reason


def test_any_part_of_what_a_node_holds_can_be_used() -> None:
    a, b = node("a", segment(0, 7, LAYERS, ms=5.0)), node("b", segment(2, 10, LAYERS, ms=1.0))
    assert hops(route(a, b)) == [("a", 0, 2), ("b", 2, 10)]


def test_a_node_may_be_in_a_way_twice() -> None:
    o = node("o", segment(0, 1, LAYERS), segment(6, 10, LAYERS))
    assert hops(route(o, node("a", segment(1, 6, LAYERS)), local=1)) == [
        ("o", 0, 1),
        ("a", 1, 6),
        ("o", 6, 10),
    ]


def test_segments_that_touch_on_one_node_are_one_hop() -> None:
    a = node("a", segment(0, 4, LAYERS), segment(4, 10, LAYERS))
    assert hops(route(a)) == [("a", 0, 10)]


def test_the_quicker_of_two_copies_is_taken() -> None:
    a, b = node("a", segment(0, 10, LAYERS, ms=2.0)), node("b", segment(0, 10, LAYERS, ms=1.0))
    assert hops(route(a, b)) == [("b", 0, 10)]


def test_load_makes_a_node_slower() -> None:
    a, b = node("a", segment(0, 10, LAYERS, ms=1.0)), node("b", segment(0, 10, LAYERS, ms=1.5))
    assert hops(route(a, b)) == [("a", 0, 10)]
    assert hops(route(a, b, load={"a": 2.0})) == [("b", 0, 10)]


def test_what_a_node_has_to_do_counts_as_load() -> None:
    idle, busy, full = node("a"), node("b", jobs=8), node("c", jobs=8, waiting=3)
    assert loads([idle, busy, full]) == {"a": 1.0, "b": 2.0, "c": 5.0}


def test_a_long_link_is_avoided_and_either_end_may_tell_of_it() -> None:
    near, far = segment(0, 10, LAYERS, ms=1.2), segment(0, 10, LAYERS, ms=1.0)
    told_by_origin = node("o", links={"far": 40.0, "near": 0.1})
    assert hops(route(told_by_origin, node("near", near), node("far", far))) == [("near", 0, 10)]
    told_by_them = (node("near", near, links={"o": 0.1}), node("far", far, links={"o": 40.0}))
    assert hops(route(node("o"), *told_by_them)) == [("near", 0, 10)]


def test_between_nodes_that_do_not_reach_each_other_a_way_goes_only_if_it_must() -> None:
    first, last = segment(0, 5, LAYERS), segment(5, 10, LAYERS)
    apart = frozenset([frozenset("ab")])
    slow = node("c", segment(5, 10, LAYERS, ms=50.0))
    nodes = node("o"), node("a", first), node("b", last)
    assert hops(route(*nodes, slow, apart=apart)) == [("a", 0, 5), ("c", 5, 10)]
    assert hops(route(*nodes, apart=apart)) == [("a", 0, 5), ("b", 5, 10)]


def test_a_link_of_which_neither_end_tells_is_avoided() -> None:
    links = {"o": {"a": 1.0, "b": 1.0, "c": 1.0}, "a": {"o": 1.0, "c": 9.0}, "b": {"o": 1.0}}
    nodes = [
        node(name, *held, links=links.get(name, {}))
        for name, held in {
            "o": (),
            "a": (segment(0, 5, LAYERS),),
            "b": (segment(5, 10, LAYERS),),
            "c": (segment(5, 10, LAYERS),),
        }.items()
    ]
    assert hops(route(*nodes)) == [("a", 0, 5), ("c", 5, 10)]
    assert hops(route(*nodes[:3])) == [("a", 0, 5), ("b", 5, 10)]
    # One that is said to be broken is worse.
    apart = frozenset([frozenset("ac")])
    assert hops(route(*nodes, apart=apart)) == [("a", 0, 5), ("b", 5, 10)]


def test_at_equal_cost_fewer_hops_win() -> None:
    parts = [node("a", segment(0, 5, LAYERS)), node("b", segment(5, 10, LAYERS))]
    whole = node("c", segment(0, 10, LAYERS))
    assert hops(route(*parts, whole)) == [("c", 0, 10)]


def test_at_equal_cost_and_hops_the_smaller_id_wins() -> None:
    same = [node(n, segment(0, 10, LAYERS)) for n in "cab"]
    assert hops(route(*same)) == [("a", 0, 10)]


def test_who_leaves_or_is_avoided_is_not_used_and_is_named() -> None:
    a = node("a", segment(0, 10, LAYERS), draining=True)
    b = node("b", segment(0, 10, LAYERS))
    assert hops(route(a, b)) == [("b", 0, 10)]
    found = gap(route(a, b, avoid=frozenset("b")))
    assert found.missing == (LayerRange(0, 10),)
    assert "a (0-9) is about to leave" in found.reason
    assert "b (0-9) is avoided" in found.reason


def test_an_origin_that_leaves_finishes_what_it_has() -> None:
    o = node("o", segment(0, 10, LAYERS), draining=True)
    assert hops(route(o, local=1, avoid=frozenset("o"))) == [("o", 0, 10)]


def test_what_is_on_no_node_is_named() -> None:
    found = gap(route(node("a", segment(0, 3, LAYERS)), node("b", segment(5, 8, LAYERS))))
    assert found.missing == (LayerRange(3, 5), LayerRange(8, 10))
    assert found.reason == "no node can compute layers 3-4, 8-9 of m"


@pytest.mark.seed("000", "2.3")
def test_what_is_still_loading_is_no_way_and_says_so() -> None:
    found = gap(route(node("a", segment(0, 10, LAYERS, ready=False))))
    assert "a is loading 0-9" in found.reason


def test_the_origins_own_weights_decide_even_against_many() -> None:
    o = node("o", segment(0, 3, LAYERS, weights="right"))
    wrong = [node(n, segment(1, 10, LAYERS, weights="wrong")) for n in "abc"]
    right = node("z", segment(2, 10, LAYERS, weights="right", ms=9.0))
    found = route(o, *wrong, right, local=3)
    assert hops(found) == [("o", 0, 3), ("z", 3, 10)]
    assert isinstance(found, Route)
    assert found.disagree == tuple(f"layers 1-2 of {n} have other weights" for n in "abc")


def test_weights_that_the_origin_knows_of_decide_where_it_holds_none() -> None:
    o = node("o", segment(0, 1, LAYERS, weights="right"))
    wrong = [node(n, segment(1, 10, LAYERS, weights="wrong")) for n in "abc"]
    right = node("z", segment(1, 10, LAYERS, weights="right", ms=9.0))
    # Nothing that the origin holds tells them apart, and the wrong ones are more.
    assert hops(route(o, *wrong, right, local=1)) == [("o", 0, 1), ("a", 1, 10)]
    known = tuple(f"right{n}" for n in range(LAYERS))
    told = route(o, *wrong, right, local=1, reference=known)
    assert hops(told) == [("o", 0, 1), ("z", 1, 10)]


def test_a_node_with_other_weights_than_most_is_passed_over_and_named() -> None:
    odd = node("a", segment(0, 10, LAYERS, weights="odd", ms=0.1))
    most = [node(n, segment(0, 10, LAYERS)) for n in "bc"]
    found = route(odd, *most)
    assert hops(found) == [("b", 0, 10)]
    assert isinstance(found, Route)
    assert found.disagree == ("layers 0-9 of a have other weights",)


@pytest.mark.seed("000", "18.12")
def test_one_layer_that_differs_is_enough_to_distrust_a_node() -> None:
    o = node("o", segment(0, 6, LAYERS))
    assert isinstance(route(o, node("b", segment(5, 10, LAYERS)), local=1), Route)
    found = gap(route(o, node("a", segment(5, 10, LAYERS, weights="other")), local=1))
    assert found.missing == (LayerRange(6, 10),)
    assert found.disagree == ("layers 5 of a have other weights",)
    assert "layers 5 of a" in found.reason


def test_weights_without_fingerprints_are_not_trusted() -> None:
    bare = replace(segment(0, 10, LAYERS), fingerprints=())
    assert "a tells no fingerprints" in gap(route(node("a", bare))).reason


def test_a_model_of_the_same_name_with_another_number_of_layers_is_another() -> None:
    found = gap(route(node("a", segment(0, 10, 12))))
    assert found.disagree == ("a has a m of 12 layers, not of 10",)


@st.composite
def networks(draw: st.DrawFn, weights: str = "w") -> list[NodeRecord]:
    count = draw(st.integers(1, 4))
    names = ["o", "a", "b", "c"][:count]
    made = []
    for name in names:
        parts = []
        of = draw(st.sampled_from(weights))
        for _ in range(draw(st.integers(0, 2))):
            start = draw(st.integers(0, 5))
            ms = draw(st.sampled_from([0.5, 1.0, 4.0]))
            ready = draw(st.sampled_from([True, True, False]))
            end = draw(st.integers(start + 1, 6))
            parts.append(segment(start, end, 6, ms=ms, weights=of, ready=ready))
        links = {n: draw(st.integers(0, 8)) / 2 for n in names if n != name}
        draining = draw(st.sampled_from([False, False, True]))
        made.append(node(name, *parts, links=links, draining=draining))
    return made


@settings(max_examples=100, deadline=None)
@given(network=networks(), local=st.integers(0, 2), avoid=st.frozensets(st.sampled_from("abc")))
def test_a_way_is_whole_and_there_is_no_cheaper_one(
    network: list[NodeRecord], local: int, avoid: frozenset[str]
) -> None:
    found = find_route(MODEL, 6, network, "o", local, {}, avoid)
    costs = dict(_every_way(network, local, avoid))
    if isinstance(found, NoRoute):
        assert not costs
        assert found.missing
        return
    assert check_hops(found.hops, 6, [r.node_id for r in network]) is None
    assert all(a.node_id != b.node_id for a, b in zip(found.hops, found.hops[1:], strict=False))
    assert sum(h.end - h.start for h in found.hops) == 6
    by_layer = tuple(h.node_id for h in found.hops for _ in range(h.start, h.end))
    assert all(n == "o" for n in by_layer[:local])
    assert round(found.cost * 1000) == costs[by_layer] == min(costs.values())


def _every_way(
    network: list[NodeRecord], local: int, avoid: frozenset[str]
) -> Iterator[tuple[tuple[str, ...], int]]:
    """A node for each layer, in every way that is allowed, and what it costs."""
    nodes = {r.node_id: r for r in network}
    ready = [(r, s) for r in network for s in r.segments if s.ready]
    able: list[dict[str, int]] = []
    for layer in range(6):
        here: dict[str, int] = {}
        for r, s in ready:
            usable = r.node_id == "o" or not (r.draining or r.node_id in avoid)
            if usable and layer in s.layers:
                us = round(s.layer_ms * 1000)
                here[r.node_id] = min(us, here.get(r.node_id, us))
        able.append(here if layer >= local else {n: us for n, us in here.items() if n == "o"})

    def link(one: str, other: str) -> int:
        if one == other:
            return 0
        told = [nodes[x].links[y] for x, y in ((one, other), (other, one)) if x in nodes]
        return HOP_US + round((max(told) if told else UNKNOWN_LINK_MS) / 2 * 1000)

    def walk(chosen: tuple[str, ...], cost: int) -> Iterator[tuple[tuple[str, ...], int]]:
        last = chosen[-1] if chosen else "o"
        if len(chosen) == 6:
            yield chosen, cost + link(last, "o")
            return
        for name, us in able[len(chosen)].items():
            yield from walk((*chosen, name), cost + us + link(last, name))

    yield from walk((), 0)


@settings(max_examples=100, deadline=None)
@given(network=networks(weights="vwwx"), local=st.integers(0, 2))
def test_nodes_of_a_way_agree_in_every_layer_that_two_of_them_hold(
    network: list[NodeRecord], local: int
) -> None:
    found = find_route(MODEL, 6, network, "o", local, {})
    used = {h.node_id for h in found.hops} | {"o"} if isinstance(found, Route) else set()
    for layer in range(6):
        held = [s for r in network if r.node_id in used for s in r.segments if s.ready]
        assert len({s.fingerprint(layer) for s in held if layer in s.layers}) <= 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([], "without a hop"),
        ([("a", 0, 4), ("b", 5, 10)], "a hole before b"),
        ([("a", 1, 10)], "a hole before a"),
        ([("a", 0, 6), ("b", 5, 10)], "computed before"),
        ([("a", 0, 4), ("b", 4, 4), ("a", 4, 10)], "not a range"),
        ([("a", 4, 0)], "not a range"),
        ([("a", 0, 4)], "ends at layer 4 of 10"),
        ([("a", 0, 12)], "ends at layer 12 of 10"),
        ([("a", 0, 4), ("stranger", 4, 10)], "stranger is not in the network"),
        ([("a", -1, 10)], "computed before"),
    ],
)
def test_a_way_that_is_none_is_refused_with_a_reason(
    wrong: list[tuple[str, int, int]], why: str
) -> None:
    reason = check_hops([Hop(*h) for h in wrong], 10, {"a", "b"})
    assert reason is not None
    assert why in reason


def test_a_way_that_is_whole_is_not_refused() -> None:
    whole = [Hop("a", 0, 4), Hop("b", 4, 9), Hop("a", 9, 10)]
    assert check_hops(whole, 10, {"a", "b"}) is None
    assert check_hops(whole, 10) is None
