"""A lifecycle as a table.

A `StateMachine` is a frozen table of (state, event) -> state. It holds no current
state and calls nothing back: code that owns a state asks the table what an event
would do to it.

Three rules hold for every table:

1. A move not in the table is illegal.
2. An event that leads to the state one is already in is a *repeat*: it is accepted
   and changes nothing, so that a message may arrive twice.
3. Nothing leaves a final state.

A table may name two things beside its moves. What is *refused* on submission is
answered and never stored. *Absent* is what a lookup answers about a job that
isn't there: a word of the same vocabulary, but no job is ever in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, StrEnum
from typing import Generic, TypeVar

from penstock.core.errors import IllegalMove

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class Step(Enum):
    """What an event means to a state."""

    MOVE = "move"
    REPEAT = "repeat"
    ILLEGAL = "illegal"


class StateMachine(Generic[S, E]):
    """A named, frozen table of legal moves."""

    def __init__(
        self,
        name: str,
        *,
        states: type[S],
        initial: tuple[E, S],
        moves: Mapping[tuple[S, E], S],
        refused: tuple[E, S] | None = None,
        absent: S | None = None,
    ) -> None:
        self.name = name
        self.absent = absent
        self.states: tuple[S, ...] = tuple(state for state in states if state is not absent)
        self.birth, self.initial = initial
        self.births: Mapping[E, S] = dict([initial, refused] if refused else [initial])
        self._moves = dict(moves)
        left = {state for (state, _), after in moves.items() if after is not state}
        self.final: frozenset[S] = frozenset(self.states) - left
        self._targets: dict[E, frozenset[S]] = {}
        for (_, event), after in self._moves.items():
            self._targets[event] = self._targets.get(event, frozenset()) | {after}
        self._check()

    def _check(self) -> None:
        reached = set(self.births.values()) | set(self._moves.values())
        if stranded := set(self.states) - reached:
            raise ValueError(f"{self.name}: no move leads to {sorted(stranded)}")
        if self.absent in reached | {before for before, _ in self._moves}:
            raise ValueError(f"{self.name}: no job can be {self.absent}, yet a move names it")

    def judge(self, state: S, event: E) -> Step:
        """Say whether `event` moves `state`, repeats it, or may not happen to it."""
        if (state, event) in self._moves:
            return Step.MOVE
        if state in self._targets.get(event, ()):
            return Step.REPEAT
        return Step.ILLEGAL

    def after(self, state: S, event: E) -> S:
        """Return the state that follows; a repeat returns `state` itself."""
        moved = self._moves.get((state, event))
        if moved is not None:
            return moved
        if self.judge(state, event) is Step.REPEAT:
            return state
        raise IllegalMove(self.name, state, event)

    def is_final(self, state: S) -> bool:
        return state in self.final

    def __iter__(self) -> Iterator[tuple[S, E, S]]:
        """Every legal move, in the order in which the table was written."""
        for (before, event), after in self._moves.items():
            yield before, event, after

    def __repr__(self) -> str:
        return f"<StateMachine {self.name}: {len(self.states)} states, {len(self._moves)} moves>"
