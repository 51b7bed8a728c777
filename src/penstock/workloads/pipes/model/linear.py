"""Linear maps on a CPU, in the layouts and precisions that are fastest there.

They are swapped into a stock layer when it has been loaded; each weight is held once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

COMPUTE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
}
"""What hidden states are, by how weights are held."""
_TOGETHER = 8
"""Tokens for which packed weights are laid out: jobs that are decoded at once."""
_FEW = 3
"""Tokens for which F.linear takes as long as for one, with weights that lie row by row."""
_LARGE = 1 << 22
"""Weights that are fetched from memory for each pass: what counts is to do that once."""
_AS_IT_IS: tuple[str, Sequence[float], str] = ("none", [], "")
"""oneDNN may do more than multiply: not here."""
_PIECE = 256
"""Tokens whose products fit what the allocator keeps: more would be fetched from the system anew
each time, at twice the cost."""


def swapped(module: nn.Module, dtype: str) -> nn.Module:
    """All plain linear maps of a module, in place."""
    for parent in list(module.modules()):
        for name, one in list(parent.named_children()):
            if type(one) is nn.Linear:
                setattr(parent, name, _best(one, dtype))
    return module


def swap_ends(model: Any, dtype: str) -> None:
    """The head and, if it is the same table, the embedding."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    tied = head.weight is embed.weight
    if dtype != "int8":
        model.set_output_embeddings(Rows(head.weight, head.bias))
    elif not tied or type(embed) is nn.Embedding:
        model.set_output_embeddings(Int8(head.weight, head.bias))
        if tied:
            model.set_input_embeddings(Int8Rows(model.get_output_embeddings()))


def held_bytes(*modules: nn.Module) -> int:
    """Of weights, each counted once."""
    found: dict[int, int] = {}
    for module in modules:
        for part in module.modules():
            own = getattr(part, "held_bytes", None)
            if own is not None:
                found[id(part)] = own
        for one in (*module.parameters(), *module.buffers()):
            if (
                not one.is_mkldnn
                and not one.is_meta
                and one.untyped_storage().nbytes() >= one.nbytes
            ):
                found[id(one)] = one.nbytes
    return sum(found.values())


def _best(linear: nn.Linear, dtype: str) -> nn.Module:
    weight = linear.weight
    if dtype == "int8":
        return Int8(weight, linear.bias)
    if weight.dtype is torch.bfloat16 and _packs(weight.dtype):
        return Packed(weight, linear.bias)
    if weight.numel() >= _LARGE:
        return Rows(weight, linear.bias)
    # Column by column: while it fits a cache, as fast for one token and for hundreds, and two to
    # five times as fast for 4 to 16.
    linear.weight = nn.Parameter(weight.t().contiguous().t(), requires_grad=False)
    return linear


def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Rows(nn.Module):
    """Laid out row by row, as a table is and as they are stored: for up to three tokens nothing is
    faster if they are large, and for more oneDNN is nearly as fast as with a layout of its own."""

    def __init__(self, weight: nn.Parameter, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._packs = _packs(weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packs and x.shape[:-1].numel() > _FEW:
            # oneDNN takes half the time here that F.linear does.
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, *_AS_IT_IS)
        return F.linear(x, self.weight, self.bias)


class Packed(nn.Module):
    """Laid out for oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        with torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TOGETHER)
        self.bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self.held_bytes = int(torch.ops.mkldnn._nbytes(self._packed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._multiply(x, self._packed, self.bias, *_AS_IT_IS)
        return made


class Int8(nn.Module):
    """Weights of eight bits, with a scale for each row. What they are multiplied by is brought to
    eight bits token by token, so that no job's numbers depend on those of another."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        # Without instructions for it, two products of eight bits are added in sixteen.
        most = 127 if torch.cpu._is_vnni_supported() else 63
        weight = weight.detach().float()
        self.scales = weight.abs().amax(1).clamp_min_(1e-30).div_(most)
        self.small = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.bias = None if bias is None else bias.float()
        self._turned = self.small.t()
        self._outputs = self.scales / 127
        self.held_bytes = self.small.nbytes + 2 * self.scales.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        pieces = [self._product(piece) for piece in flat.split(_PIECE)]
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return y.reshape(*x.shape[:-1], -1)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(1, keepdim=True).clamp_min_(1e-30)
        small = (x * (127 / largest)).round_().to(torch.int8)
        y = torch.mul(torch._int_mm(small, self._turned), self._outputs).mul_(largest)
        return y if self.bias is None else y.add_(self.bias)


class Int8Rows(nn.Module):
    """The rows of a table of eight bits, to be looked up."""

    def __init__(self, table: Int8) -> None:
        super().__init__()
        self._table = (table,)  # its head's, and counted there

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        (table,) = self._table
        return table.small[ids].float().mul_(table.scales[ids, None].reshape(*ids.shape, 1))
