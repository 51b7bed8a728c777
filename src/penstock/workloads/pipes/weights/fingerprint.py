"""What a layer's numbers are, in 32 characters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

_CHUNK = 1 << 20


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, shapes and values. The values count as float32, so that stores of the same
    numbers in bfloat16 and in float32 have the same one; a layout in memory has no say."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"{name} {list(tensor.shape)} ".encode())
        whole.update(_digest(tensor))
    return whole.hexdigest()[:32]


def _digest(tensor: torch.Tensor) -> bytes:
    """In pieces, as a float32 copy of a large tensor may not fit beside it."""
    digest = hashlib.sha256()
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK].to(torch.float32).contiguous()
        digest.update(memoryview(piece.numpy()))
    return digest.digest()
