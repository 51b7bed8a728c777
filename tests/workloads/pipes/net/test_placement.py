"""Which node is given which layers."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.placement import ALL_ORDERS, Member, Plan, plan

Links = dict[tuple[str, str], float]

names = "abcdefghij"


@st.composite
def members(draw: st.DrawFn, most: int = 5, rooms: int = 12) -> list[Member]:
    count = draw(st.integers(1, most))
    return [
        Member(
            node_id=names[i],
            layer_ms=draw(st.integers(1, 40)) / 10,
            room=draw(st.integers(0, rooms)),
            base_ms=draw(st.sampled_from([0, 0, 1.5])),
        )
        for i in range(count)
    ]


@st.composite
def linked(draw: st.DrawFn, of: list[Member]) -> Links:
    ids = ["o", *(m.node_id for m in of)]
    return {(a, b): draw(st.integers(0, 30)) / 10 for a in ids for b in ids if a != b}


def covered(ranges: list[LayerRange]) -> list[int]:
    return sorted(n for r in ranges for n in range(r.start, r.end))


def stage(member: Member, layers: int, link: float) -> int:
    """In microseconds, as the definition of a stage's time has it."""
    ms = member.base_ms + layers * member.layer_ms + link
    return round(ms * 1000)


def least(num_layers: int, begin: int, nodes: list[Member], links: Links) -> int | None:
    """The slowest stage of the best cut, found by trying every cut in every order."""
    best: int | None = None
    for used in range(1, len(nodes) + 1):
        for order in permutations(nodes, used):
            for borders in combinations(range(begin + 1, num_layers), used - 1):
                cuts = [begin, *borders, num_layers]
                sizes = [b - a for a, b in pairwise(cuts)]
                if any(s > m.room for s, m in zip(sizes, order, strict=True)):
                    continue
                before = ["o", *(m.node_id for m in order)]
                worst = max(
                    stage(m, s, links.get((p, m.node_id), 0))
                    for m, s, p in zip(order, sizes, before, strict=False)
                )
                best = worst if best is None else min(best, worst)
    return best


@pytest.mark.seed("000", "18.13")
@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_layers=st.integers(2, 8), local=st.integers(0, 1))
def test_the_slowest_stage_is_as_quick_as_in_the_best_of_all_cuts(
    data: st.DataObject, num_layers: int, local: int
) -> None:
    nodes = data.draw(members(most=4))
    links = data.draw(linked(nodes))
    made = plan(num_layers, nodes, origin="o", local_layers=local, links=links)
    best = least(num_layers, local, nodes, links)
    if best is None:
        assert made.missing
        return
    assert not made.missing
    assert min(worst(route, nodes, links) for route in routes(made, num_layers, local)) == best


def worst(route: list[tuple[str, LayerRange]], nodes: list[Member], links: Links) -> int:
    by_id = {m.node_id: m for m in nodes}
    before = ["o", *(n for n, _ in route)]
    return max(
        stage(by_id[n], len(r), links.get((at, n), 0))
        for at, (n, r) in zip(before, route, strict=False)
    )


def routes(made: Plan, num_layers: int, begin: int) -> list[list[tuple[str, LayerRange]]]:
    """The ranges of a plan that are together the whole model, each layer once. There are several
    where there are copies."""
    found = []
    for used in range(1, len(made.ranges) + 1):
        for chosen in combinations(made.ranges, used):
            ranges = sorted((made.ranges[n], n) for n in chosen)
            if covered([r for r, _ in ranges]) == list(range(begin, num_layers)):
                found.append([(n, r) for r, n in ranges])
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_layers=st.integers(1, 40))
def test_each_layer_is_covered_once_where_there_is_room_and_room_is_respected(
    data: st.DataObject, num_layers: int
) -> None:
    nodes = data.draw(members(most=9, rooms=20))
    made = plan(num_layers, nodes)
    room = sum(m.room for m in nodes)
    by_id = {m.node_id: m for m in nodes}
    assert all(0 < len(r) <= by_id[n].room for n, r in made.ranges.items())
    missing = covered(list(made.missing))
    assert len(missing) == max(0, num_layers - room)
    held = covered(list(made.ranges.values()))
    assert set(held) | set(missing) == set(range(num_layers))
    assert not set(held) & set(missing)
    if missing:
        assert len(held) == len(set(held))
    else:
        assert routes(made, num_layers, 0)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_layers=st.integers(4, 30))
