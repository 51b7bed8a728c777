"""Figures as a page: tables, what was to be reached, and how the figures were made."""

# The dash is meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

NONE = "–"
_QUIET = 10
"""Percent of the cores that others may keep busy."""


class Goals:
    """What was to be reached, and whether it is."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str, str, bool | None]] = []
        """The work, the goal, the figure, a peer's, their ratio, and whether it is reached."""

    def add(
        self,
        work: str,
        figure: str,
        reached: bool | None = None,
        *,
        aim: str = "",
        peer: str = NONE,
        ratio: str = NONE,
    ) -> None:
        """`reached` is None where there is no goal, or no peer to compare with. Where `work`
        does not say what the goal is, `aim` does."""
        self.rows.append((work, aim, figure, peer, ratio, reached))

    def at_least(self, aim: str, figure: float, least: float, form: str = "{:.2f}x") -> None:
        self.add(aim, form.format(figure), figure >= least)

    def at_most(self, aim: str, figure: float, most: float, form: str = "{:.2f}x") -> None:
        self.add(aim, form.format(figure), figure <= most)

    def table(self) -> str:
        if not self.rows:
            return ""
        said = {True: "reached", False: "**missed**", None: NONE}
        if not any(aim for _, aim, *_ in self.rows):
            rows = [[work, figure, said[reached]] for work, _, figure, *_, reached in self.rows]
            return table(["to reach", "figure", ""], rows)
        wide = [[work, *rest, aim, said[reached]] for work, aim, *rest, reached in self.rows]
        verdicts = [reached for *_, reached in self.rows]
        reached, missed = verdicts.count(True), verdicts.count(False)
        drawn = table(["work", "this run", "peer", "ratio", "goal", ""], wide)
        return f"{drawn}\n\nGoals reached: {reached} of {reached + missed}."


def page(everything: dict[str, Any], goals: Goals, *parts: str) -> str:
    """How the figures were made, the goals, the parts, and what is to be noted."""
    notes = [f"- {note}" for note in everything["notes"]]
    return "\n\n".join(filter(None, [*origin(everything), goals.table(), *parts, *notes]))


def origin(everything: dict[str, Any]) -> list[str]:
    """How the figures were made, where, and what speaks against them."""
    machine = everything["machine"]
    said = [
        f"Made by `{everything['command']}` on {everything['date']}; later changes are not in these"
        " figures.",
        "\n".join(f"- {name}: {value}" for name, value in machine.items()),
    ]
    busy = re.search(r"kept the cores (\d+)% busy", machine.get("others", ""))
    if busy and int(busy[1]) > _QUIET:
        said.append("**The machine was not quiet:** other processes took part of every figure.")
    if {"--quick", "--tiny"} & {*everything["command"].split()}:
        said.append("**A quick run:** few and small measurements; an indication only.")
    return said


def times(ratio: float) -> str:
    digits = 3 if ratio < 0.1 else 2 if ratio < 2 else 1 if ratio < 20 else 0
    return f"{ratio:.{digits}f}×"


def shown(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that reads well as it stands."""
    lines = [list(head), *map(list, rows)]
    widths = [max(3, *(len(line[n]) for line in lines)) for n in range(len(head))]

    def drawn(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([drawn(lines[0]), drawn(rule), *map(drawn, lines[1:])])


BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


def rewritten(text: str, figures: str) -> str:
    """A page with new figures between its marks. Raises ValueError if it has none."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n\n{figures}\n\n{END}{tail}"
