"""What a pass is made of: tokens of several jobs in one row, and where each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.workloads.pipes.model.rope import Turns
from penstock.workloads.pipes.model.shape import Rope

Mask = tuple[torch.Tensor | None, bool]
"""What is added to scores, or whether the plain causal mask is meant."""


@dataclass
class Span:
    """One job's part of a row."""

    a: int
    b: int
    """From where to where in the row."""
    start: int
    """Position of its first token."""
    memory: Sequence[torch.Tensor]
    """Keys and values by layer, each [2, kv_heads, capacity, head_dim]."""
    _masks: dict[int | None, Mask] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.b - self.a

    @property
    def end(self) -> int:
        return self.start + self.b - self.a

    def first(self, window: int | None) -> int:
        """The first position that any of its tokens looks at."""
        return 0 if window is None else max(0, self.start - window + 1)

    def mask(self, window: int | None, dtype: torch.dtype) -> Mask:
        """Of its tokens over positions `first` to `end`."""
        found = self._masks.get(window)
        if found is None:
            found = self._masks[window] = self._made(window, dtype)
        return found

    def _made(self, window: int | None, dtype: torch.dtype) -> Mask:
        if self.start == 0 and (window is None or self.count <= window):
            return None, True
        queries = torch.arange(self.start, self.end)[:, None]
        keys = torch.arange(self.first(window), self.end)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")), False


class Row:
    """All of a pass but the hidden states."""

    def __init__(self, first: int, spans: Sequence[Span], tables: dict[Rope, Turns]) -> None:
        self.first = first
        """The layer that the spans' memory begins with."""
        self.spans = spans
        self._tables = tables
        self._turns: dict[Rope, torch.Tensor] = {}

    def turns(self, rope: Rope) -> torch.Tensor:
        """The rotation of each token of the row, [tokens, 1, dims / 2]."""
        found = self._turns.get(rope)
        if found is None:
            table = self._tables[rope].upto(max(span.end for span in self.spans))
            parts = [table[span.start : span.end] for span in self.spans]
            found = self._turns[rope] = (parts[0] if len(parts) == 1 else torch.cat(parts))[:, None]
        return found
