"""What holds for the pages as a whole: links, diagrams, words, and what must be told of."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from os.path import normpath
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
def anchors(text: str) -> frozenset[str]:
    headings = _HEADING.finditer(_FENCED.sub("", text))
    return frozenset(anchor(found["text"]) for found in headings)


def test_links_lead_somewhere(pages: dict[str, str], root: Path) -> None:
    dead = []
    for name, text in pages.items():
        for link in _LINK.finditer(_FENCED.sub("", text)):
            target, _, part = link["target"].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            path = normpath(Path(name).parent / target) if target else name
            there = path in pages or (root / path).exists()
            if not there or (part and path in pages and part not in anchors(pages[path])):
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


def test_no_page_names_a_place_on_the_machine_it_was_written_on(pages: dict[str, str]) -> None:
    there = re.compile(r"(?<![\w.~])/(?:root|work|home/\w+)/")
    assert [name for name, text in pages.items() if there.search(text)] == []
