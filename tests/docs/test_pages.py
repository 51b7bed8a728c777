"""What holds for the pages as a whole: links, diagrams, words, and what must be told of."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from tools.lifecycle_diagrams import in_step

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<text>.+)$", re.M)
_FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)


def anchor(heading: str) -> str:
    """The name that a heading has in a link, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    text = _FENCED.sub("", path.read_text("utf-8"))
    return frozenset(anchor(found["text"]) for found in _HEADING.finditer(text))


def test_links_lead_somewhere(pages: dict[str, str], root: Path) -> None:
    dead = []
    for name, text in pages.items():
        page = root / name
        for link in _LINK.finditer(_FENCED.sub("", text)):
            target, _, part = link["target"].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists() or (part and path.suffix == ".md" and part not in anchors(path)):
                dead.append(f"{name}: {link['target']}")
    assert dead == []


def test_diagrams_are_what_the_tables_draw(pages: dict[str, str]) -> None:
    stale = [name for name, text in pages.items() if not in_step(text)]
    assert stale == [], "run: python tools/lifecycle_diagrams.py PAGE"


def test_blocks_of_toml_and_shell_have_no_syntax_error(all_blocks: list[Any]) -> None:
    wrong = []
    for block in all_blocks:
        if block.kind == "toml":
            try:
                tomllib.loads(block.text)
            except tomllib.TOMLDecodeError as error:
                wrong.append(f"{block.place}: {error}")
        if block.kind == "sh":
            checked = subprocess.run(
                ["bash", "-n"], input=block.text, text=True, capture_output=True
            )
            if checked.returncode:
                wrong.append(f"{block.place}: {checked.stderr}")
    assert wrong == []


def test_every_page_is_reached_from_the_index(root: Path) -> None:
    seen, ahead = set(), [root / "docs" / "index.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        for link in _LINK.finditer(page.read_text("utf-8")):
            target = (page.parent / link["target"].partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in seen:
                ahead.append(target)
    pages = set((root / "docs").rglob("*.md"))
    assert sorted(str(page.relative_to(root)) for page in pages - seen) == []


def test_the_index_lists_every_how_to(root: Path, pages: dict[str, str]) -> None:
    there = {path.name for path in (root / "docs" / "how-to").glob("*.md")}
    assert there == set(re.findall(r"\(how-to/([\w-]+\.md)\)", pages["docs/index.md"]))


def test_no_page_names_a_place_on_the_machine_it_was_written_on(pages: dict[str, str]) -> None:
    there = re.compile(r"(?<![\w.~])/(?:root|work|home/\w+)/")
    assert [name for name, text in pages.items() if there.search(text)] == []


def test_the_two_front_pages_have_a_picture(pages: dict[str, str]) -> None:
    for name in ("README.md", "ARCHITECTURE.md"):
        assert "```mermaid" in pages[name]
