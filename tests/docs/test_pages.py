"""What holds for the pages as a whole: links, diagrams, words, and what must be told of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.lifecycles.diagram import in_step

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<text>.+)$", re.M)
_FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)


def anchor(heading: str) -> str:
    """The name that a heading has in a link, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = _FENCED.sub("", path.read_text("utf-8"))
    return {anchor(found["text"]) for found in _HEADING.finditer(text)}


def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in _LINK.finditer(_FENCED.sub("", page.read_text("utf-8"))):
        target, _, part = link["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (part and path.suffix == ".md" and part not in anchors(path)):
            dead.append(link["target"])
    assert dead == []


def test_diagrams_are_what_the_tables_draw(page: Path) -> None:
    assert in_step(page.read_text("utf-8")), (
        f"run: python -m penstock.lifecycles.diagram --write {page.name}"
    )


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


def test_no_page_names_a_place_on_the_machine_it_was_written_on(pages: dict[str, str]) -> None:
    there = re.compile(r"(?<![\w.~])/(?:root|work|home/\w+)/")
    assert [name for name, text in pages.items() if there.search(text)] == []


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_the_two_front_pages_have_a_picture(name: str, pages: dict[str, str]) -> None:
    assert "```mermaid" in pages[name]
