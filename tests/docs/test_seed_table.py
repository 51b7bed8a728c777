"""The page that maps seed 001 to tests names tests that there are, and leaves nothing out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from penstock.lifecycles.canonical import CANONICAL, JobState, Role

PAGE = "docs/reference/seed-001.md"
NAMED = re.compile(r"`([\w/.]+\.py)::(\w+)`")


@pytest.fixture(scope="session")
def table(pages: dict[str, str]) -> str:
    return pages[PAGE]


def rows(table: str) -> Iterator[str]:
    """Every row of every table, without their heads."""
    for line in table.splitlines():
        if line.startswith("|") and not re.match(r"\|-|\| (what the seed says|weak point) ", line):
            yield line


@cache
def named_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def exists(root: Path, file: str, name: str) -> bool:
    homes = [home / file for home in (root / "tests", root / "src") if (home / file).is_file()]
    return name.startswith("test_") and any(name in named_in(path) for path in homes)


def test_every_sentence_has_a_test(table: str) -> None:
    assert [row for row in rows(table) if not NAMED.search(row.rpartition(" | ")[2])] == []


def test_every_test_that_is_named_exists(table: str, root: Path) -> None:
    named = NAMED.findall(table)
    assert len(named) > len(list(rows(table)))
    assert [f"{file}::{name}" for file, name in named if not exists(root, file, name)] == []


def test_every_test_of_the_seed_is_on_the_page(table: str, root: Path) -> None:
    path = root / "tests" / "acceptance" / "test_seed_001.py"
    ours = {name for name in named_in(path) if name.startswith("test_")}
    assert ours - {name for _, name in NAMED.findall(table)} == set()


def test_every_arrow_of_the_table_is_on_the_page(table: str) -> None:
    told = set(re.findall(r"^\| `(\S+ → \w+)`: ", table, re.M))
    arrows = {
        f"{before} → {after}"
        for before, _, after in CANONICAL
        if before is not after and after is not JobState.CANCELLED
    }
    assert told == arrows | {"[*] → PENDING", "any → CANCELLED"}


def test_every_state_and_every_role_is_on_the_page(table: str) -> None:
    assert [word.value for word in (*JobState, *Role) if word.value not in table] == []
