"""Root mean square norms."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F


class Norm:
    """Over the last dimension. `weight` may have more dimensions, as those of heads do.

    x / sqrt(mean(x²) + eps) is x √n / hypot(|x|, √(n eps)): four kernels, where torch takes eight.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float, dtype: torch.dtype) -> None:
        size = weight.shape[-1]
        self._shape, self._eps = (size,), eps
        weight = weight.float() + offset
        self._exact = dtype is torch.float32
        self._weight = weight * math.sqrt(size) if self._exact else weight.to(dtype)
        self._least = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._exact:
            return torch.div(x, self._length(x)).mul_(self._weight)
        return F.rms_norm(x, self._shape, None, self._eps).mul_(self._weight)

    def within(self, x: torch.Tensor) -> None:
        """In place."""
        if self._exact:
            x.div_(self._length(x)).mul_(self._weight)
        else:
            x.copy_(self(x))

    def _length(self, x: torch.Tensor) -> torch.Tensor:
        return torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._least)
