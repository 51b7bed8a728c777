"""One decoder layer over a packed row: tokens of many jobs side by side.

Everything but attention sees one long row of tokens. Attention is done job by job, each over its
own cache; what it needs of positions is worked out once for all layers, in `PackedBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional as F

from penstock.workloads.pipes.model.linear import COMPUTE, Linear, linear
from penstock.workloads.pipes.model.norm import Norm
from penstock.workloads.pipes.model.packed_batch import PackedBatch, PackedSequence
from penstock.workloads.pipes.model.rope import interleave
from penstock.workloads.pipes.model.shape import Shape
from penstock.workloads.pipes.model.tensors import Tensors

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Layer:
    """Takes a layer's tensors, by their names in transformers."""

    def __init__(
        self, shape: Shape, number: int, tensors: Mapping[str, torch.Tensor], dtype: str
    ) -> None:
        self.number = number
        self._rope, self._window = shape.ropes[number], shape.windows[number]
        self._scale, self._softcap = shape.scale, shape.softcap
        self._shared = shape.heads // shape.kv_heads
        self._activation = _ACTIVATIONS[shape.activation]
        parts = _Parts(shape, number, tensors, dtype)
        self._qkv, self._out = parts.qkv(), parts.linear("self_attn.o_proj", parts.queries)
        self._gate_up, self._down = parts.gate_up(), parts.linear("mlp.down_proj", parts.fed)
        self._before = parts.norm("input_layernorm")
        self._after = self._end = self._head_norm = None
        if shape.after_norms:
            self._after = parts.norm("post_attention_layernorm")
            self._between = parts.norm("pre_feedforward_layernorm")
            self._end = parts.norm("post_feedforward_layernorm")
        else:
            self._between = parts.norm("post_attention_layernorm")
        if shape.head_norms:
            self._head_norm = parts.head_norm()
        parts.done()
        self.bytes = sum(one.bytes for one in (self._qkv, self._out, self._gate_up, self._down))

    def __call__(self, x: torch.Tensor, row: PackedBatch) -> None:
        """What it makes of a row, in place."""
        mixed = self._attend(self._before(x), row)
        if self._after is None:
            self._out.onto(mixed, x)
        else:
            x.add_(self._after(self._out(mixed)))
        gate, up = self._gate_up(self._between(x)).chunk(2, dim=-1)
        fed = self._activation(gate).mul_(up)
        if self._end is None:
            self._down.onto(fed, x)
        else:
            x.add_(self._end(self._down(fed)))

    def _attend(self, x: torch.Tensor, row: PackedBatch) -> torch.Tensor:
        """[tokens, heads * head_dim]."""
        self._qkv.into(x, row.qkv)
        if self._head_norm is not None:
            self._head_norm.within(row.normed)
        if self._rope is not None:
            row.turn(self._rope)
        index = self.number - row.first
        parts = [self._one(span, index) for span in row.spans]
        if len(parts) > 1:
            parts = [torch.cat(parts if row.single else [part.flatten(1) for part in parts])]
        return parts[0].reshape(row.tokens, -1)

    def _one(self, span: PackedSequence, index: int) -> torch.Tensor:
        """One job's attention: [tokens, ..., head_dim]."""
        span.places[index].copy_(span.fresh)
        seen = span.seen(self._window)
        keys, values = seen[2 * index], seen[2 * index + 1]
        if span.count > 1:
            return self._chunk(span, keys, values)
        if self._softcap is not None:
            return self._softcapped(span.queries, keys, values, None, self._softcap)
        return F.scaled_dot_product_attention(span.queries, keys, values, scale=self._scale)

    def _chunk(
        self, span: PackedSequence, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        mask, causal = span.mask(self._window, keys.dtype)
        if self._softcap is None:
            mixed = F.scaled_dot_product_attention(
                span.queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=causal,
                scale=self._scale,
                enable_gqa=True,
            )
        else:
            if causal:
                mask = torch.full((span.count, span.count), float("-inf")).triu_(1)
            keys, values = (one.repeat_interleave(self._shared, 1) for one in (keys, values))
            mixed = self._softcapped(span.queries, keys, values, mask, self._softcap)
        return mixed[0].transpose(0, 1)

    def _softcapped(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        cap: float,
    ) -> torch.Tensor:
        scores = queries @ keys.transpose(-1, -2)
        scores.mul_(self._scale / cap).tanh_().mul_(cap)
        if mask is not None:
            scores.add_(mask)
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


class _Parts:
    """What a layer is made of, from its tensors."""

    def __init__(
        self, shape: Shape, number: int, tensors: Mapping[str, torch.Tensor], dtype: str
    ) -> None:
        self._shape, self._dtype = shape, dtype
        self._tensors = Tensors(f"layer {number}", tensors)
        rope = shape.ropes[number]
        self._turned = 0 if rope is None else rope.dims
        self.queries, self.fed = shape.heads * shape.head_dim, shape.intermediate

    def qkv(self) -> Linear:
        keys = self._shape.kv_heads * self._shape.head_dim
        names, sizes = ("q_proj", "k_proj", "v_proj"), (self.queries, keys, keys)
        weights, biases = self._tensors.several(
            "self_attn", names, "qkv_proj", sizes, self._shape.hidden
        )
        return self._joined(self._ordered(weights), biases and self._ordered(biases))

    def gate_up(self) -> Linear:
        names, sizes = ("gate_proj", "up_proj"), (self.fed, self.fed)
        return self._joined(
            *self._tensors.several("mlp", names, "gate_up_proj", sizes, self._shape.hidden)
        )

    def linear(self, name: str, width: int) -> Linear:
        hidden = self._shape.hidden
        weight = self._tensors.take(f"{name}.weight", hidden, width)
        return linear(weight, self._tensors.maybe(f"{name}.bias", hidden), self._dtype)

    def norm(self, name: str) -> Norm:
        return self._norm(self._tensors.take(f"{name}.weight", self._shape.hidden))

    def head_norm(self) -> Norm:
        """Of queries and keys at once."""
        shape = self._shape
        queries, keys = (
            self._order(self._tensors.take(f"self_attn.{name}_norm.weight", shape.head_dim))
            for name in ("q", "k")
        )
        return self._norm(
            torch.cat((queries.expand(shape.heads, -1), keys.expand(shape.kv_heads, -1)))
        )

    def done(self) -> None:
        self._tensors.done(self._shape.family)

    def _joined(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None) -> Linear:
        return linear(torch.cat(weights), biases and torch.cat(biases), self._dtype)

    def _ordered(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        queries, keys, values = rows
        return [self._order(queries), self._order(keys), values]

    def _order(self, rows: torch.Tensor) -> torch.Tensor:
        return interleave(rows, self._shape.head_dim, self._turned)

    def _norm(self, weight: torch.Tensor) -> Norm:
        shape = self._shape
        return Norm(weight, shape.eps, shape.norm_offset, COMPUTE[self._dtype])
