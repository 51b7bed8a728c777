"""Figures as a page: tables, what was to be reached, and how the figures were made.

A figure is named `EXPERIMENT FIGURE`, or `EXPERIMENT FIGURE @SIDE` where it isn't Penstock's.
"""

# The dash and the multiplication sign are meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NONE = "–"
OURS = "penstock"
"""The side that is meant where a figure names none."""
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Figures by experiment and side."""
_QUIET = 10
"""Percent of the cores that others may keep busy."""


def look_up(results: Results, name: str) -> float | None:
    path, _, side = name.partition(" @")
    experiment, _, figure = path.partition(" ")
    found: float | None = results.get(experiment, {}).get(side or OURS, {}).get(figure)
    return found


@dataclass(frozen=True)
class Goal:
    """A figure, what it is to be compared with, and what is to be reached.

    Without `least` and `most` it only compares. It has no row where the figure was not measured.
    """

    work: str
    figure: str
    beside: str = ""
    """Another figure: judged is then how many times it."""
    least: float | None = None
    most: float | None = None
    form: str = "{:,.0f}/s"
    aim: str = ""
    """How the goal reads, if not as its number."""
    peer: str = ""
    """What the other figure is called, if not by its side."""

    def judge(self, results: Results, titles: Mapping[str, str], rows: Goals) -> None:
        ours = look_up(results, self.figure)
        has_goal = self.least is not None or self.most is not None
        other = look_up(results, self.beside) if self.beside else None
        if ours is None or (self.beside and other is None and not has_goal):
            return
        side = self.beside.partition(" @")[2]
        name, figure = self.peer or titles.get(side, side), self.form.format(ours)
        if not self.beside:
            rows.add(self.work, figure, self._reached(ours), aim=self._aim(self.form))
        elif not other:
            rows.add(self.work, figure, aim=self._aim("{:g}×"), peer=f"{name}: not measured")
        else:
            ratio = ours / other
            rows.add(
                self.work,
                figure,
                self._reached(ratio),
                aim=self._aim("{:g}×"),
                peer=f"{name}: {self.form.format(other)}",
                ratio=times(ratio),
            )

    def _reached(self, value: float) -> bool | None:
        if self.least is None and self.most is None:
            return None
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    def _aim(self, form: str) -> str:
        if self.aim or (self.least is None and self.most is None):
            return self.aim or NONE
        bound = self.least if self.least is not None else self.most
        return ("≥ " if self.least is not None else "≤ ") + form.format(bound)


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


def judged(goals: Iterable[Goal], results: Results, titles: Mapping[str, str]) -> Goals:
    rows = Goals()
    for goal in goals:
        goal.judge(results, titles, rows)
    return rows


# -- the page -----------------------------------------------------------------------


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


def by_figure(
    results: Results,
    rows: Mapping[str, str],
    columns: Mapping[str, tuple[str, str]],
    corner: str = "",
) -> str:
    """A row for each `EXPERIMENT` or `EXPERIMENT @SIDE`, a column for each figure and its form.

    A figure may be another side's, `FIGURE @SIDE`, or the quotient of two, `FIGURE/FIGURE`. Rows
    without figures are left out; if there are none, so is the table.
    """

    def value(place: str, name: str) -> float | None:
        experiment, _, side = place.partition(" @")
        found = [
            look_up(results, f"{experiment} {part}" + ("" if " @" in part else f" @{side}"))
            for part in name.split("/")
        ]
        if len(found) == 1 or found[0] is None:
            return found[0]
        return found[0] / found[1] if found[1] else None

    drawn = []
    for label, place in rows.items():
        values = [value(place, name) for name, _ in columns.values()]
        if any(each is not None for each in values):
            cells = zip(values, columns.values(), strict=True)
            drawn.append([label, *(shown(each, form) for each, (_, form) in cells)])
    return table([corner, *columns], drawn) if drawn else ""


def by_side(
    results: Results, rows: Mapping[str, str | tuple[str, str]], titles: Mapping[str, str]
) -> str:
    """A row for each figure of Penstock, a column for each side that has any.

    A peer's cell has in brackets how many times better Penstock is. The second of two names is
    what the peers call the figure.
    """
    sides = [s for s in titles if s == OURS or any(s in found for found in results.values())]
    drawn = []
    for label, names in rows.items():
        ours, theirs = (names, names) if isinstance(names, str) else names
        value = look_up(results, ours)
        if ours.partition(" ")[0] not in results:
            continue
        form, cells = _form(ours), []
        for side in sides:
            if side == OURS:
                cells.append(shown(value, form))
                continue
            other = look_up(results, f"{theirs} @{side}")
            better = f" ({times(_better(ours, value, other))})" if value and other else ""
            cells.append(shown(other, form) + better)
        drawn.append([label, *cells])
    return table(["", *(titles[side] for side in sides)], drawn) if drawn else ""


_FORMS = {"_ms": "{:.2f}", "_percent": "{:.2f}", "_flushes": "{:.1f}", "_s": "{:.1f}"}
"""Of figures that end so; others have no decimals."""


def _form(figure: str) -> str:
    return next((form for end, form in _FORMS.items() if figure.endswith(end)), "{:,.0f}")


def _better(figure: str, ours: float, other: float) -> float:
    return other / ours if figure.endswith(("_us", "_ms")) else ours / other


BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


def rewritten(text: str, figures: str) -> str:
    """A page with new figures between its marks. Raises ValueError if it has none."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n\n{figures}\n\n{END}{tail}"