def test_ranges_given_by_hand_stay_and_the_rest_is_covered(
    data: st.DataObject, num_layers: int
) -> None:
    start = data.draw(st.integers(0, num_layers - 1))
    end = data.draw(st.integers(start + 1, num_layers))
    hand = Member("hand", 1.0, auto=False, held=(LayerRange(start, end),))
    nodes = [Member(n, 1.0, room=num_layers) for n in "ab"]
    made = plan(num_layers, [hand, *nodes])
    assert "hand" not in made.ranges
    assert not made.missing
    both = covered([LayerRange(start, end), *made.ranges.values()])
    assert set(both) == set(range(num_layers))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_layers=st.integers(1, 30))
def test_the_order_in_which_members_are_named_does_not_matter(
    data: st.DataObject, num_layers: int
) -> None:
    nodes = data.draw(members(most=8, rooms=20))
    links = data.draw(linked(nodes))
    shuffled = data.draw(st.permutations(nodes))
    assert plan(num_layers, nodes, links=links) == plan(num_layers, shuffled, links=links)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), num_layers=st.integers(1, 30))
def test_a_plan_that_was_carried_out_is_not_changed_again(
    data: st.DataObject, num_layers: int
) -> None:
    nodes = data.draw(members(most=ALL_ORDERS, rooms=20))
    links = data.draw(linked(nodes))
    first = plan(num_layers, nodes, links=links)
    assert plan(num_layers, _holding(nodes, first), links=links).ranges == first.ranges


@settings(max_examples=20, deadline=None)
@given(data=st.data(), num_layers=st.integers(1, 40))
def test_among_many_nodes_a_plan_changes_only_for_a_better_one_and_soon_stands(
    data: st.DataObject, num_layers: int
) -> None:
    nodes = data.draw(members(most=10, rooms=20))
    links = data.draw(linked(nodes))
    made = plan(num_layers, nodes, links=links)
    for _ in range(5):
        before, made = made, plan(num_layers, _holding(nodes, made), links=links)
        if made.ranges == before.ranges:
            return
        assert made.slowest_ms < before.slowest_ms
    raise AssertionError("it never stands")


def _holding(nodes: list[Member], made: Plan) -> list[Member]:
    return [
        Member(
            m.node_id,
            m.layer_ms,
            m.room,
            m.auto,
            (made.ranges[m.node_id],) if m.node_id in made.ranges else (),
            m.base_ms,
        )
        for m in nodes
    ]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), num_layers=st.integers(2, 20))
def test_when_a_node_is_lost_what_can_be_covered_is_covered(
    data: st.DataObject, num_layers: int
) -> None:
    nodes = data.draw(members(most=6, rooms=15))
    first = plan(num_layers, nodes)
    gone = data.draw(st.sampled_from(nodes))
    left = [m for m in _holding(nodes, first) if m is not gone and m.node_id != gone.node_id]
    made = plan(num_layers, left)
    room = sum(m.room for m in left)
    assert len(covered(list(made.missing))) == max(0, num_layers - room)


def even(count: int, room: int = 30) -> list[Member]:
    return [Member(names[i], 1.0, room) for i in range(count)]


def test_equal_nodes_get_equal_parts() -> None:
    assert plan(30, even(3)).ranges == {
        "a": LayerRange(0, 10),
        "b": LayerRange(10, 20),
        "c": LayerRange(20, 30),
    }


def test_layers_that_every_origin_has_need_no_cover() -> None:
    made = plan(31, even(3), local_layers=1)
    assert made.ranges["a"] == LayerRange(1, 11)
    assert not made.missing


def test_a_node_that_is_twice_as_fast_gets_twice_as_much() -> None:
    made = plan(30, [Member("slow", 2.0, 30), Member("quick", 1.0, 30)])
    assert {n: len(r) for n, r in made.ranges.items()} == {"slow": 10, "quick": 20}


