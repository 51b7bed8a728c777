"""A line for each change: who came, who went, whether a job can begin."""

from __future__ import annotations

from tests.support.pipes.views import MODEL, node, pipe, segment, view

from penstock.workloads.pipes.status import Change, HopView, NodeChange, changes

NOTHING = view()


def test_who_comes_and_who_goes_is_told() -> None:
    both = view(node("a", segment(0, 3)), node("b", segment(3, 6)))
    alone = view(node("a", segment(0, 3)))
    assert changes(alone, both)[0] == NodeChange(
        what=Change.JOINED, about="b", text="127.0.0.1:7500, Smol 3-5"
    )
    assert changes(both, alone) == [NodeChange(what=Change.LOST, about="b", text="it had Smol 3-5")]
    why = {"b": "it said nothing for 5 s"}
    assert changes(both, alone, why)[0].text == "it said nothing for 5 s; it had Smol 3-5"


def test_a_node_that_was_started_again_has_joined_again() -> None:
    before, after = view(node("a", boot="1")), view(node("a", boot="2"))
    assert [one.what for one in changes(before, after)] == [Change.JOINED]


def test_a_node_that_joins_without_layers_is_told_once() -> None:
    assert [one.what for one in changes(NOTHING, view(node("a", state="idle")))] == [Change.JOINED]


def test_loading_and_its_end_are_told() -> None:
    loading = view(node("a", segment(0, 6, state="loading"), state="loading"))
    ready = view(node("a", segment(0, 6)))
    idle = view(node("a", state="idle"))
    assert changes(idle, loading) == [NodeChange(what=Change.LOADING, about="a", text="Smol 0-5")]
    assert changes(loading, ready) == [NodeChange(what=Change.READY, about="a", text="Smol 0-5")]
    assert (
        changes(ready, view(node("a", segment(0, 6), state="draining")))[0].what is Change.DRAINING
    )


def test_figures_that_change_are_no_news() -> None:
    before = view(node("a", segment(0, 6)), pipes=(pipe(token_ms=40.0),))
    after = view(node("a", segment(0, 6), jobs=3, busy=0.5), pipes=(pipe(token_ms=50.0),))
    assert changes(before, after) == []


def test_a_pipe_that_becomes_complete_tells_its_way() -> None:
    hops = (HopView(node_id="a", layers="0-5"),)
    before = view(pipes=(pipe(complete=False, missing="3-5"),))
    after = view(pipes=(pipe(hops=hops),))
    assert changes(before, after) == [NodeChange(what=Change.COMPLETE, about=MODEL, text="a 0-5")]
    assert changes(after, after) == []


def test_a_pipe_that_is_complete_by_another_way_is_no_news() -> None:
    one = view(pipes=(pipe(hops=(HopView(node_id="a", layers="0-5"),)),))
    other = view(pipes=(pipe(hops=(HopView(node_id="b", layers="0-5"),)),))
    assert changes(one, other) == []


def test_what_misses_is_told_whenever_it_changes() -> None:
    some = view(pipes=(pipe(complete=False, missing="3-5"),))
    all_of_it = view(pipes=(pipe(complete=False, missing="0-5"),))
    text = "no node has layers 3-5"
    assert changes(NOTHING, some) == [NodeChange(what=Change.INCOMPLETE, about=MODEL, text=text)]
    assert changes(view(pipes=(pipe(),)), some)[0].what is Change.INCOMPLETE
    assert changes(some, all_of_it)[0].text == "no node has layers 0-5"
