"""One decoder layer over a packed row: tokens of many jobs side by side.

Everything but attention sees one long row of tokens. Attention is done job by job, each over its
own cache; what it needs of positions is worked out once for all layers, in `Row`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from penstock.core.llm import LlmCode, LlmFailure
from penstock.workloads.pipes.model.linear import COMPUTE, Linear, linear
from penstock.workloads.pipes.model.rope import interleave, turn
from penstock.workloads.pipes.model.row import Row, Span
from penstock.workloads.pipes.model.shape import Shape

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
        self._shape, self.number = shape, number
        self._rope, self._window = shape.ropes[number], shape.windows[number]
        self._queries = shape.heads // shape.kv_heads
        self._compute = COMPUTE[dtype]
        self._activation = _ACTIVATIONS[shape.activation]
        left = dict(tensors)
        self._qkv = self._joined(
            left, "self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj", dtype
        )
        self._out = self._linear(left, "self_attn.o_proj", dtype)
        self._gate_up = self._joined(left, "mlp", ("gate_proj", "up_proj"), "gate_up_proj", dtype)
        self._down = self._linear(left, "mlp.down_proj", dtype)
        self._before = self._norm(left, "input_layernorm")
        if shape.after_norms:
            self._after = self._norm(left, "post_attention_layernorm")
            self._between = self._norm(left, "pre_feedforward_layernorm")
            self._end = self._norm(left, "post_feedforward_layernorm")
        else:
            self._between = self._norm(left, "post_attention_layernorm")
        if shape.head_norms:
            self._head_norm = self._head_norms(left)
        if left:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                f"layer {number} has tensors that {shape.family} does not know:"
                f" {', '.join(sorted(left))}",
            )
        self.bytes = sum(one.bytes for one in (self._qkv, self._out, self._gate_up, self._down))

    def __call__(self, x: torch.Tensor, row: Row) -> torch.Tensor:
        """What it makes of a row; what it was given may be written over after the first layer."""
        shape, eps = self._shape, self._shape.eps
        hidden = (shape.hidden,)
        attended = self._attend(F.rms_norm(x, hidden, self._before, eps), row)
        if shape.after_norms:
            attended = F.rms_norm(attended, hidden, self._after, eps)
        x = attended.add_(x)
        both = self._gate_up(F.rms_norm(x, hidden, self._between, eps))
        gate, up = both.chunk(2, dim=-1)
        fed = self._down(self._activation(gate).mul_(up))
        if shape.after_norms:
            fed = F.rms_norm(fed, hidden, self._end, eps)
        return fed.add_(x)

    def _attend(self, x: torch.Tensor, row: Row) -> torch.Tensor:
        shape = self._shape
        tokens = len(x)
        both = shape.heads + shape.kv_heads
        heads = self._qkv(x).view(tokens, both + shape.kv_heads, shape.head_dim)
        if shape.head_norms:
            heads[:, :both] = F.rms_norm(heads[:, :both], (shape.head_dim,), None, shape.eps).mul_(
                self._head_norm
            )
        if self._rope is not None:
            turn(heads, both, row.turns(self._rope))
        queries, fresh = heads.split((shape.heads, 2 * shape.kv_heads), 1)
        fresh = fresh.view(tokens, 2, shape.kv_heads, shape.head_dim).permute(1, 2, 0, 3)
        index = self.number - row.first
        if row.single:
            # The queries that share a key are taken for as many tokens: nothing is repeated.
            grouped = queries.view(tokens, 1, shape.kv_heads, self._queries, shape.head_dim)
            parts = list(
                map(self._next, grouped.unbind(0), fresh.split(1, 2), row.spans, [index] * tokens)
            )
        else:
            parts = [
                self._chunk(queries[span.a : span.b], fresh[:, :, span.a : span.b], span, index)
                for span in row.spans
            ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._out(mixed.reshape(tokens, -1))

    def _next(
        self, queries: torch.Tensor, fresh: torch.Tensor, span: Span, index: int
    ) -> torch.Tensor:
        """The attention of a job's next token, [1, kv_heads, queries of each, head_dim]."""
        span.fresh[index].copy_(fresh)
        seen = span.seen(self._window)
        keys, values = seen[2 * index], seen[2 * index + 1]
        if self._shape.softcap is not None:
            return self._softcapped(queries, keys, values, None, self._shape.softcap)
        return F.scaled_dot_product_attention(queries, keys, values, scale=self._shape.scale)

    def _chunk(
        self, queries: torch.Tensor, fresh: torch.Tensor, span: Span, index: int
    ) -> torch.Tensor:
        """The attention of several of a job's tokens, [tokens, heads, head_dim]."""
        span.fresh[index].copy_(fresh)
        seen = span.seen(self._window)
        keys, values = seen[2 * index], seen[2 * index + 1]
        mask, causal = span.mask(self._window, self._compute)
        queries = queries[None].transpose(1, 2)
        if self._shape.softcap is not None:
            if causal:
                mask = torch.full((span.count, span.count), float("-inf")).triu_(1)
            keys, values = (one.repeat_interleave(self._queries, 1) for one in (keys, values))
            mixed = self._softcapped(queries, keys, values, mask, self._shape.softcap)
        else:
            mixed = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=causal,
                scale=self._shape.scale,
                enable_gqa=True,
            )
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
        scores.mul_(self._shape.scale / cap).tanh_().mul_(cap)
        if mask is not None:
            scores.add_(mask)
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values

    # -- loading --------------------------------------------------------------------

    def _joined(
        self,
        left: dict[str, torch.Tensor],
        part: str,
        names: Sequence[str],
        whole: str,
        dtype: str,
    ) -> Linear:
        """Several matrices that are multiplied at once; some families store them joined."""
        shape = self._shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = (
            (queries, keys, keys) if len(names) == 3 else (shape.intermediate, shape.intermediate)
        )

        def tensors(kind: str) -> list[torch.Tensor] | None:
            if f"{part}.{whole}.{kind}" in left:
                return list(left.pop(f"{part}.{whole}.{kind}").split(sizes))
            found = [left.pop(f"{part}.{name}.{kind}", None) for name in names]
            there = [one for one in found if one is not None]
            if there and len(there) != len(names):
                raise self._invalid(f"only some of the {kind}es of {part}")
            return there or None

        weights = tensors("weight")
        if weights is None:
            raise self._invalid(f"no {part}.{whole}")
        for weight, rows in zip(weights, sizes, strict=True):
            if weight.shape != (rows, shape.hidden):
                raise self._invalid(f"{part} weights of shape {tuple(weight.shape)}")
        biases = tensors("bias")
        if len(names) == 3:
            weights, biases = self._turned(weights), biases and self._turned(biases)
        return linear(torch.cat(weights), None if biases is None else torch.cat(biases), dtype)

    def _turned(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._rope is None:
            return rows
        head, dims = self._shape.head_dim, self._rope.dims
        return [*(interleave(one, head, dims) for one in rows[:2]), rows[2]]

    def _linear(self, left: dict[str, torch.Tensor], name: str, dtype: str) -> Linear:
        return linear(self._one_of(left, f"{name}.weight"), left.pop(f"{name}.bias", None), dtype)

    def _norm(self, left: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        weight = self._one_of(left, f"{name}.weight").float() + self._shape.norm_offset
        return weight.to(self._compute)

    def _head_norms(self, left: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of queries and keys at once, [heads + kv_heads, head_dim]."""
        shape = self._shape
        weights = [self._norm(left, f"self_attn.{name}_norm") for name in ("q", "k")]
        if self._rope is not None:
            weights = [interleave(one, shape.head_dim, self._rope.dims) for one in weights]
        return torch.cat(
            (weights[0].expand(shape.heads, -1), weights[1].expand(shape.kv_heads, -1))
        )

    def _one_of(self, left: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        found = left.pop(name, None)
        if found is None:
            raise self._invalid(f"no {name}")
        return found

    def _invalid(self, what: str) -> LlmFailure:
        return LlmFailure(LlmCode.MODEL_INVALID, f"layer {self.number} has {what}")
