"""What a pass is made of: tokens of several jobs in one row, and where each of them stands.

Queries, keys and values of every layer are written to the same place, so that views of it, and of
the caches, are made once for a pass. Layer by layer they would take as long as the attention of
single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.workloads.pipes.model.positions import Rope
from penstock.workloads.pipes.model.rope import RotaryTable
from penstock.workloads.pipes.model.shape import Shape

Mask = tuple[torch.Tensor | None, bool]
"""What is added to scores, or whether the plain causal mask is meant."""


class PackedSequence:
    """One job's part of a row: `count` tokens at positions from `start` on."""

    def __init__(self, count: int, start: int, memory: torch.Tensor) -> None:
        self.count, self.start, self.end = count, start, start + count
        self.places = memory[:, :, :, start : self.end].unbind(0)
        """By layer: where its keys and values go, [2, kv_heads, count, head_dim]."""
        self.queries: torch.Tensor
        """[1, kv_heads, queries of each, head_dim] of a single token: those that share a key are
        taken for as many tokens, so that nothing is repeated. Else [1, heads, count, head_dim]."""
        self.fresh: torch.Tensor
        """Its keys and values, as its places have them."""
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


class PackedBatch:
    """All of a pass but the hidden states. `first` is the layer that the spans' memory begins
    with."""

    def __init__(
        self,
        shape: Shape,
        first: int,
        spans: Sequence[PackedSequence],
        tables: dict[Rope, RotaryTable],
        dtype: torch.dtype,
    ) -> None:
        self.first, self.spans = first, spans
        tokens = sum(span.count for span in spans)
        self.tokens = tokens
        self.single = tokens == len(spans)
        """Every job has one token."""
        self._both = shape.heads + shape.kv_heads
        heads = self._both + shape.kv_heads
        self.qkv = torch.empty(tokens, heads * shape.head_dim, dtype=dtype)
        """Where a layer puts its queries, keys and values, and they side by side:"""
        self._heads = self.qkv.view(tokens, heads, shape.head_dim)
        self.normed = self._heads[:, : self._both]
        """The heads of queries and keys."""
        self._tables = tables
        self._turned: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        at = 0
        for span in spans:
            part = self._heads[at : at + span.count]
            self._share(part, span, shape)
            at += span.count

    @staticmethod
    def _share(part: torch.Tensor, span: PackedSequence, shape: Shape) -> None:
        queries, fresh = part[:, : shape.heads], part[:, shape.heads :]
        span.fresh = fresh.unflatten(1, (2, shape.kv_heads)).permute(1, 2, 0, 3)
        if span.count == 1:
            span.queries = queries.view(1, shape.kv_heads, -1, shape.head_dim)
        else:
            span.queries = queries[None].transpose(1, 2)

    def turn(self, rope: Rope) -> None:
        """Rotate queries and keys, where they are."""
        found = self._turned.get(rope)
        if found is None:
            found = self._turned[rope] = self._part(rope), self._turns(rope)
        part, turns = found
        if part.dtype is torch.complex64:
            part.mul_(turns)
        else:
            whole = part.float()
            whole.view(torch.complex64).mul_(turns)
            part.copy_(whole)

    def _part(self, rope: Rope) -> torch.Tensor:
        if self.qkv.dtype is torch.float32:
            return self._heads.view(torch.complex64)[:, : self._both, : rope.dims // 2]
        return self._heads[:, : self._both, : rope.dims]

    def _turns(self, rope: Rope) -> torch.Tensor:
        """The rotation of each token, [tokens, 1, dims / 2]."""
        table = self._tables[rope].upto(max(span.end for span in self.spans))
        parts = [table[span.start : span.end] for span in self.spans]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:, None]
