"""Who decides where layers go, and in which order it is told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.support.pipes.nodes import MODEL, node, segment

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.assigning import coordinator, planned, refusal, steps
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.wire.messages import Assign

LAYERS = 10


def origin(node_id: str = "o", **facts: object) -> NodeRecord:
    local = segment(0, 1, LAYERS)
    return node(node_id, local, end_models=(MODEL,), local_layers=1, num_layers=LAYERS, **facts)


def auto(node_id: str, held: tuple[int, int] | None = None, **facts: object) -> NodeRecord:
    """A node that leaves its layers to the network; `held` is told and ready."""
    segments = [segment(*held, LAYERS)] if held else []
    told = LayerRange(*held) if held else None
    known: dict[str, object] = {"room": LAYERS, "assigned": told, "num_layers": LAYERS, **facts}
    return node(node_id, *segments, auto=True, **known)


def test_the_smallest_id_with_the_end_model_decides() -> None:
    assert coordinator(MODEL, [auto("a"), origin("c"), origin("b")]) == "b"
    assert coordinator(MODEL, [auto("a"), origin("c"), origin("b", draining=True)]) == "c"
    assert coordinator(MODEL, [auto("a")]) is None
    assert coordinator("other", [origin("b")]) is None


def test_auto_nodes_share_what_nobody_was_given_by_hand() -> None:
    hand = node("h", segment(1, 4, LAYERS))
    made = planned(MODEL, LAYERS, [origin(), hand, auto("a"), auto("b")], "o")
    assert made.ranges == {"a": LayerRange(4, 7), "b": LayerRange(7, 10)}
    assert not made.missing


def test_an_origin_that_is_auto_is_planned_with_beside_its_local_layers() -> None:
    records = [origin(auto=True, room=9), auto("a")]
    made = planned(MODEL, LAYERS, records, "o")
    assert sorted(len(r) for r in made.ranges.values()) == [4, 5]
    assert min(r.start for r in made.ranges.values()) == 1
    # It has the local layer to compute as well, so it is the one with less.
    assert len(made.ranges["o"]) == 4


def test_who_leaves_is_unfit_or_is_there_for_another_model_is_not_planned_with() -> None:
    records = [
        origin(),
        auto("leaving", (1, 10), draining=True),
        auto("unfit", unfit="no memory"),
        auto("other", model="another"),
        auto("a"),
    ]
    assert planned(MODEL, LAYERS, records, "o").ranges == {"a": LayerRange(1, 10)}


def test_what_nobody_has_room_for_is_told_in_memory() -> None:
    made = planned(MODEL, LAYERS, [origin(), auto("a", room=4, layer_bytes=2**20)], "o")
    assert made.missing == (LayerRange(5, 10),)
    assert "5 MiB" in made.reason


def test_nobody_drops_layers_before_others_have_them_ready() -> None:
    a, b = auto("a", (1, 10)), auto("b")
    wanted = {"a": LayerRange(1, 6), "b": LayerRange(6, 10)}
    assert steps(MODEL, LAYERS, [origin(), a, b], wanted) == {"b": LayerRange(6, 10)}
    loading = replace(
        b, assigned=LayerRange(6, 10), segments=(segment(6, 10, LAYERS, ready=False),)
    )
    assert steps(MODEL, LAYERS, [origin(), a, loading], wanted) == {}
    ready = auto("b", (6, 10))
    assert steps(MODEL, LAYERS, [origin(), a, ready], wanted) == {"a": LayerRange(1, 6)}
    done = auto("a", (1, 6))
    assert steps(MODEL, LAYERS, [origin(), done, ready], wanted) == {}


def test_if_everyone_waits_for_everyone_all_are_told() -> None:
    swapped = {"a": LayerRange(5, 10), "b": LayerRange(1, 5)}
    records = [origin(), auto("a", (1, 5)), auto("b", (5, 10))]
    assert steps(MODEL, LAYERS, records, swapped) == swapped


def test_while_there_is_no_whole_way_nobody_is_spared() -> None:
    records = [origin(), auto("a", (1, 5)), auto("b")]
    wanted = {"a": LayerRange(5, 10), "b": LayerRange(1, 5)}
    assert steps(MODEL, LAYERS, records, wanted) == wanted


def test_a_plan_is_reached_step_by_step_and_then_stands() -> None:
    nodes = {"o": origin(), "a": auto("a", (1, 10)), "b": auto("b"), "c": auto("c")}
    for _ in range(6):
        records = list(nodes.values())
        made = planned(MODEL, LAYERS, records, "o")
        due = steps(MODEL, LAYERS, records, made.ranges)
        held = [s.layers for r in records for s in r.segments if s.ready]
        assert all(any(n in h for h in held) for n in range(LAYERS))
        for node_id, layers in due.items():
            nodes[node_id] = auto(node_id, (layers.start, layers.end))
    assert not due
    assert sorted(len(n.segments[0].layers) for n in nodes.values()) == [1, 3, 3, 3]


@pytest.mark.parametrize(
    ("sender", "change", "why"),
    [
        ("b", {}, "does not decide"),
        ("o", {"by": "b"}, "does not decide"),
        ("p", {"by": "p"}, "does not decide"),
        ("o", {"model": "other"}, "does not decide"),
        ("o", {"start": 5, "end": 5}, "has no layers"),
        ("o", {"start": 7, "end": 5}, "has no layers"),
        ("o", {"end": 11}, "has no layers"),
        ("o", {"start": 0, "end": 9}, "room for 8"),
        ("o", {"generation": 3}, "stale assignment"),
    ],
)
def test_a_word_is_followed_only_from_who_decides_and_if_it_makes_sense(
    sender: str, change: dict[str, object], why: str
) -> None:
    own = auto("a", room=8, generation=3)
    records = [own, origin("o"), origin("p"), auto("b")]
    good = Assign(MODEL, 1, 5, "o", 4)
    assert refusal(good, "o", own, records) == ""
    assert why in refusal(replace(good, **change), sender, own, records)


def test_a_node_whose_layers_were_given_by_hand_follows_nobody() -> None:
    own = node("a", segment(1, 5, LAYERS), num_layers=LAYERS, room=9)
    said = refusal(Assign(MODEL, 1, 5, "o", 4), "o", own, [own, origin()])
    assert "does not leave its layers" in said
