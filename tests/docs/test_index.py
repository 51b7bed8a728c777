"""The front pages (README, index, ARCHITECTURE) list what exists, and name only what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import click
import pytest
from tests.docs.conftest import GENERATED, blocks_of

from penstock.api.container.facade import ContainerFacade
from penstock.api.container.server import INFO, operations
from penstock.api.openapi import document
from penstock.api.operations import OPERATIONS
from penstock.cli.program import penstock as cli

SHORT = 150
"""Lines of README.md, at most."""

_TARGET = re.compile(r"\[([^\]]*)\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")
_COMMAND = re.compile(r"`penstock ([a-z][\w -]*)")


def test_readme_is_short_and_begins_with_a_picture(root: Path) -> None:
    text = (root / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= SHORT
    picture = re.search(r"!\[.+\]\((.+\.svg)\)", text)
    assert picture, "README has no picture"
    assert picture.start() < text.index("\n## ")
    drawn = (root / picture[1]).read_text("utf-8")
    assert drawn.startswith("<svg")
    assert "url(" not in drawn.replace("url(#", "")
    assert "SUCCEEDED" in drawn


def test_every_page_is_in_the_index_once(root: Path, pages: dict[str, str]) -> None:
    listed = [target for _, target in _TARGET.findall(pages["docs/index.md"])]
    there = {
        path.relative_to(root / "docs").as_posix()
        for path in (root / "docs").rglob("*.md")
        if path.parent.name != "decisions"
    }
    wanted = (there | GENERATED | {"decisions/index.md"}) - {"index.md"}
    inside = [target for target in listed if not target.startswith("..")]
    assert sorted(inside) == sorted(wanted)


def test_every_decision_is_in_their_index_by_its_title(root: Path, pages: dict[str, str]) -> None:
    there = {
        path.name: path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        for path in (root / "docs" / "decisions").glob("0*.md")
    }
    assert {
        name: title for title, name in _TARGET.findall(pages["docs/decisions/index.md"])
    } == there
    numbers = [int(title.partition(".")[0]) for title in there.values()]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_no_page_is_empty_and_no_two_have_the_same_title(pages: dict[str, str]) -> None:
    titles = [text.partition("\n")[0] for text in pages.values()]
    assert [name for name, text in pages.items() if not text.startswith("# ")] == []
    assert [title for title in titles if titles.count(title) > 1] == []


def command_of(words: list[str]) -> click.Command | None:
    """The command that words begin with; None if there is none."""
    context = click.Context(cli, info_name="penstock")
    found: click.Command | None = None
    group: click.Command = cli
    for word in words:
        if not isinstance(group, click.Group):
            break
        found = group.get_command(context, word)
        if found is None:
            return None
        group = found
    return found


def commands_in(root: Path, name: str, text: str) -> set[tuple[str, ...]]:
    """The words after `penstock` in a page: in its text, and in its console and shell blocks."""
    found = set()
    for said in _COMMAND.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)):
        found.add(tuple(said.split()))
    for block in blocks_of(root / name):
        if block.kind in ("console", "sh"):
            for said in re.findall(r"(?:^\$ |[;&|(] *|^)penstock ([a-z][\w ]*)", block.text, re.M):
                found.add(tuple(said.split()))
    return found


@pytest.mark.parametrize("front", ["README.md", "ARCHITECTURE.md", "docs/"])
def test_every_command_that_a_page_names_exists(
    front: str, root: Path, pages: dict[str, str]
) -> None:
    wrong: list[Any] = []
    for name, text in pages.items():
        if name.startswith(front) and name.removeprefix("docs/") not in GENERATED:
            wrong += [
                f"{name}: penstock {' '.join(words)}"
                for words in sorted(commands_in(root, name, text))
                if command_of([word for word in words if not word.startswith("-")]) is None
            ]
    assert wrong == []


def test_every_file_that_the_architecture_names_exists(root: Path, pages: dict[str, str]) -> None:
    folders = ("src", "tests", "tools", "examples")
    there = [path.as_posix() for folder in folders for path in (root / folder).rglob("*.*")]
    named = re.findall(r"`([\w/]+\.(?:py|sql))`", pages["ARCHITECTURE.md"])
    assert len(named) > 100
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in there)]
    assert missing == []


def test_every_route_that_a_page_names_exists(pages: dict[str, str]) -> None:
    def shape(path: str) -> str:
        return re.sub(r"\{[^}]*\}|<[^>]*>|\b[A-Z]+\b", "{}", path.partition("?")[0]).rstrip("/")

    known = {
        (verb.upper(), shape(path))
        for table in (document(OPERATIONS), container_document())
        for path, verbs in table["paths"].items()
        for verb in verbs
    }
    known |= {("GET", "/version"), ("GET", "/health")}  # other names of two routes
    said = re.compile(r"`(GET|POST|PUT|PATCH|DELETE) (/[\w/{}.?=&-]*)`")
    wrong = [
        f"{name}: {verb} {path}"
        for name, text in pages.items()
        if name.removeprefix("docs/") not in GENERATED
        for verb, path in said.findall(text)
        if (verb, shape(path)) not in known
    ]
    assert wrong == []


def container_document() -> Any:
    return document(operations(cast("ContainerFacade", None)), INFO)
