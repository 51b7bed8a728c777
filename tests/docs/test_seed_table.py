"""The pages that map seeds to tests name tests that there are, and leave nothing out."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.lifecycles.canonical import CANONICAL, JobState, Role
from penstock.lifecycles.container import CONTAINER, ContainerJobState
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobStatus
from penstock.lifecycles.processor import PROCESSOR, ProcessorState
from penstock.lifecycles.spool import FOLDERS, SPOOL, Status
from penstock.workloads.pipeline.records import StageStatus
from penstock.workloads.pipes.job import ComputeStep, JobContext

SEEDS = ("000", "001", "002", "003", "004")
NAMED = re.compile(r"`([\w/.]+\.py)::(\w+)`")
ARROW = re.compile(r"`(\S+ → \S+)`")
LEFT_OUT = re.compile(r"left out: \w.*\|")
BARE = {
    "003": ["| 15. A master", "| … and a signed webhook"],
    "004": ["| … in 8 bits, in `types.hpp`", "| … and a file of metrics"],
}
"""How the rows begin that have no test, and say why."""

every_seed = pytest.mark.parametrize("seed", SEEDS)


def page_of(seed: str) -> str:
    return f"docs/reference/seed-{seed}.md"


@pytest.fixture
def table(seed: str, pages: dict[str, str]) -> str:
    return pages[page_of(seed)]


def rows(table: str) -> Iterator[str]:
    """Every row of every table, without their heads."""
    for line, below in pairwise([*table.splitlines(), ""]):
        if line.startswith("|") and not line.startswith("|-") and not below.startswith("|-"):
            yield line


def arrows_of(table: str) -> set[str]:
    """Those that a row begins with."""
    return {arrow for row in rows(table) for arrow in ARROW.findall(row.partition(": ")[0])}


@cache
def named_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def exists(root: Path, file: str, name: str) -> bool:
    homes = [home / file for home in (root / "tests", root / "src") if (home / file).is_file()]
    return name.startswith("test_") and any(name in named_in(path) for path in homes)


@every_seed
def test_every_sentence_has_a_test_and_only_these_are_left_out(seed: str, table: str) -> None:
    bare = [row for row in rows(table) if not NAMED.search(row.rpartition(" | ")[2])]
    left_out = [row for row in bare if LEFT_OUT.fullmatch(row.rpartition(" | ")[2])]
    assert bare == left_out
    assert [row.split(" | ")[0] for row in left_out] == BARE.get(seed, [])


@every_seed
def test_every_test_that_is_named_exists(table: str, root: Path) -> None:
    named = NAMED.findall(table)
    assert len(named) > len(list(rows(table))) > 50
    assert [f"{file}::{name}" for file, name in named if not exists(root, file, name)] == []


@every_seed
def test_every_test_of_the_seed_is_on_the_page(seed: str, table: str, root: Path) -> None:
    (path,) = (root / "tests").rglob(f"test_seed_{seed}.py")
    ours = {name for name in named_in(path) if name.startswith("test_")}
    assert ours
    assert ours - {name for _, name in NAMED.findall(table)} == set()


@pytest.mark.parametrize("seed", ["000"])
def test_every_arrow_of_the_processors_table_is_on_the_page(table: str) -> None:
    arrows = {f"{before} → {after}" for before, _, after in PROCESSOR}
    assert arrows_of(table) == arrows | {"[*] → VALIDATING"}


@pytest.mark.parametrize("seed", ["001"])
def test_every_arrow_of_the_canonical_table_is_on_the_page(table: str) -> None:
    arrows = {
        f"{before} → {after}"
        for before, _, after in CANONICAL
        if before is not after and after is not JobState.CANCELLED
    }
    assert arrows_of(table) == arrows | {"[*] → PENDING", "any → CANCELLED"}


@pytest.mark.parametrize("seed", ["002"])
def test_every_arrow_of_the_pipeline_table_is_on_the_page(table: str) -> None:
    arrows = {f"{before} → {after}" for before, _, after in PIPELINE if before is not after}
    ends = {f"{status} → [*]" for status in PIPELINE.final}
    assert arrows_of(table) == arrows | ends | {"[*] → PENDING"}


@pytest.mark.parametrize("seed", ["003"])
def test_every_arrow_of_the_container_table_is_on_the_page(table: str) -> None:
    arrows = {f"{before} → {after}" for before, _, after in CONTAINER if before is not after}
    assert arrows_of(table) == arrows | {"[*] → queued", "[*] → rejected"}


@pytest.mark.parametrize("seed", ["004"])
def test_every_arrow_of_the_spools_table_is_on_the_page(table: str) -> None:
    arrows = {f"{before} → {after}" for before, _, after in SPOOL if before is not after}
    assert arrows_of(table) == arrows | {"[*] → STAGING"}


@pytest.mark.parametrize("seed", ["000"])
def test_every_row_of_the_processors_tables_is_with_its_state(table: str) -> None:
    sections = {part.partition("\n")[0]: part for part in table.split("\n## ")}
    assert [state.value for state in ProcessorState if state.value not in sections] == []
    found = {
        state: set(re.findall(r"\(`(\w+)`\) \|", sections[state.value])) for state in ProcessorState
    }
    events: dict[ProcessorState, set[str]] = {state: set() for state in ProcessorState}
    for before, event, _ in PROCESSOR:
        events[before].add(event.value)
    assert found == events


@pytest.mark.parametrize("seed", ["000"])
def test_every_compute_step_and_every_part_of_a_context_is_on_the_page(table: str) -> None:
    fields = [field.name for field in dataclasses.fields(JobContext)]
    assert [name for name in fields if f"\n| `{name}`: " not in table] == []
    assert [step.name for step in ComputeStep if f"\n| `{step.name}`: " not in table] == []


@pytest.mark.parametrize("seed", ["001"])
def test_every_state_and_every_role_is_on_the_page(table: str) -> None:
    assert [word.value for word in (*JobState, *Role) if word.value not in table] == []


@pytest.mark.parametrize("seed", ["002"])
def test_every_status_of_a_job_and_of_a_stage_is_on_the_page(table: str) -> None:
    assert [word.value for word in PipelineJobStatus if word.value not in table] == []
    assert [word.value for word in StageStatus if f"`{word.value}`" not in table] == []


@pytest.mark.parametrize("seed", ["003"])
def test_every_state_of_a_container_job_is_on_the_page(table: str) -> None:
    assert [word.value for word in ContainerJobState if f"`{word.value}`" not in table] == []


@pytest.mark.parametrize("seed", ["004"])
def test_every_status_of_a_spooled_job_and_its_folder_is_on_the_page(table: str) -> None:
    assert [status.value for status in Status if f"\n## {status.value}\n" not in table] == []
    assert [name for name in FOLDERS.values() if f"`{name}/<job_id>/`" not in table] == []


@pytest.mark.parametrize(
    ("seed", "numbers"),
    [
        ("000", [*range(1, 10), *range(1, 7), *range(1, 17), *range(1, 13)]),
        ("002", range(1, 22)),
        ("003", [*range(1, 16), *range(1, 13)]),
        ("004", [*range(1, 13), *range(1, 14)]),
    ],
)
def test_all_that_was_settled_is_on_the_page(table: str, numbers: Iterable[int]) -> None:
    settled = [
        int(found[1])
        for row in rows(table)
        if (found := re.match(r"\| (\d+)\. .* \| .* \| [`l]", row))
    ]
    assert settled == list(numbers)
