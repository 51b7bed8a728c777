"""Root mean square norms."""

from __future__ import annotations

import math

import torch


class Norm:
    """Over the last dimension, in float32. `weight` may have more dimensions, as those of heads do.

    x / sqrt(mean(x²) + eps) is x √n / hypot(|x|, √(n eps)): four kernels, where torch takes eight.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float, dtype: torch.dtype) -> None:
        size = weight.shape[-1]
        self._dtype = dtype
        self._weight = (weight.float() + offset) * math.sqrt(size)
        self._least = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return torch.div(x, self._length(x)).mul_(self._weight).to(self._dtype)

    def within(self, x: torch.Tensor) -> None:
        """In place."""
        if self._dtype is torch.float32:
            x.div_(self._length(x)).mul_(self._weight)
        else:
            x.copy_(self(x))

    def _length(self, x: torch.Tensor) -> torch.Tensor:
        return torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._least)
