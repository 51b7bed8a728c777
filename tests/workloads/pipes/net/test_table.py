"""Records of nodes: which is the newest, and which can't be true."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.pipes.nodes import MODEL, node, segment

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.records import (
    BAD_RECORD,
    NodeRecord,
    Table,
    new_boot,
    ranges_of,
    read_state,
    sound,
    state_of,
    written,
)
from penstock.workloads.pipes.wire.messages import BadFrame, Counters

records = st.builds(
    NodeRecord,
    node_id=st.sampled_from("abc"),
    boot=st.sampled_from("123"),
    version=st.integers(0, 5),
)


@given(st.lists(records))
def test_the_newest_of_each_node_wins_in_whatever_order_they_come(told: list[NodeRecord]) -> None:
    newest: dict[str, tuple[str, int]] = {}
    for r in told:
        newest[r.node_id] = max((r.boot, r.version), newest.get(r.node_id, ("", 0)))
    forwards, backwards = Table(told), Table(reversed(told))
    for table in (forwards, backwards):
        assert {r.node_id: (r.boot, r.version) for r in table.live()} == newest


def test_a_record_that_is_known_is_not_taken_again() -> None:
    table = Table()
    first = node("a", version=3)
    assert table.apply(first)
    assert not table.apply(first)
    assert not table.apply(replace(first, version=2))
    assert table.apply(replace(first, version=4))
    assert table.apply(replace(first, boot="1", version=0))
    assert not table.apply(replace(first, version=9))


def test_a_lost_node_may_come_back_with_the_same_record() -> None:
    table = Table([node("a", version=3)])
    assert table.lose("a") is not None
    assert table.lose("a") is None
    assert "a" not in table
    assert table.apply(node("a", version=3))


def test_an_older_process_that_is_lost_does_not_take_the_newer_with_it() -> None:
    table = Table([node("a", boot="2")])
    assert table.lose("a", boot="1") is None
    assert len(table) == 1


def test_nodes_are_found_by_what_they_have_to_do_with_a_model() -> None:
    holds = node("a", segment(0, 2, 4), model="")
    ends = NodeRecord(node_id="b", boot="0", end_models=(MODEL,))
    meant = node("c", auto=True)
    other = node("d", model="other")
    table = Table([other, meant, ends, holds])
    assert [r.node_id for r in table.of(MODEL)] == ["a", "b", "c"]
    assert table.models() == (MODEL, "other")
    assert [r.node_id for r in table] == ["a", "b", "c", "d"]


def test_a_later_process_sorts_after_an_earlier() -> None:
    boots = [new_boot() for _ in range(50)]
    assert [b[:16] for b in boots] == sorted(b[:16] for b in boots)
    assert len(set(boots)) == 50


def test_figures_are_not_material_and_the_rest_is() -> None:
    one = node("a", segment(0, 2, 4))
    figures = replace(one, jobs=3, busy=0.5, links={"b": 1.0}, version=9, refused={"x": 1})
    timed = replace(one, segments=(replace(one.segments[0], layer_ms=3.0, loaded=2),))
    assert one.material() == figures.material() == timed.material()
    for changed in (
        replace(one, draining=True),
        replace(one, segments=()),
        replace(one, address="x:1"),
        replace(one, room=3),
    ):
        assert changed.material() != one.material()


def test_layers_are_written_as_people_write_them() -> None:
    assert written(ranges_of([9, 3, 1, 2, 2, 7])) == "1-3, 7, 9"


def test_records_survive_the_way_over_the_wire() -> None:
    sent = [node("a", segment(0, 3, 4), links={"b": 0.5}, assigned=LayerRange(0, 3)), node("b")]
    counters = Counters()
    assert read_state(memoryview(state_of(sent)), counters) == sent
    assert not counters


@pytest.mark.parametrize(
    "wrong",
    [
        {"node_id": ""},
        {"boot": ""},
        {"num_layers": 10**9},
        {"num_layers": -1},
        {"layer_ms": math.nan},
        {"busy": -1.0},
        {"links": {"b": math.inf}},
        {"room": -1},
        {"assigned": LayerRange(3, 3)},
        {"assigned": LayerRange(0, 10**9)},
        {"segments": (replace(segment(0, 2, 4), layers=LayerRange(2, 0)),)},
        {"segments": (replace(segment(0, 2, 4), layers=LayerRange(3, 6)),)},
        {"segments": (replace(segment(0, 2, 4), fingerprints=("one",)),)},
        {"segments": (replace(segment(0, 2, 4), layer_ms=math.inf),)},
        {"segments": (replace(segment(0, 2, 4), num_layers=10**9),)},
    ],
)
def test_a_record_that_cannot_be_true_is_counted_and_the_others_are_taken(
    wrong: dict[str, object],
) -> None:
    bad = replace(node("a", segment(0, 2, 4)), **wrong)
    assert not sound(bad)
    counters = Counters()
    assert read_state(memoryview(state_of([bad, node("b")])), counters) == [node("b")]
    assert counters == {BAD_RECORD: 1}


def test_bytes_that_are_no_records_are_refused() -> None:
    with pytest.raises(BadFrame):
        read_state(memoryview(b"\xff\x00"), Counters())
