"""A job's way through segments, without nodes: for tests of what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import ComputeStep, Job
from penstock.workloads.pipes.llm_model import LlmModel
from penstock.workloads.pipes.model.cache import CPU, KvPool
from penstock.workloads.pipes.model.linear import COMPUTE
from penstock.workloads.pipes.model.segment import Segment
from penstock.workloads.pipes.model.trial import try_ends
from penstock.workloads.pipes.weights.source import architecture_of, naming


def ends_of(source: Any, dtype: str = "float32") -> Segment:
    """Embedding, norm and head, loaded."""
    ends = Segment(architecture_of(source), dtype, CPU)
    ends.load_ends(source.ends())
    with torch.inference_mode():
        try_ends(ends)
    return ends


def load_all(source: Any) -> None:
    """Every layer and the ends."""
    architecture = architecture_of(source)
    LlmModel.load(architecture, source, LayerRange(0, architecture.num_layers), "float32")
    with naming(source):
        ends_of(source)


class Split:
    """A model in segments, cut at these layers."""

    def __init__(self, source: Any, cuts: Sequence[int] = (), dtype: str = "float32") -> None:
        self.ends = ends_of(source, dtype)
        self.architecture = self.ends.architecture
        bounds = [0, *cuts, self.architecture.num_layers]
        self.segments = [
            LlmModel.load(self.architecture, source, LayerRange(a, b), dtype)
            for a, b in pairwise(bounds)
        ]
        layouts = {n: one for segment in self.segments for n, one in segment.layouts.items()}
        self.pool = KvPool(layouts, self.architecture.max_positions, 1 << 28, COMPUTE[dtype])

    def job(self, tokens: int = 128) -> Job:
        cache = self.pool.reserve(range(self.architecture.num_layers), tokens)
        return Job(bytes(16), "pipe", "model", "origin", cache=cache)

    def step(self, *parts: tuple[Job, Sequence[int], int]) -> list[torch.Tensor]:
        """One pass of several jobs: tokens, and the position of the first. Logits of each."""
        jobs = [job for job, _, _ in parts]
        for job, ids, start in parts:
            job.start, job.count = start, len(ids)
            job.data = self.embed(ids, start)
            job.current_layer, job.compute_step = 0, ComputeStep.LAYER
        for segment in self.segments:
            segment.process_jobs(jobs, segment.layers.end)
        return [self._logits(job) for job in jobs]

    def embed(self, ids: Sequence[int], start: int = 0) -> torch.Tensor:
        with torch.inference_mode():
            return self.ends.embed(ids, range(start, start + len(ids))).clone()

    def _logits(self, job: Job) -> torch.Tensor:
        assert job.data is not None
        with torch.inference_mode():
            positions = range(job.start, job.start + job.count)
            return self.ends.head(self.ends.norm(job.data, positions))

    def greedy(self, prompt: Sequence[int], count: int, chunk: int = 0) -> list[int]:
        """A job alone, its prompt whole or in chunks."""
        job, ids = self.job(), list(prompt)
        chunk = chunk or len(prompt)
        for start in range(0, len(prompt), chunk):
            logits = self.step((job, prompt[start : start + chunk], start))[0]
        for _ in range(count):
            ids.append(int(logits[-1].argmax()))
            logits = self.step((job, ids[-1:], len(ids) - 1))[0]
        assert job.cache is not None
        job.cache.free()
        return ids[len(prompt) :]
