"""Multiplying by weights, in the precisions that a node can hold them in. Each is held once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional as F

COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}
"""What hidden states are, by how weights are held."""
_TOGETHER = 8
"""Tokens for which packed weights are laid out: jobs that are decoded at once."""

_FEW = 3
_AS_IT_IS: tuple[str, Sequence[float], str] = ("none", [], "")
"""oneDNN may do more than multiply: not here."""
_PIECE = 256
"""Tokens whose products fit what the allocator keeps: more would be fetched from the system anew
each time, at twice the cost."""


class Linear(Protocol):
    """[tokens, in] to [tokens, out], in the precision of what comes in. A token's numbers do not
    depend on those of others, whatever they are, but for the order of additions."""

    bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Written there."""
        ...

    def onto(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """Added there."""
        ...


class Table(Linear, Protocol):
    """A matrix whose rows can be looked up too."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor: ...


def linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: str) -> Linear:
    """For [out, in]; the weight may be given back to the system afterwards."""
    if dtype == "int8":
        return Int8(weight, bias)
    weight = weight.to(COMPUTE[dtype])
    return Packed(weight, bias) if _better_packed(weight) else Columns(weight, bias)


def table(weight: torch.Tensor, dtype: str) -> Table:
    return Int8(weight, None) if dtype == "int8" else Rows(weight.to(COMPUTE[dtype]))


def _better_packed(weight: torch.Tensor) -> bool:
    """Whether 4 to 16 tokens gain much more than a single one loses. In float32 that was measured
    for large and wide matrices (a third less time, against a tenth more); in bfloat16 all gain."""
    if not _packs(weight.dtype):
        return False
    rows, columns = tuple(weight.shape)
    large = rows * columns >= 1 << 22 and 2 * rows >= 3 * columns
    return large or weight.dtype is torch.bfloat16


def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Columns:
    """Laid out column by column, which is fastest for one token and for many."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.t().contiguous()
        self._bias = None if bias is None else bias.to(weight.dtype)
        self.bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight.t(), self._bias)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._bias is None:
            torch.mm(x, self._weight, out=out)
        else:
            torch.addmm(self._bias, x, self._weight, out=out)

    def onto(self, x: torch.Tensor, total: torch.Tensor) -> None:
        total.addmm_(x, self._weight)
        if self._bias is not None:
            total.add_(self._bias)


class _Whole:
    """What only makes new tensors."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self(x))

    def onto(self, x: torch.Tensor, total: torch.Tensor) -> None:
        total.add_(self(x))


class Rows(_Whole):
    """Laid out row by row, so that rows can be looked up."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.contiguous()
        self._packs = _packs(weight.dtype)
        self.bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packs and len(x) > _FEW:
            # oneDNN takes half the time here that F.linear does.
            return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, None, *_AS_IT_IS)
        return F.linear(x, self._weight)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._weight)


class Packed(_Whole):
    """Laid out for oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TOGETHER)
        self._bias = None if bias is None else bias.to(weight.dtype)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self.bytes = int(torch.ops.mkldnn._nbytes(self._weight))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self._weight, self._bias, *_AS_IT_IS)


class Int8(_Whole):
    """Weights of eight bits, with a scale for each row. What they are multiplied by is brought to
    eight bits token by token, so that no job's numbers depend on those of another."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        # Without instructions for it, two products of eight bits are added in sixteen.
        most = 127 if torch.cpu._is_vnni_supported() else 63
        weight = weight.float()
        self._scales = weight.abs().amax(1).clamp_min_(1e-30).div_(most)
        self._weight = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._bias = None if bias is None else bias.float()
        self._turned = self._weight.t()
        self._outputs = self._scales / 127
        self.bytes = self._weight.nbytes + 2 * self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > _PIECE:
            return torch.cat([self(piece) for piece in x.split(_PIECE)])
        largest = x.abs().amax(1, keepdim=True).clamp_min_(1e-30)
        small = (x * (127 / largest)).round_().to(torch.int8)
        y = torch.mul(torch._int_mm(small, self._turned), self._outputs).mul_(largest)
        return y if self._bias is None else y.add_(self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._weight[ids].float().mul_(self._scales[ids, None])
