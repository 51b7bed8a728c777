"""Lifecycles drawn as Mermaid and Markdown, and pages kept in step with them."""

from __future__ import annotations

from enum import StrEnum

import pytest
from tests.support.rows import every
from tools.lifecycle_diagrams import (
    in_step,
    main,
    mermaid,
    move_table,
    redrawn,
    state_table,
)

from penstock.dashboard.vocabulary import LIFECYCLES, sentences
from penstock.lifecycles.canonical import CANONICAL, JobState
from penstock.lifecycles.container import CONTAINER
from penstock.lifecycles.pipeline import PIPELINE
from penstock.lifecycles.processor import PROCESSOR

every_lifecycle = pytest.mark.parametrize("machine", LIFECYCLES.values(), ids=LIFECYCLES)

STALE = "# A page\n\n<!-- diagram: spool -->\nscribble\n<!-- /diagram -->\n\nAnd so on.\n"


@every_lifecycle
def test_a_diagram_shows_every_move_that_changes_a_state(machine):
    arrows = [line.split(" : ") for line in mermaid(machine).splitlines() if " : " in line]
    drawn = {(ends.strip(), event) for ends, events in arrows for event in events.split(", ")}
    assert {(f"{a} --> {b}", event) for a, event, b in machine if a is not b} <= drawn
    assert {(f"[*] --> {state}", event) for event, state in machine.births.items()} <= drawn


@every_lifecycle
def test_a_diagram_ends_exactly_the_final_states(machine):
    ends = {line.split()[0] for line in mermaid(machine).splitlines() if line.endswith("[*]")}
    assert ends == machine.final


def test_events_between_the_same_two_states_share_an_arrow():
    assert "    running --> failed : fail, cancel" in mermaid(CONTAINER).splitlines()


def test_an_event_that_never_changes_a_state_is_not_drawn():
    assert "note" not in mermaid(CANONICAL)
    assert "request_cancel" not in mermaid(PIPELINE)


def test_an_event_that_keeps_one_state_and_changes_another_is_drawn_for_both():
    drawn = mermaid(PROCESSOR)
    assert "EMBED --> PROCESS_LAYERS : next_layer_local" in drawn
    assert "PROCESS_LAYERS --> PROCESS_LAYERS : next_layer_local" in drawn


@every_lifecycle
def test_every_state_has_a_sentence(machine):
    for sentence in sentences(type(machine.initial)).values():
        assert sentence[0].isupper()
        assert sentence.endswith(".")


def test_a_state_without_a_sentence_is_named():
    class Mood(StrEnum):
        CALM = "calm"
        """Nothing happens."""
        WILD = "wild"

    with pytest.raises(ValueError, match="Mood: no sentence stands under WILD"):
        sentences(Mood)


def test_the_state_table_gives_each_state_its_sentence_and_marks_the_final_ones():
    rows = state_table(CANONICAL).splitlines()
    assert "| `RUNNING` | A worker said that it started. |  |" in rows
    assert "| `FAILED` | Ended with an error. | yes |" in rows
    assert len(rows) == 2 + len(JobState)


def test_the_state_table_tells_an_answer_from_a_state():
    assert state_table(CONTAINER).splitlines()[-1].endswith("| an answer, not a state |")


def test_the_move_table_gathers_what_happens_within_states():
    rows = move_table(CANONICAL).splitlines()
    assert "|  | `accept` | `PENDING` |" in rows
    assert "| `RUNNING` | `succeed` | `SUCCEEDED` |" in rows
    assert "| `DISPATCHED`, `RUNNING` | `redispatch` | the same |" in rows
    assert "| any | `note` | the same |" in rows


@every("part", ["diagram", "states", "moves"])
@every("name", LIFECYCLES)
def test_a_redrawn_page_is_in_step_and_keeps_the_rest(part, name):
    page = f"before\n<!-- {part}: {name} -->\nscribble\n<!-- /{part} -->\nafter\n"
    assert not in_step(page)
    drawn = redrawn(page)
    assert in_step(drawn)
    assert drawn.startswith(f"before\n<!-- {part}: {name} -->\n")
    assert drawn.endswith(f"\n<!-- /{part} -->\nafter\n")
    assert "scribble" not in drawn


def test_several_blocks_of_a_page_are_redrawn_each_with_its_own():
    page = (
        "<!-- diagram: spool -->\n<!-- /diagram -->\n\n"
        "<!-- states: canonical -->\n<!-- /states -->\n"
    )
    drawn = redrawn(page)
    assert "STAGING --> QUEUED" in drawn.split("<!-- /diagram -->")[0]
    assert "Ended with an error." in drawn.split("<!-- /diagram -->")[1]


def test_a_page_without_marks_is_in_step():
    assert in_step("# Nothing drawn here\n\nThe mark `<!-- diagram: spool -->` is prose.\n")


def test_a_block_of_an_unknown_lifecycle_is_an_error_that_names_the_known():
    with pytest.raises(ValueError, match="'ghost'; there are canonical, pipeline"):
        redrawn("<!-- diagram: ghost -->\n<!-- /diagram -->\n")


@pytest.mark.parametrize(
    "page",
    [
        "<!-- diagram: spool -->\nand no end\n",
        "<!-- diagram: spool -->\n<!-- /states -->\n",
        "<!-- diagram: spool -->\n<!-- states: spool -->\n<!-- /states -->\n",
    ],
    ids=["no end", "another end", "another beginning"],
)
def test_a_block_that_is_never_closed_is_an_error(page):
    with pytest.raises(ValueError, match="never closed"):
        redrawn(page)


def test_the_command_prints_all_of_them(capsys):
    main([])
    printed = capsys.readouterr().out
    assert printed.count("stateDiagram-v2") == len(LIFECYCLES)


def test_the_command_mends_a_stale_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(STALE, "utf-8")
    assert not in_step(STALE)
    main([str(page)])
    assert in_step(page.read_text("utf-8"))
