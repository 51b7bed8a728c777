"""Split models on paper: whoever looks sees who holds what, and what misses."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.support.pipes.views import MODEL, node, pipe, segment, view

from penstock.cli.node_screen import NetworkView, brief, coverage, holding, ruler, spread
from penstock.workloads.pipes.status import HopView, PipesView

LONG = "a-rather-long-name-that-somebody-chose-one-day"


def drawn(shown: PipesView, width: int = 80) -> list[str]:
    page = io.StringIO()
    Console(file=page, width=width, highlight=False).print(NetworkView(shown))
    return [line.rstrip() for line in page.getvalue().splitlines()]


# -- the bar --------------------------------------------------------------------------------


def test_a_bar_shows_what_is_held_and_what_is_being_loaded() -> None:
    one = node("a", segment(1, 3), segment(4, 5, state="loading"))
    assert holding(one, MODEL, 6, 6).plain == "·██·▒·"
    assert holding(one, "Other", 6, 6).plain == "······"


def test_a_cell_may_stand_for_several_layers() -> None:
    one = node("a", segment(2, 4))
    assert holding(one, MODEL, 6, 3).plain == "·█·"


def test_copies_are_counted_and_missing_layers_marked() -> None:
    nodes = [node("a", segment(0, 3)), node("b", segment(2, 4), segment(4, 5, state="loading"))]
    shown = coverage(nodes, MODEL, 6, 6)
    assert shown.plain == "11210✗"
    styles = {shown.plain[span.start : span.end]: span.style for span in shown.spans}
    assert styles == {"1121": "green", "0": "yellow", "✗": "bold red"}


def test_a_cell_of_several_layers_counts_as_its_worst() -> None:
    assert coverage([node("a", segment(0, 5))], MODEL, 6, 3).plain == "11✗"


def test_more_copies_than_a_digit_can_tell() -> None:
    nodes = [node(f"n{i}", segment(0, 1)) for i in range(10)]
    assert coverage(nodes, MODEL, 1, 1).plain == "+"


def test_a_layer_outside_of_the_model_is_not_drawn() -> None:
    assert holding(node("a", segment(4, 99)), MODEL, 6, 6).plain == "····██"


@pytest.mark.parametrize(
    ("layers", "width", "told"),
    [(1, 1, "0"), (30, 30, "0         10        20"), (80, 40, "0         20        40        60")],
)
def test_layers_are_numbered_above_their_cells(layers: int, width: int, told: str) -> None:
    assert ruler(layers, width) == told.ljust(width)
    assert len(spread(range(layers), width, max)) == width


# -- the page -------------------------------------------------------------------------------


def test_a_complete_pipe_tells_its_way() -> None:
    hops = (HopView(node_id="a", layers="0-2"), HopView(node_id="b", layers="3-5"))
    lines = drawn(
        view(
            node("a", segment(0, 3), end_models=(MODEL,)),
            node("b", segment(3, 6)),
            pipes=(pipe(hops=hops, token_ms=41.4),),
        )
    )
    assert lines[0] == "Smol  6 layers, 2 nodes  complete"
    assert lines[1] == "  route: a 0-2 → b 3-5, about 41 ms a token"
    assert "a       ███···  0-2, text  ready" in lines
    assert "copies  111111" in lines


def test_what_misses_is_told_in_words() -> None:
    shown = view(
        node("a", segment(0, 3)),
        node("b", segment(3, 5, state="loading", loaded=1), state="loading"),
        pipes=(pipe(complete=False, missing="3-5", disagree=("layers 0 of c are others",)),),
    )
    lines = drawn(shown)
    assert lines[0] == "Smol  6 layers, 2 nodes  not complete"
    assert lines[1] == "  no node has layers 3-5"
    assert lines[2] == "  ignored: layers 0 of c are others"
    assert any(line.startswith("b ") and line.endswith("loading 1/2") for line in lines)


def test_layers_that_lie_together_are_told_together() -> None:
    lines = drawn(view(node("a", segment(1, 6), segment(0, 1)), pipes=(pipe(),)))
    assert any(line.split()[2:] == ["0-5", "ready"] for line in lines)


def test_each_node_s_figures_are_told() -> None:
    shown = view(
        node(
            "a",
            segment(0, 6, layer_ms=1.25),
            weights=283 << 20,
            cache_used=12 << 20,
            cache_kept=80 << 20,
            cache_total=1 << 30,
            jobs=2,
            waiting=1,
            tokens_per_s=23.4,
            busy=0.614,
            threads=2,
            refused={"wrong hash": 2, "replayed": 1, "never": 0},
        ),
        pipes=(pipe(),),
    )
    narrow, wide = drawn(shown), drawn(shown, 120)
    figures = ["a", "float32", "283M", "12M", "80M", "1.0G", "2+1", "23", "61%"]
    assert figures in [line.split() for line in narrow]
    assert "a refused: 1 replayed, 2 wrong hash" in narrow
    assert any(line.endswith("1.25        2  127.0.0.1:7500") for line in wide)


def test_nodes_of_another_model_are_not_drawn_in_its_bars() -> None:
    shown = view(
        node("a", segment(0, 6)),
        node("b", segment(0, 2, model="Other"), model="Other"),
        pipes=(pipe(), pipe(model="Other", num_layers=2)),
    )
    lines = drawn(shown)
    assert "Smol  6 layers, 1 node  complete" in lines
    assert "Other  2 layers, 1 node  complete" in lines


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("layers", [1, 30, 80, 126])
def test_the_page_fits_its_terminal(width: int, layers: int) -> None:
    nodes = [
        node(
            f"{LONG}-{i}",
            segment(0, layers, state="loading", loaded=layers, layer_ms=123.45),
            end_models=(MODEL,),
            address="192.168.100.200:65535",
            weights=999 << 30,
            cache_total=999 << 30,
            cache_used=999 << 30,
            cache_kept=999 << 30,
            jobs=64,
            waiting=256,
            tokens_per_s=12345.6,
            busy=1.0,
            threads=128,
        )
        for i in range(3)
    ]
    for line in drawn(view(*nodes, pipes=(pipe(num_layers=layers),)), width):
        assert len(line) <= width, line


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0"),
        (1, "0.0K"),
        (900 << 10, "900K"),
        (1023 << 10, "1.0M"),
        (270 << 20, "270M"),
        (1288490189, "1.2G"),
        (5 << 50, "5120T"),
    ],
)
def test_sizes_are_told_in_few_characters(count: int, told: str) -> None:
    assert brief(count) == told
