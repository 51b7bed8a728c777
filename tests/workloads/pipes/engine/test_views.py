"""What people and programs are shown of a network of nodes."""

from __future__ import annotations

from msgspec.structs import replace
from tests.support.fake_pipes import a_node

from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.status import NodeView, PipesView, merged
from penstock.workloads.pipes.views import view_of


def origin(layers: tuple[int, int] | None = (0, 2), **more: object) -> NodeRecord:
    return a_node("a", layers, end_model=True, local_layers=1, **more)  # type: ignore[arg-type]


def test_a_pipe_is_complete_when_every_layer_is_held_and_shows_its_way() -> None:
    view = view_of([origin(), a_node("b", (2, 4))])
    (pipe,) = view.pipes
    assert (pipe.model, pipe.num_layers, pipe.complete) == ("fake", 4, True)
    assert (pipe.missing, pipe.reason, pipe.origins) == ("", "", ("a",))
    assert [(hop.node_id, hop.layers) for hop in pipe.hops] == [("a", "0-1"), ("b", "2-3")]
    assert pipe.token_ms > 0


def test_layers_that_nobody_holds_are_named() -> None:
    (pipe,) = view_of([origin(), a_node("b", (3, 4))]).pipes
    assert (pipe.complete, pipe.missing) == (False, "2")
    assert "layers 2" in pipe.reason
    assert pipe.hops == ()


def test_a_segment_that_is_still_loading_does_not_count() -> None:
    view = view_of([origin(), a_node("b", (2, 4), ready=False)])
    assert not view.pipes[0].complete
    assert "loading" in view.pipes[0].reason
    states = {node.node_id: node.state for node in view.nodes}
    assert states == {"a": "ready", "b": "loading"}


def test_without_a_node_for_the_text_no_pipe_is_complete() -> None:
    (pipe,) = view_of([a_node("b", (0, 4))]).pipes
    assert (pipe.complete, pipe.missing, pipe.origins) == (False, "", ())
    assert "--end-model" in pipe.reason
    (holed,) = view_of([a_node("b", (0, 3))]).pipes
    assert holed.missing == "3"
    assert "--end-model" in holed.reason


def test_other_weights_under_the_same_name_are_told_and_not_used() -> None:
    view = view_of([origin((0, 2)), a_node("b", (0, 4), mark="x"), a_node("c", (2, 4))])
    (pipe,) = view.pipes
    assert any("b" in who for who in pipe.disagree)


def test_several_models_are_several_pipes() -> None:
    view = view_of([origin(), a_node("b", (2, 4)), a_node("z", (0, 6), model="other", of=6)])
    assert [(pipe.model, pipe.complete) for pipe in view.pipes] == [
        ("fake", True),
        ("other", False),
    ]


def test_a_node_is_shown_with_all_that_it_tells() -> None:
    record = a_node(
        "b",
        (2, 4),
        memory=100,
        weights=50,
        cache_total=40,
        cache_used=20,
        cache_kept=10,
        jobs=3,
        waiting=1,
        tokens_per_s=12.345,
        busy=0.5,
        threads=2,
        refused={"bad_hash": 2},
        links={"a": 0.25},
        version=7,
    )
    (node,) = view_of([record], {"b": "w-1"}).nodes
    (segment,) = node.segments
    assert (segment.layers, segment.start, segment.end, segment.dtype) == ("2-3", 2, 4, "float32")
    assert node == NodeView(
        node_id="b",
        address="b.example:7000",
        state="ready",
        model="fake",
        segments=(segment,),
        threads=2,
        memory=100,
        weights=50,
        cache_total=40,
        cache_used=20,
        cache_kept=10,
        jobs=3,
        waiting=1,
        tokens_per_s=12.35,
        busy=0.5,
        refused={"bad_hash": 2},
        links={"a": 0.25},
        worker_id="w-1",
        boot="1",
        version=7,
    )


def test_a_node_says_whether_it_leaves_or_holds_nothing() -> None:
    nodes = view_of([a_node("a"), a_node("b", (0, 2), draining=True)]).nodes
    assert [node.state for node in nodes] == ["idle", "draining"]


def test_of_what_workers_tell_the_newest_counts_and_each_node_knows_its_worker() -> None:
    old = view_of([origin(jobs=1, version=1), a_node("b", (2, 4), jobs=1, version=9)], {"a": "w1"})
    new = view_of([origin(jobs=5, version=2), a_node("b", (2, 4), jobs=0, version=8)], {"b": "w2"})
    for told in ([("w1", old), ("w2", new)], [("w2", new), ("w1", old)]):
        view = merged(told)
        assert [(node.node_id, node.jobs, node.worker_id) for node in view.nodes] == [
            ("a", 5, "w1"),
            ("b", 1, "w2"),
        ]


def test_a_restarted_node_is_newer_however_low_its_version() -> None:
    before = a_node("b", (2, 4), version=90)
    after = replace(a_node("b", version=1), boot="2")
    view = merged([("w1", view_of([before])), ("w2", view_of([after]))])
    assert view.nodes[0].state == "idle"


def test_a_pipe_is_complete_if_one_worker_sees_it_so() -> None:
    partial = view_of([a_node("b", (2, 4))])
    whole = view_of([origin(), a_node("b", (2, 4))])
    for told in ([("w1", partial), ("w2", whole)], [("w1", whole), ("w2", partial)]):
        (pipe,) = merged(told).pipes
        assert (pipe.complete, pipe.origins) == (True, ("a",))


def test_a_model_of_which_nobody_knows_the_layers_is_not_complete() -> None:
    (pipe,) = view_of([NodeRecord(node_id="a", end_models=("m",))]).pipes
    assert (pipe.complete, pipe.reason) == (False, "nothing is known of m yet")


def test_nothing_told_is_nothing_shown() -> None:
    assert merged([]) == PipesView()
    assert view_of([]) == PipesView()