def test_a_node_with_other_work_to_do_for_each_token_gets_less() -> None:
    made = plan(30, [Member("origin", 1.0, 30, base_ms=10.0), Member("other", 1.0, 30)])
    assert {n: len(r) for n, r in made.ranges.items()} == {"origin": 10, "other": 20}


def test_nodes_are_ordered_so_that_long_links_are_not_used() -> None:
    far = {("o", "a"): 50.0, ("a", "b"): 50.0, ("o", "b"): 1.0, ("b", "a"): 1.0}
    made = plan(20, even(2), origin="o", links=far)
    assert made.ranges["b"].start == 0
    assert made.ranges["a"].end == 20


def test_a_hole_between_ranges_given_by_hand_is_filled() -> None:
    hand = [
        Member("x", 1.0, auto=False, held=(LayerRange(0, 5),)),
        Member("y", 1.0, auto=False, held=(LayerRange(12, 20),)),
    ]
    assert plan(20, [*hand, Member("a", 1.0, 30)]).ranges == {"a": LayerRange(5, 12)}


def test_a_small_gain_moves_nothing_and_the_spare_node_copies_the_slowest_range() -> None:
    five = even(5)
    standing = _holding(five, plan(30, five))
    joined = plan(30, [*standing, Member("f", 1.0, 30)])
    assert {n: joined.ranges[n] for n in "abcde"} == plan(30, five).ranges
    assert joined.ranges["f"] in plan(30, five).ranges.values()


def test_a_great_gain_is_worth_a_new_cut() -> None:
    alone = _holding(even(1), plan(30, even(1)))
    made = plan(30, [*alone, Member("b", 1.0, 30)])
    assert made.ranges == {"a": LayerRange(0, 15), "b": LayerRange(15, 30)}


def test_a_copy_is_of_the_slowest_range_and_fits() -> None:
    hand = [
        Member("slow", 9.0, auto=False, held=(LayerRange(0, 10),)),
        Member("quick", 1.0, auto=False, held=(LayerRange(10, 30),)),
    ]
    assert plan(30, [*hand, Member("spare", 1.0, 10)]).ranges["spare"] == LayerRange(0, 10)
    assert plan(30, [*hand, Member("small", 1.0, 4)]).ranges["small"] == LayerRange(0, 4)


def test_a_copy_takes_over_when_the_only_holder_is_lost() -> None:
    members = [
        Member("a", 1.0, 10, held=(LayerRange(0, 10),)),
        Member("c", 1.0, 10, held=(LayerRange(0, 10),)),
    ]
    made = plan(20, members)
    assert not made.missing
    assert made.ranges == {"a": LayerRange(0, 10), "c": LayerRange(10, 20)}


def test_only_the_hole_is_filled_when_a_node_is_lost() -> None:
    left = [
        Member("a", 1.0, 10, held=(LayerRange(0, 10),)),
        Member("c", 1.0, 10, held=(LayerRange(20, 30),)),
        Member("d", 1.0, 10),
    ]
    assert plan(30, left).ranges == {
        "a": LayerRange(0, 10),
        "c": LayerRange(20, 30),
        "d": LayerRange(10, 20),
    }


def test_what_fits_nowhere_is_told_in_layers_and_in_memory() -> None:
    made = plan(30, even(2, room=13), layer_bytes=7 * 2**20)
    assert made.missing == (LayerRange(26, 30),)
    assert "4 of 30 layers" in made.reason
    assert "28 MiB" in made.reason
    assert "26-29" in made.reason


def test_nobody_at_all_is_a_plan_with_everything_missing() -> None:
    assert plan(5, []).missing == (LayerRange(0, 5),)


def test_a_range_beyond_the_model_or_the_room_is_not_kept() -> None:
    nodes = [Member("a", 1.0, 5, held=(LayerRange(0, 9),)), Member("b", 1.0, 9)]
    made = plan(9, nodes)
    assert len(made.ranges["a"]) <= 5
    assert not made.missing


def test_more_nodes_than_orders_can_be_tried_are_still_cut_evenly() -> None:
    many = even(ALL_ORDERS + 4)
    made = plan(30, many)
    assert sorted(len(r) for r in made.ranges.values()) == [3] * 10
