"""Reads the pages: their fenced blocks, and the marks that say what to do with them.

A mark is a comment on the line above a block:

    <!-- not run: reason -->    an example that can't run here; a test lists them
    <!-- file: tasks.py -->     the block is a file that later blocks of the page use
    <!-- background -->         the commands run until the end of the page
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tools import reference_pages

ROOT = Path(__file__).resolve().parents[2]
FRONT = ("README.md", "ARCHITECTURE.md", "examples/README.md")
NOT_RUN = ("CHANGELOG.md", "CONTRIBUTING.md")
"""Pages whose links are checked, and whose examples are not run."""
PAGES = sorted(
    [*(ROOT / name for name in FRONT), *(ROOT / "docs").rglob("*.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)

GENERATED = frozenset(reference_pages.PAGES)
"""Pages of docs/ that are made when the site is built, and are not in the repository."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.M | re.S
)
_MARK = re.compile(r"<!-- (?P<word>not run|file|background|on)(?:: (?P<value>[^\n]*?))? -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block: what it is, what it says, and how it is marked."""

    page: str
    line: int
    kind: str
    text: str
    mark: str = ""
    value: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    page = path.read_text("utf-8")
    found = []
    for fence in _FENCE.finditer(page):
        mark = _MARK.search(page[: fence.start()])
        indent = len(fence["indent"])
        found.append(
            Block(
                path.relative_to(ROOT).as_posix(),
                page.count("\n", 0, fence.start()) + 1,
                fence["kind"],
                "".join(line[indent:] or "\n" for line in fence["body"].splitlines(True)),
                mark["word"] if mark else "",
                (mark["value"] or "") if mark else "",
            )
        )
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pages() -> dict[str, str]:
    """Every page's text, by its path; also of those that are made from the code."""
    made = {f"docs/{name}": page() for name, page in reference_pages.PAGES.items()}
    paths = [*PAGES, *(ROOT / name for name in NOT_RUN)]
    return made | {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


@pytest.fixture(scope="session")
def all_blocks() -> list[Block]:
    return [block for path in PAGES for block in blocks_of(path)]
