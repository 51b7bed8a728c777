"""What a pass is made of: tokens of several jobs in one row, and where each of them stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.workloads.pipes.model.rope import Turns
from penstock.workloads.pipes.model.shape import Rope

Mask = tuple[torch.Tensor | None, bool]
"""What is added to scores, or whether the plain causal mask is meant."""


class Span:
    """One job's part of a row: `count` tokens from `a` on, at positions from `start` on.

    Views of its cache are made here for all layers at once: one by one they would take as long
    as the attention of a single token.
    """

    def __init__(self, a: int, count: int, start: int, memory: torch.Tensor) -> None:
        self.a, self.b, self.count = a, a + count, count
        self.start, self.end = start, start + count
        self.fresh = memory[:, :, :, start : self.end].unbind(0)
        """By layer: where its keys and values go, [2, kv_heads, count, head_dim]."""
        self._memory = memory
        self._seen: dict[int | None, Sequence[torch.Tensor]] = {}
        self._masks: dict[int | None, Mask] = {}

    def seen(self, window: int | None) -> Sequence[torch.Tensor]:
        """All that its tokens look at: keys and values of the first layer, of the second, and so
        on, each [1, kv_heads, positions, head_dim]."""
        found = self._seen.get(window)
        if found is None:
            looked = self._memory[:, :, None, :, self._first(window) : self.end]
            found = self._seen[window] = looked.flatten(0, 1).unbind(0)
        return found

    def mask(self, window: int | None, dtype: torch.dtype) -> Mask:
        """Of its tokens over the positions of `seen`."""
        found = self._masks.get(window)
        if found is None:
            found = self._masks[window] = self._mask(window, dtype)
        return found

    def _first(self, window: int | None) -> int:
        return 0 if window is None else max(0, self.start - window + 1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Mask:
        if self.start == 0 and (window is None or self.count <= window):
            return None, True
        queries = torch.arange(self.start, self.end)[:, None]
        keys = torch.arange(self._first(window), self.end)
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
        self.single = all(span.count == 1 for span in spans)
        """Every job has one token."""
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
