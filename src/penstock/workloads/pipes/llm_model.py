"""The layers that a node holds, and how jobs go through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import ComputeStep, Job
from penstock.workloads.pipes.model.architecture import Architecture
from penstock.workloads.pipes.model.cache import CPU, Layout
from penstock.workloads.pipes.model.linear import held_bytes
from penstock.workloads.pipes.model.segment import Part, Segment
from penstock.workloads.pipes.model.trial import tried
from penstock.workloads.pipes.weights.memory import give_back
from penstock.workloads.pipes.weights.source import Source, fingerprint, naming


class LlmModel:
    """One contiguous segment. Used by one thread."""

    def __init__(
        self,
        segment: Segment,
        modules: Mapping[int, nn.Module],
        layouts: Mapping[int, Layout],
        fingerprints: Mapping[int, str],
    ) -> None:
        self.segment = segment
        self.layers = LayerRange(min(modules), max(modules) + 1)
        self.layouts = layouts
        """By layer: what it keeps of a token."""
        self.fingerprints = tuple(fingerprints[n] for n in sorted(modules))
        """By layer, of the weights as they are stored."""
        self._modules = modules
        self.weight_bytes = held_bytes(*modules.values())

    @classmethod
    def load(
        cls,
        architecture: Architecture,
        source: Source,
        layers: LayerRange,
        dtype: str,
        device: torch.device = CPU,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> LlmModel:
        """Reads the tensors of these layers and no others, one layer after the other, and tries
        them; `on_progress` hears how many of how many are there. Raises LlmFailure: NOT_SUPPORTED,
        MODEL_INVALID."""
        if not 0 <= layers.start < layers.end <= architecture.num_layers:
            raise LlmFailure(
                LlmCode.MODEL_INVALID,
                f"layers {layers} were asked for, and the model has"
                f" 0-{architecture.num_layers - 1}",
            )
        segment = Segment(architecture, dtype, device)
        segment.without_ends()
        modules: dict[int, nn.Module] = {}
        prints: dict[int, str] = {}
        for number in range(layers.start, layers.end):
            with naming(source):
                tensors = source.layer(number)
                prints[number] = fingerprint(tensors)
                modules[number] = segment.load_layer(number, tensors)
            del tensors
            give_back()  # what the layer was made of
            if on_progress is not None:
                on_progress(len(modules), len(layers))
        with naming(source), torch.inference_mode():
            layouts = tried(segment, modules)
        return cls(segment, modules, layouts, prints)

    @classmethod
    def joined(cls, parts: Sequence[LlmModel], layers: LayerRange) -> LlmModel:
        """These layers, taken from segments that are held already. Nothing is read or copied."""
        modules: dict[int, nn.Module] = {}
        layouts: dict[int, Layout] = {}
        prints: dict[int, str] = {}
        for part in parts:
            for number, mark in enumerate(part.fingerprints, part.layers.start):
                if number in layers:
                    modules[number], prints[number] = part._modules[number], mark
                    layouts[number] = part.layouts[number]
        segment = parts[0].segment
        for part in parts[1:]:
            segment = segment.joined(part.segment)
        return cls(segment, modules, layouts, prints)

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
        if not self.layers.start <= first < end <= self.layers.end:
            raise LlmFailure(
                LlmCode.ENGINE_ERROR, f"layers {first}-{end - 1} were asked of {self.layers}"
            )
        parts = [self._part(job, first, end) for job in jobs]
        for part in parts:
            part.cache.cut(first, end, part.start)
        rows = [job.data for job in jobs if job.data is not None]
        states = (
            rows[0] if len(rows) == 1 else torch.cat([one.to(self.segment.compute) for one in rows])
        )
        made = self.segment.run(self._modules, parts, states, first, end).to(CPU)
        last = end == self.segment.architecture.num_layers
        step = ComputeStep.HEAD if last else ComputeStep.LAYER
        for job, part, data in zip(
            jobs, parts, made.split([part.count for part in parts]), strict=True
        ):
            part.cache.filled.update(dict.fromkeys(range(first, end), part.end))
            job.data, job.current_layer, job.compute_step = data, end, step

    def _part(self, job: Job, first: int, end: int) -> Part:
        cache, hidden = job.cache, self.segment.architecture.hidden
        if cache is None or job.data is None or job.current_layer != first:
            raise LlmFailure(LlmCode.ENGINE_ERROR, f"the job is not ready for layer {first}")
        if tuple(job.data.shape) != (job.count, hidden) or not job.count:
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
        return Part(cache, job.start, job.count)
