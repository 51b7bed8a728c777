"""Every sentence of the seeds has a test, and every mark of a test names a sentence."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from tools.seed_report import SEEDS, marks, page, sentences, text_of

from penstock.lifecycles.canonical import CANONICAL, JobState, Role
from penstock.lifecycles.container import CONTAINER, ContainerJobState
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobStatus
from penstock.lifecycles.processor import PROCESSOR, ProcessorState
from penstock.lifecycles.spool import FOLDERS, SPOOL, Status
from penstock.workloads.pipeline.records import StageStatus
from penstock.workloads.pipes.job import ComputeStep, JobContext

ARROW = re.compile(r"`(\S+ → \S+)`")
LEFT_OUT = {"003": ["9.15", "10.11"], "004": ["8.12", "13.13"]}
"""Sentences that have no test; each says why."""

every_seed = pytest.mark.parametrize("seed", SEEDS)


@pytest.fixture
def text(seed: str) -> str:
    return text_of(seed)


def arrows_of(seed: str) -> set[str]:
    """Those that a sentence begins with."""
    return {
        arrow for one in sentences(seed) for arrow in ARROW.findall(one.text.partition(": ")[0])
    }


@every_seed
def test_every_sentence_has_a_test_and_only_these_are_left_out(seed: str) -> None:
    found = sentences(seed)
    assert len(found) > 50
    assert [one.number for one in found if one.left_out] == LEFT_OUT.get(seed, [])
    bare = [one for one in found if not one.left_out and not marks().get((seed, one.number))]
    assert bare == []


@every_seed
def test_the_sentences_are_numbered_in_order(seed: str, text: str) -> None:
    titles = [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.M)]
    assert titles == list(range(1, len(titles) + 1))
    numbers = [tuple(map(int, one.number.split("."))) for one in sentences(seed)]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == len(re.findall(r"^- ", text, re.M))


def test_every_mark_names_a_sentence() -> None:
    known = {(seed, one.number) for seed in SEEDS for one in sentences(seed)}
    assert {key: tests for key, tests in marks().items() if key not in known} == {}


@every_seed
def test_every_test_of_the_seed_holds_a_sentence_of_it(seed: str, root: Path) -> None:
    (path,) = (root / "tests").rglob(f"test_seed_{seed}.py")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    ours = {
        f"{path.relative_to(root).as_posix()}::{node.name}"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, kinds) and node.name.startswith("test_")
    }
    assert ours
    marked = {test for (its, _), tests in marks().items() if its == seed for test in tests}
    assert ours - marked == set()


@every_seed
def test_the_report_lists_the_tests_below_each_sentence(seed: str) -> None:
    report = page(seed)
    for one in sentences(seed):
        below = report.split(f"\n- {one.number} ", 1)[1].split("\n- ", 1)[0]
        assert [test for test in marks().get((seed, one.number), ()) if test not in below] == []


@pytest.mark.parametrize("seed", ["000"])
def test_every_arrow_of_the_processors_table_is_on_the_page(seed: str) -> None:
    arrows = {f"{before} → {after}" for before, _, after in PROCESSOR}
    assert arrows_of(seed) == arrows | {"[*] → VALIDATING"}


@pytest.mark.parametrize("seed", ["001"])
def test_every_arrow_of_the_canonical_table_is_on_the_page(seed: str) -> None:
    arrows = {
        f"{before} → {after}"
        for before, _, after in CANONICAL
        if before is not after and after is not JobState.CANCELLED
    }
    assert arrows_of(seed) == arrows | {"[*] → PENDING", "any → CANCELLED"}


@pytest.mark.parametrize("seed", ["002"])
def test_every_arrow_of_the_pipeline_table_is_on_the_page(seed: str) -> None:
    arrows = {f"{before} → {after}" for before, _, after in PIPELINE if before is not after}
    ends = {f"{status} → [*]" for status in PIPELINE.final}
    assert arrows_of(seed) == arrows | ends | {"[*] → PENDING"}


@pytest.mark.parametrize("seed", ["003"])
def test_every_arrow_of_the_container_table_is_on_the_page(seed: str) -> None:
    arrows = {f"{before} → {after}" for before, _, after in CONTAINER if before is not after}
    assert arrows_of(seed) == arrows | {"[*] → queued", "[*] → rejected"}


@pytest.mark.parametrize("seed", ["004"])
def test_every_arrow_of_the_spools_table_is_on_the_page(seed: str) -> None:
    arrows = {f"{before} → {after}" for before, _, after in SPOOL if before is not after}
    assert arrows_of(seed) == arrows | {"[*] → STAGING"}


@pytest.mark.parametrize("seed", ["000"])
def test_every_row_of_the_processors_tables_is_with_its_state(text: str) -> None:
    parts = [part.partition("\n") for part in text.split("\n## ")]
    sections = {title.partition(". ")[2]: below for title, _, below in parts}
    assert [state.value for state in ProcessorState if state.value not in sections] == []
    found = {
        state: set(re.findall(r"\(`(\w+)`\)$", sections[state.value], re.M))
        for state in ProcessorState
    }
    events: dict[ProcessorState, set[str]] = {state: set() for state in ProcessorState}
    for before, event, _ in PROCESSOR:
        events[before].add(event.value)
    assert found == events


@pytest.mark.parametrize("seed", ["000"])
def test_every_compute_step_and_every_part_of_a_context_is_on_the_page(seed: str) -> None:
    fields = [field.name for field in dataclasses.fields(JobContext)]
    told = {name for one in sentences(seed) for name in re.findall(r"^`(\w+)`: ", one.text)}
    assert {*fields, *(step.name for step in ComputeStep)} - told == set()


@pytest.mark.parametrize("seed", ["001"])
def test_every_state_and_every_role_is_on_the_page(text: str) -> None:
    assert [word.value for word in (*JobState, *Role) if word.value not in text] == []


@pytest.mark.parametrize("seed", ["002"])
def test_every_status_of_a_job_and_of_a_stage_is_on_the_page(text: str) -> None:
    assert [word.value for word in PipelineJobStatus if word.value not in text] == []
    assert [word.value for word in StageStatus if f"`{word.value}`" not in text] == []


@pytest.mark.parametrize("seed", ["003"])
def test_every_state_of_a_container_job_is_on_the_page(text: str) -> None:
    assert [word.value for word in ContainerJobState if f"`{word.value}`" not in text] == []


@pytest.mark.parametrize("seed", ["004"])
def test_every_status_of_a_spooled_job_and_its_folder_is_on_the_page(text: str) -> None:
    assert [status.value for status in Status if f". {status.value}\n" not in text] == []
    assert [name for name in FOLDERS.values() if f"`{name}/<job_id>/`" not in text] == []


@pytest.mark.parametrize(
    ("seed", "numbers"),
    [
        ("000", [*range(1, 10), *range(1, 7), *range(1, 17), *range(1, 13)]),
        ("002", range(1, 22)),
        ("003", [*range(1, 16), *range(1, 13)]),
        ("004", [*range(1, 13), *range(1, 14)]),
    ],
)
def test_all_that_was_settled_is_on_the_page(seed: str, numbers: Iterable[int]) -> None:
    settled = [
        int(found[1]) for one in sentences(seed) if (found := re.match(r"(\d+)\. .* ⇒ ", one.text))
    ]
    assert settled == list(numbers)
