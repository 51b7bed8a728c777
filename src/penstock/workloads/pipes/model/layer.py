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
from penstock.workloads.pipes.model.norm import Norm
from penstock.workloads.pipes.model.rope import interleave
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
        self._scale, self._softcap = shape.scale, shape.softcap
        self._shared = shape.heads // shape.kv_heads
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
        self._after = self._end = self._head_norm = None
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

    def __call__(self, x: torch.Tensor, row: Row) -> None:
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

    def _attend(self, x: torch.Tensor, row: Row) -> torch.Tensor:
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

    def _one(self, span: Span, index: int) -> torch.Tensor:
        """One job's attention: [tokens, ..., head_dim]."""
        span.places[index].copy_(span.fresh)
        seen = span.seen(self._window)
        keys, values = seen[2 * index], seen[2 * index + 1]
        if span.count > 1:
            return self._chunk(span, keys, values)
        if self._softcap is not None:
            return self._softcapped(span.queries, keys, values, None, self._softcap)
        return F.scaled_dot_product_attention(span.queries, keys, values, scale=self._scale)

    def _chunk(self, span: Span, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
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

    def _norm(self, left: dict[str, torch.Tensor], name: str) -> Norm:
        return self._normed(self._one_of(left, f"{name}.weight"))

    def _head_norms(self, left: dict[str, torch.Tensor]) -> Norm:
        """Of queries and keys at once."""
        shape = self._shape
        weights = [self._one_of(left, f"self_attn.{name}_norm.weight") for name in ("q", "k")]
        if self._rope is not None:
            weights = [interleave(one, shape.head_dim, self._rope.dims) for one in weights]
        queries, keys = weights
        return self._normed(
            torch.cat((queries.expand(shape.heads, -1), keys.expand(shape.kv_heads, -1)))
        )

    def _normed(self, weight: torch.Tensor) -> Norm:
        return Norm(weight, self._shape.eps, self._shape.norm_offset, self._compute)

    def _one_of(self, left: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        found = left.pop(name, None)
        if found is None:
            raise self._invalid(f"no {name}")
        return found

    def _invalid(self, what: str) -> LlmFailure:
        return LlmFailure(LlmCode.MODEL_INVALID, f"layer {self.number} has {what}")
