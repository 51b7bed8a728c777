"""Which tests hold which sentence of the specification.

tests/seeds/NNN.md lists the sentences of seed NNN by number. A test names those that it holds:
`@pytest.mark.seed("001", "3.2", "5.1")`. From both, the site gets a page for each seed.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEEDS = ("000", "001", "002", "003", "004")
SUITES = ("tests", "src/penstock/testing")
"""Where tests are: ours, and the suites that authors of plug-ins run as well."""

_SENTENCE = re.compile(
    r"^- (?P<number>\d+\.\d+) (?P<text>.*?)(?: \(left out: (?P<left_out>.*)\))?$", re.M
)
_INTRODUCTION = """\
A sentence or a table row of the specification, in short, and the tests that hold it. This page is
made from the marks of the tests (`@pytest.mark.seed`), and a test fails if a sentence has none.
"""


@dataclass(frozen=True)
class Sentence:
    """One sentence of a seed; `left_out` says why there is no test of it."""

    number: str
    text: str
    left_out: str


Marks = dict[tuple[str, str], list[str]]
"""By seed and number of a sentence: the tests, as path::name."""


def text_of(seed: str) -> str:
    return (ROOT / "tests" / "seeds" / f"{seed}.md").read_text("utf-8")


def sentences(seed: str) -> list[Sentence]:
    return [
        Sentence(found["number"], found["text"], found["left_out"] or "")
        for found in _SENTENCE.finditer(text_of(seed))
    ]


@cache
def marks() -> Marks:
    found: Marks = defaultdict(list)
    for folder in SUITES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for test, seed, numbers in _marked(path):
                for number in numbers:
                    found[seed, number].append(f"{name}::{test}")
    return found


def _marked(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    text = path.read_text("utf-8")
    if "mark.seed(" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.seed":
                    seed, *numbers = map(ast.literal_eval, mark.args)
                    yield node.name, seed, numbers


def page(seed: str) -> str:
    """The text of a seed, with the tests below each sentence."""

    def with_tests(found: re.Match[str]) -> str:
        tests = "".join(f"\n    - `{test}`" for test in marks().get((seed, found["number"]), ()))
        return found[0] + tests

    title, _, rest = text_of(seed).partition("\n")
    return f"{title}\n\n{_INTRODUCTION}{_SENTENCE.sub(with_tests, rest)}"
