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
