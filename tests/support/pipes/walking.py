"""A job's way through segments, without nodes: for tests of what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import ComputeStep, Job
from penstock.workloads.pipes.llm_model import LlmModel
from penstock.workloads.pipes.model.cache import KvPool
from penstock.workloads.pipes.model.embedding_and_head import EmbeddingAndHead
from penstock.workloads.pipes.model.linear import COMPUTE


class Split:
    """A model in segments, cut at these layers."""

    def __init__(self, source: Any, cuts: Sequence[int] = (), dtype: str = "float32") -> None:
        self.ends = EmbeddingAndHead.load(source, dtype)
        self.shape = self.ends.shape
        bounds = [0, *cuts, self.shape.num_layers]
        self.segments = [
            LlmModel.load(source, LayerRange(a, b), dtype) for a, b in pairwise(bounds)
        ]
        self.pool = KvPool(self.shape, 1 << 28, COMPUTE[dtype])

    def job(self, tokens: int = 128) -> Job:
        cache = self.pool.reserve(range(self.shape.num_layers), tokens)
        return Job(bytes(16), "pipe", "model", "origin", cache=cache)

    def step(self, *parts: tuple[Job, Sequence[int], int]) -> list[torch.Tensor]:
        """One pass of several jobs: tokens, and the position of the first. Logits of each."""
        jobs = [job for job, _, _ in parts]
        for job, ids, start in parts:
            job.start, job.count, job.data = start, len(ids), self.ends.embed(ids)
            job.current_layer, job.compute_step = 0, ComputeStep.LAYER
        for segment in self.segments:
            segment.process_jobs(jobs, segment.layers.end)
        return [self.ends.head(self.ends.norm(job.data)) for job in jobs]

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
