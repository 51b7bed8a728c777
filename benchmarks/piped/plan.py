"""How much is asked of each side."""

from __future__ import annotations

from msgspec import Struct


class Plan(Struct, frozen=True):
    tokens: int = 48
    """Generated, where a rate is measured."""
    prompt: int = 38
    first: tuple[int, ...] = (32, 512)
    """Prompt lengths for the time to the first token."""
    at_once: tuple[int, ...] = (1, 4, 8, 16)
    together: int = 24
    """Tokens of each job, where several are asked at once."""
    turns: int = 3
    """The best of so many."""


PLANS = {
    "tiny": Plan(tokens=4, first=(8,), at_once=(1, 2), together=3, turns=1),
    "quick": Plan(tokens=32, together=16, turns=2),
    "whole": Plan(),
}


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
