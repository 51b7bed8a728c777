"""Multiplying by weights, in the precisions that a node can hold them in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

Apply = Callable[[torch.Tensor], torch.Tensor]
"""[tokens, in] to [tokens, out]."""
COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}
"""What is computed with, by how weights are held."""


class Linear:
    """One matrix, and its bias if it has one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: str) -> None:
        compute = COMPUTE[dtype]
        self._weight = weight.to(compute).contiguous()
        self._bias = None if bias is None else bias.to(compute)
        self.bytes = self._weight.numel() * self._weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)
