"""Tensors as a file has them: each is taken once, has the shape it must have, and none is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.workloads.llm.values import LlmCode, LlmFailure


class Tensors:
    """`where` names the part of the model in what is refused, as "layer 3"."""

    def __init__(self, where: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._where, self._left = where, dict(tensors)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        found = self.maybe(name, *shape)
        if found is None:
            raise self._invalid(f"no {name}")
        return found

    def maybe(self, name: str, *shape: int) -> torch.Tensor | None:
        """None if it is not there; a length of -1 may be any."""
        found = self._left.pop(name, None)
        if found is None:
            return None
        had = tuple(found.shape)
        if len(had) != len(shape) or any(
            wanted not in (-1, length) for wanted, length in zip(shape, had, strict=True)
        ):
            raise self._invalid(f"{name} of shape {had}, not {shape}")
        return found

    def several(
        self, part: str, names: Sequence[str], whole: str, sizes: Sequence[int], width: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Weights of several matrices, of this many rows each, and their biases if they have any.
        Some families store them joined, as `whole`."""
        weights = self._rows(f"{part}.{whole}.weight", sizes, width) or [
            self.take(f"{part}.{name}.weight", rows, width)
            for name, rows in zip(names, sizes, strict=True)
        ]
        biases = self._rows(f"{part}.{whole}.bias", sizes) or [
            bias
            for name, rows in zip(names, sizes, strict=True)
            if (bias := self.maybe(f"{part}.{name}.bias", rows)) is not None
        ]
        if biases and len(biases) != len(names):
            raise self._invalid(f"biases for some of {', '.join(names)} only")
        return weights, biases or None

    def _rows(self, name: str, sizes: Sequence[int], *rest: int) -> list[torch.Tensor]:
        found = self.maybe(name, sum(sizes), *rest)
        return [] if found is None else list(found.split(tuple(sizes)))

    def done(self, family: str) -> None:
        if self._left:
            names = ", ".join(sorted(self._left))
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                f"{self._where} has what {family} models have not: {names}",
                architecture=family,
            )

    def _invalid(self, what: str) -> LlmFailure:
        return LlmFailure(LlmCode.MODEL_INVALID, f"{self._where} of the model has {what}")
