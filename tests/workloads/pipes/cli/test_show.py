"""What a node shows of itself, to people and to programs."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console, Group, RenderableType
from tests.support.pipes.views import node, segment

from penstock.cli.live import LiveScreen
from penstock.cli.node_screen import change_line, node_status
from penstock.workloads.pipes.status import Change, NodeChange


def drawn(what: RenderableType, width: int = 80) -> str:
    page = io.StringIO()
    Console(file=page, width=width, highlight=False).print(Group(what))
    return page.getvalue().rstrip()


def test_a_line_tells_how_a_node_stands() -> None:
    one = node(
        "a",
        segment(0, 15),
        end_models=("Smol",),
        jobs=2,
        waiting=1,
        tokens_per_s=23.4,
        busy=0.61,
        cache_used=12 << 20,
        cache_kept=30 << 20,
        cache_total=1 << 30,
        refused={"wrong hash": 3},
    )
    line = drawn(node_status(one, 75.0), 120)
    assert line.startswith("0-14, text   jobs 2 (1 waiting)   23 tokens/s   busy 61%")
    assert line.endswith("cache 12M+30M/1.0G   up 1m 15s   3 refused")


def test_what_is_being_loaded_comes_first() -> None:
    one = node("a", segment(0, 1), segment(15, 30, state="loading", loaded=6))
    line = drawn(node_status(one, 2.0))
    assert line.startswith("loading layers 15-29 ")
    assert line.endswith(" 40% 2.0 s")


def test_a_long_line_is_cut_off() -> None:
    one = node("a", *(segment(n, n + 1) for n in range(0, 80, 2)))
    assert len(drawn(node_status(one, 2.0))) == 80


def test_news_are_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveScreen(change_line, json=False) as screen:
        screen.say("here I am", what="here")
        screen.tell(NodeChange(what=Change.LOST, about="b", text="it left"))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "here I am"
    assert second[8:] == "  lost        b  it left"


def test_news_are_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveScreen(change_line, json=True) as screen:
        screen.say("here I am", what="here", node_id="a")
        screen.tell(NodeChange(what=Change.LOST, about="b", text="it left"))
    lines = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"what": "here", "node_id": "a"},
        {"what": "lost", "about": "b", "text": "it left"},
    ]
