"""The two ends of a decoder: from tokens to hidden states, and from hidden states to logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from penstock.workloads.pipes.model.linear import COMPUTE, Linear
from penstock.workloads.pipes.model.shape import Shape
from penstock.workloads.pipes.weights.source import Source


class Ends:
    """Only the origin of a job has it."""

    def __init__(
        self,
        shape: Shape,
        embed: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor | None,
        dtype: str,
        fingerprint: str = "",
    ) -> None:
        self.shape, self.fingerprint = shape, fingerprint
        self._compute = COMPUTE[dtype]
        self._embed = embed.to(self._compute)
        self._norm = (norm.float() + shape.norm_offset).to(self._compute)
        self._head = Linear(self._embed if head is None else head, None, dtype)
        self.weight_bytes = self._head.bytes
        if head is not None:
            self.weight_bytes += self._embed.numel() * self._embed.element_size()

    @classmethod
    def load(cls, source: Source, dtype: str) -> Ends:
        from penstock.workloads.pipes.weights.fingerprint import fingerprint

        shape = Shape.of(source.config)
        tensors = source.ends()
        return cls(
            shape,
            tensors["embed"],
            tensors["norm"],
            None if shape.tied else tensors.get("head"),
            dtype,
            fingerprint(tensors),
        )

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, hidden]."""
        found = F.embedding(torch.tensor(ids, dtype=torch.long), self._embed)
        return found if self.shape.embed_scale == 1.0 else found.mul_(self._scale)

    @property
    def _scale(self) -> torch.Tensor:
        return torch.tensor(self.shape.embed_scale, dtype=self._compute)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self._compute), (self.shape.hidden,), self._norm, self.shape.eps)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, [tokens, vocabulary], in float32."""
        logits = self._head(x.to(self._compute)).float()
        cap = self.shape.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
