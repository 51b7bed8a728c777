"""The two ends of a decoder: from tokens to hidden states, and from hidden states to logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.workloads.pipes.model.linear import COMPUTE, Linear, linear, table
from penstock.workloads.pipes.model.norm import Norm
from penstock.workloads.pipes.model.shape import Shape
from penstock.workloads.pipes.model.tensors import Tensors
from penstock.workloads.pipes.weights.fingerprint import fingerprint
from penstock.workloads.pipes.weights.memory import give_back
from penstock.workloads.pipes.weights.source import Source


class EmbeddingAndHead:
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
        self._table = table(embed, dtype)
        self._norm = Norm(norm, shape.eps, shape.norm_offset, self._compute)
        self._head: Linear = self._table if head is None else linear(head, None, dtype)
        self.weight_bytes = self._table.bytes + (0 if head is None else self._head.bytes)

    @classmethod
    def load(cls, source: Source, dtype: str) -> EmbeddingAndHead:
        shape = Shape.of(source.config)
        found = source.ends()
        tensors = Tensors("the end", found)
        embed = tensors.take("embed", -1, shape.hidden)
        norm = tensors.take("norm", shape.hidden)
        head = None if shape.tied else tensors.take("head", len(embed), shape.hidden)
        ends = cls(shape, embed, norm, head, dtype, fingerprint(found))
        del found, tensors, embed, norm, head
        give_back()
        return ends

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, hidden]."""
        found = self._table.rows(torch.tensor(ids, dtype=torch.long))
        # Rounded as transformers does: in bfloat16 it is a visibly different number.
        scale = torch.tensor(self.shape.embed_scale, dtype=self._compute)
        return found if self.shape.embed_scale == 1.0 else found.mul_(scale)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x.to(self._compute))

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, [tokens, vocabulary], in float32."""
        logits = self._head(x.to(self._compute)).float()
        cap = self.shape.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
