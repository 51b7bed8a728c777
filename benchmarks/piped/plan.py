"""How much is asked of each side."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace


class Plan(Struct, frozen=True):
    tokens: int = 48
    """Generated, where a rate is measured."""
    prompt: int = 38
    first: tuple[int, ...] = (32, 512)
    """Prompt lengths for the time to the first token."""
    at_once: tuple[int, ...] = (1, 4, 8, 16)
    together: int = 24
    """Tokens of each job, where several are asked at once."""
    answer: int = 96
    """Tokens of each answer over slow links."""
    turns: int = 3
    """The best of so many."""


PLANS = {
    "tiny": Plan(tokens=4, first=(8,), at_once=(1, 2), together=3, answer=8, turns=1),
    "quick": Plan(tokens=32, together=16, turns=2),
    "whole": Plan(),
}
PLANS |= {f"{how} rate": replace(plan, first=(), at_once=()) for how, plan in PLANS.items()}
"""And the rate of one job alone, of models that are too large for the rest."""


_STORY = (
    "The ferry left the harbour at seven, with forty passengers and a crate of oranges for the"
    " lighthouse. Halfway across the bay the engine stopped. The captain, who had seen worse, sent"
    " the youngest sailor down with a lantern and a wrench. Twenty minutes later the ferry moved"
    " again, slowly, and the passengers shared the oranges."
)
_CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance
"""
TEXTS = {
    "quoting": (
        f"Text:\n{_STORY}\n\nThe same text again, word for word:\n",
        f"```python\n{_CODE}```\n\nThe same class with a method withdraw:\n\n```python\n",
    ),
    "new": (
        "A short story about a clockmaker who finds a door behind the largest clock:\n\n",
        "Dear Anna, thank you for your letter. You ask what I remember of that summer:",
    ),
}
"""By whether the answer repeats what is in the prompt."""


class Spans:
    """Answers of one token and of all of them; what a token takes is what lies between the best
    of each: a slow first one does not make the rest look quick."""

    def __init__(self) -> None:
        self._firsts: list[tuple[float, float]] = []
        self._wholes: list[tuple[float, float]] = []

    def add(self, first: tuple[float, float], whole: tuple[float, float]) -> None:
        """Wall and processor seconds."""
        self._firsts.append(first)
        self._wholes.append(whole)

    def figures(self, tokens: int) -> dict[str, float]:
        wall, cpu = (
            (min(one[n] for one in self._wholes) - min(one[n] for one in self._firsts))
            / (tokens - 1)
            for n in (0, 1)
        )
        return {"rate": 1 / max(wall, 1e-9), "cpu_ms": cpu * 1000}
