"""The layers that a node holds, and how jobs go through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import ComputeStep, Job
from penstock.workloads.pipes.model.layer import Layer
from penstock.workloads.pipes.model.linear import COMPUTE
from penstock.workloads.pipes.model.packed_batch import PackedBatch, PackedSequence
from penstock.workloads.pipes.model.rope import RotaryTable
from penstock.workloads.pipes.model.shape import Shape
from penstock.workloads.pipes.weights.fingerprint import fingerprint
from penstock.workloads.pipes.weights.memory import give_back

if TYPE_CHECKING:
    from penstock.workloads.pipes.weights.source import Source


class LlmModel:
    """One contiguous segment. Used by one thread."""

    def __init__(
        self,
        shape: Shape,
        layers: LayerRange,
        dtype: str,
        stack: Sequence[Layer],
        fingerprints: Sequence[str],
    ) -> None:
        self.shape, self.layers, self.dtype = shape, layers, dtype
        self.fingerprints = tuple(fingerprints)
        """By layer, of the weights as they are stored."""
        self.weight_bytes = sum(layer.bytes for layer in stack)
        self._stack = tuple(stack)
        self._compute = COMPUTE[dtype]
        self._tables = {rope: RotaryTable(rope) for rope in shape.ropes if rope is not None}

    @classmethod
    def load(
        cls,
        source: Source,
        layers: LayerRange,
        dtype: str,
        told: Callable[[int, int], None] | None = None,
    ) -> LlmModel:
        """Reads the tensors of these layers and no others; `told` hears how many of how many are
        there. Raises LlmFailure: NOT_SUPPORTED, MODEL_INVALID."""
        shape = Shape.of(source.config)
        if not 0 <= layers.start < layers.end <= shape.num_layers:
            raise LlmFailure(
                LlmCode.MODEL_INVALID,
                f"layers {layers} were asked for, and the model has 0-{shape.num_layers - 1}",
            )
        stack, prints = [], []
        for number in range(layers.start, layers.end):
            tensors = source.layer(number)
            prints.append(fingerprint(tensors))
            stack.append(Layer(shape, number, tensors, dtype))
            if told is not None:
                told(len(stack), len(layers))
        del tensors
        give_back()
        return cls(shape, layers, dtype, stack, prints)

    @classmethod
    def joined(cls, parts: Sequence[LlmModel], layers: LayerRange) -> LlmModel:
        """These layers, taken from segments that are held already. Nothing is read or copied."""
        held = {
            layer.number: (layer, mark)
            for part in parts
            for layer, mark in zip(part._stack, part.fingerprints, strict=True)
        }
        found = [held[number] for number in range(layers.start, layers.end)]
        stack, prints = [layer for layer, _ in found], [mark for _, mark in found]
        return cls(parts[0].shape, layers, parts[0].dtype, stack, prints)

    def process_job(self, job: Job) -> None:
        """As far as this segment goes and the job's way wants it."""
        ends = [hop.end for hop in job.hops if hop.start <= job.current_layer < hop.end]
        self.process_jobs([job], min([self.layers.end, *ends]))

    def process_jobs(self, jobs: Sequence[Job], end: int) -> None:
        """Jobs that are all at the same layer, in one pass from there to `end`.

        Each job's tokens lie at positions `start` to `start + count`: what its cache had there
        and after is written over. Raises LlmFailure, before anything is computed, if a cache has
        a gap before `start` or no room.
        """
        with torch.inference_mode():
            self._process(jobs, end)

    def _process(self, jobs: Sequence[Job], end: int) -> None:
        first = jobs[0].current_layer
        spans = self._spans(jobs, first, end)
        row = PackedBatch(self.shape, first, spans, self._tables, self._compute)
        x = self._packed(jobs)
        for job in jobs:
            assert job.cache is not None
            job.cache.cut(first, end, job.start)
        offset = self.layers.start
        for layer in self._stack[first - offset : end - offset]:
            layer(x, row)
        step = ComputeStep.HEAD if end == self.shape.num_layers else ComputeStep.LAYER
        for job, data in zip(jobs, x.split([span.count for span in spans]), strict=True):
            assert job.cache is not None
            job.cache.filled.update(dict.fromkeys(range(first, end), job.start + job.count))
            job.data, job.current_layer, job.compute_step = data, end, step

    def _packed(self, jobs: Sequence[Job]) -> torch.Tensor:
        """A copy: layers write over it."""
        parts = [job.data for job in jobs if job.data is not None]
        if len(parts) == 1:
            return parts[0].to(self._compute, copy=True)
        return torch.cat([part.to(self._compute) for part in parts])

    def _spans(self, jobs: Sequence[Job], first: int, end: int) -> list[PackedSequence]:
        if not self.layers.start <= first < end <= self.layers.end:
            raise LlmFailure(
                LlmCode.ENGINE_ERROR, f"layers {first}-{end - 1} were asked of {self.layers}"
            )
        return [self._span(job, first, end) for job in jobs]

    def _span(self, job: Job, first: int, end: int) -> PackedSequence:
        cache = job.cache
        if cache is None or job.data is None or job.current_layer != first:
            raise LlmFailure(LlmCode.ENGINE_ERROR, f"the job is not ready for layer {first}")
        if tuple(job.data.shape) != (job.count, self.shape.hidden) or not job.count:
            raise LlmFailure(
                LlmCode.WRONG_COMPUTATION,
                f"hidden states of shape {tuple(job.data.shape)} for {job.count} tokens",
            )
        filled = min(cache.filled[layer] for layer in range(first, end))
        if job.start > filled:
            raise LlmFailure(
                LlmCode.ENGINE_ERROR,
                f"a gap: the step begins at {job.start}, and the cache ends at {filled}",
            )
        if job.start + job.count > cache.capacity:
            raise LlmFailure(
                LlmCode.CONTEXT_EXCEEDED,
                f"the job has room for {cache.capacity} tokens, and this one is"
                f" {job.start + job.count}",
            )
        return PackedSequence(job.count, job.start, cache.all(first, end))
