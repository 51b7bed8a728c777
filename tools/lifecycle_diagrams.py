"""Any lifecycle as Mermaid and Markdown, and Markdown pages kept in step with the tables.

A page marks what is drawn from a table, and the table's name:

    <!-- diagram: canonical -->  a Mermaid state diagram  <!-- /diagram -->
    <!-- states: canonical -->   each state's sentence    <!-- /states -->
    <!-- moves: canonical -->    every legal move         <!-- /moves -->

`python tools/lifecycle_diagrams.py` prints all lifecycles; with names of pages, it redraws the
marked blocks of those.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from penstock.dashboard.vocabulary import LIFECYCLES, AnyMachine, sentences


def mermaid(machine: AnyMachine) -> str:
    """Draw the moves; an event that only ever happens within a state is left out."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for event, state in machine.births.items():
        arrows.setdefault(("[*]", state), []).append(event)
    within = _within(machine)
    for before, event, after in machine:
        if event not in within:
            arrows.setdefault((before, after), []).append(event)
    lines = [f"{before} --> {after} : {', '.join(how)}" for (before, after), how in arrows.items()]
    lines += [f"{state} --> [*]" for state in machine.states if machine.is_final(state)]
    return "\n".join(["stateDiagram-v2", *(f"    {line}" for line in lines)])


def state_table(machine: AnyMachine) -> str:
    """Say what each state means, in the words that stand under its declaration."""
    meaning = sentences(type(machine.initial))
    rows = [
        (f"`{state}`", meaning[state], "yes" if machine.is_final(state) else "")
        for state in machine.states
    ]
    if machine.absent is not None:
        rows.append((f"`{machine.absent}`", meaning[machine.absent], "an answer, not a state"))
    return _table(("State", "What it means", "Final"), rows)


def move_table(machine: AnyMachine) -> str:
    """List every legal move; those within a state come last, a row an event."""
    within = _within(machine)
    rows = [("", f"`{event}`", f"`{state}`") for event, state in machine.births.items()]
    rows += [
        (f"`{before}`", f"`{event}`", f"`{after}`")
        for before, event, after in machine
        if event not in within
    ]
    for event, states in within.items():
        whole = len(states) == len(machine.states)
        where = "any" if whole else ", ".join(f"`{state}`" for state in states)
        rows.append((where, f"`{event}`", "the same"))
    return _table(("From", "Event", "To"), rows)


def redrawn(page: str) -> str:
    """Return the page with every marked block drawn anew.

    Raises ValueError for a block that is never closed or names no lifecycle.
    """
    if len(_OPENED.findall(page)) != len(_BLOCK.findall(page)):
        raise ValueError("a marked block is never closed")
    return _BLOCK.sub(_draw, page)


def in_step(page: str) -> bool:
    """Say whether every marked block of the page is what its table would draw."""
    return redrawn(page) == page


def main(pages: list[str]) -> None:
    """Print the lifecycles, or bring pages in step with them."""
    if not pages:
        print("\n\n".join(_chapters()))
    for page in map(Path, pages):
        page.write_text(redrawn(page.read_text("utf-8")), "utf-8")


_PARTS: Mapping[str, Callable[[AnyMachine], str]] = {
    "diagram": lambda machine: f"```mermaid\n{mermaid(machine)}\n```",
    "states": state_table,
    "moves": move_table,
}
_OPENED = re.compile(r"^<!-- (?:diagram|states|moves): ", re.M)
_BLOCK = re.compile(
    r"^(<!-- (diagram|states|moves): (\S+) -->\n)(?:(?!^<!-- ).)*?^(<!-- /\2 -->)", re.M | re.S
)


def _draw(block: re.Match[str]) -> str:
    opening, part, name, closing = block.groups()
    if name not in LIFECYCLES:
        raise ValueError(f"no lifecycle is called {name!r}; there are {', '.join(LIFECYCLES)}")
    return f"{opening}{_PARTS[part](LIFECYCLES[name])}\n{closing}"


def _chapters() -> Iterator[str]:
    for name, machine in LIFECYCLES.items():
        yield f"## {name}: the {machine.name}"
        yield from (draw(machine) for draw in _PARTS.values())


def _within(machine: AnyMachine) -> dict[StrEnum, list[StrEnum]]:
    """The events that change no state anywhere, and the states they may happen in."""
    moving = {event for before, event, after in machine if after is not before}
    within: dict[StrEnum, list[StrEnum]] = {}
    for before, event, _ in machine:
        if event not in moving:
            within.setdefault(event, []).append(before)
    return within


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    ruler = tuple("---" for _ in header)
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ruler, *rows])


if __name__ == "__main__":
    main(sys.argv[1:])
