"""Plain technical English: none of the old sentences and private names is left.

The list is what a review found hard to understand. A name on it was replaced by the word that
people of this field use; the sentence on it by one that says what is wrong and where.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SENTENCES = (
    "what who connects over tcp must know",
    "nothing is to be filled in from what whoever serves",
    "403 for who submitted it or is not asked",
    "so many at most",
    "make a key worthless",
    "is not the live one",
    "does not answer since",
    "jobs wait already",
    "and no more may",
    "no answer can be held to this",
    "was made for embeddings, and can't answer",
    "nobody said why",
    "this is no way",
    "an old word",
    "in no stretch of the given time",
    "how long a worker is believed",
    "how long they may be waited for",
    "run jobs again and again",
    "follow what happens, live",
    "submit safely twice, and run safely twice",
    "the control plane knows by heart",
    "so many can't be asked for",
)
WORDS = ("adrift", "enclosure", "start book", "watchman", "turnstile", "passes_over")
NAMES = frozenset(
    [
        "Aside",
        "Attendance",
        "BatchCourse",
        "BatchesCounter",
        "Board",
        "Cage",
        "Course",
        "Desk",
        "Door",
        "Fate",
        "Fleet",
        "Flight",
        "Gap",
        "Guest",
        "Happening",
        "Keeper",
        "Kept",
        "Lane",
        "Leavings",
        "LimitsCounter",
        "Noting",
        "Offer",
        "PipelinesCounter",
        "Riders",
        "Said",
        "Seat",
        "Shelf",
        "Site",
        "Story",
        "Surroundings",
        "Tally",
        "Told",
        "Trip",
        "Trouble",
        "Turns",
        "Turnstile",
        "Upkeep",
        "Verdict",
        "Watchman",
        "Way",
        "Wording",
    ]
)
MODULES = frozenset(
    ["asked", "dialect", "found", "giving", "holding", "letting_go", "told", "voices"]
)


def texts(root: Path) -> Iterator[tuple[str, str]]:
    paths = [root / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    paths += [*(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")]
    for path in paths:
        yield path.relative_to(root).as_posix(), path.read_text("utf-8")


@pytest.fixture(scope="module")
def all_texts(root: Path) -> list[tuple[str, str]]:
    return [*texts(root)]


def test_no_page_or_module_has_an_old_sentence(all_texts: list[tuple[str, str]]) -> None:
    found = []
    for name, text in all_texts:
        flat = " ".join(text.lower().split())
        found += [f"{name}: {sentence}" for sentence in SENTENCES if sentence in flat]
    assert found == []


def messages(text: str) -> Iterator[str]:
    """The strings of a module that are no docstrings: what users read in errors, help and logs."""
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


RIDDLES = re.compile(
    r"\b(?:nobody|somebody|whoever)\b"
    r"|(?<!there )\b(?:is|are) no (?!longer|such|more|space|tenant|faster)"
    r"|\b(?:is|are|was|were) told\b",
    re.I,
)
"""Words by which a message says something in a roundabout way: `x is no file`."""


def test_no_message_says_it_in_a_roundabout_way(all_texts: list[tuple[str, str]]) -> None:
    found = [
        f"{name}: {message}"
        for name, text in all_texts
        if name.endswith(".py") and "/testing/" not in name and RIDDLES.search(text)
        for message in messages(text)
        if RIDDLES.search(message)
    ]
    assert found == []


def test_no_page_says_it_in_a_roundabout_way(pages: dict[str, str]) -> None:
    found = [
        f"{name}: {line}"
        for name, text in pages.items()
        if name.startswith(("README", "docs/"))
        and not name.startswith(("docs/decisions/", "docs/reference/seed-"))
        for line in re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S).splitlines()
        if RIDDLES.search(line)
    ]
    assert found == []


def test_no_page_or_module_has_an_old_word(all_texts: list[tuple[str, str]]) -> None:
    old = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.I)
    found = [f"{name}: {hit[0]}" for name, text in all_texts for hit in old.finditer(text)]
    assert found == []


def test_no_class_and_no_module_has_a_private_name(all_texts: list[tuple[str, str]]) -> None:
    found = []
    for name, text in all_texts:
        if name.endswith(".py"):
            classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
            found += [f"{name}: {one.name}" for one in classes if one.name.lstrip("_") in NAMES]
            found += [name] * (Path(name).stem in MODULES)
    assert sorted(set(found)) == []


def test_words_that_people_search_for_may_be_used(pages: dict[str, str]) -> None:
    everything = " ".join(pages.values()).lower()
    for word in ("enqueue", "terminal state", "namespace", "task queue", "dead letter"):
        assert word in everything, word
