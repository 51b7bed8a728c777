"""What only an origin has of a model: text and tokens on one side, logits on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.job import ComputeStep, Job

if TYPE_CHECKING:
    from penstock.workloads.pipes.model.segment import Segment


class EndModel:
    """Used by one thread. Whatever takes several jobs computes them in one go."""

    def __init__(self, ends: Segment, tokenize: Callable[[str], Sequence[int]]) -> None:
        self.ends = ends
        self._tokenize = tokenize

    def tokenize(self, job: Job) -> None:
        """Of a prompt that is text still. Raises LlmFailure INVALID_PROMPT if nothing is left."""
        text = job.text
        assert text is not None
        if not text.input_ids and text.prompt is not None:
            text.input_ids = list(self._tokenize(text.prompt))
            text.prompt_tokens = len(text.input_ids)
        if not text.input_ids:
            raise LlmFailure(LlmCode.INVALID_PROMPT, "the prompt is empty")
        job.compute_step = ComputeStep.EMBED

    def compute_embed(self, jobs: Sequence[Job]) -> None:
        """The tokens of each job's pass become its hidden states."""
        ids: list[int] = []
        positions: list[int] = []
        for job in jobs:
            assert job.text is not None
            ids += job.text.input_ids[job.start : job.start + job.count] + job.text.proposed
            positions += range(job.start, job.start + job.count)
        with torch.inference_mode():
            row = self.ends.embed(ids, positions)
        at = 0
        for job in jobs:
            job.data = row if len(jobs) == 1 else row[at : at + job.count]
            job.compute_step, job.current_layer = ComputeStep.LAYER, 0
            at += job.count

    def compute_norm(self, jobs: Sequence[Job]) -> None:
        """The final norm of each job's last positions: nothing else is needed of it."""
        last = [job.data[-job.returns :] for job in jobs if job.data is not None]
        positions: list[int] = []
        for job in jobs:
            end = job.start + job.count
            positions += range(end - job.returns, end)
        with torch.inference_mode():
            rows = self.ends.norm(last[0] if len(last) == 1 else torch.cat(last), positions)
        for job, row in zip(jobs, rows.split([job.returns for job in jobs]), strict=True):
            job.data = row
            job.compute_step = ComputeStep.HEAD

    def compute_head(self, jobs: Sequence[Job]) -> None:
        """The logits of each job's last positions."""
        last = [job.data for job in jobs if job.data is not None]
        with torch.inference_mode():
            rows = self.ends.head(last[0] if len(last) == 1 else torch.cat(last))
        for job, row in zip(jobs, rows.split([len(one) for one in last]), strict=True):
            job.logits = row

    def choose(self, job: Job) -> None:
        """The next token and, as long as it is the one that was proposed, the one after it. Its
        job has something to embed then."""
        text, logits = job.text, job.logits
        assert text is not None
        assert text.sampler is not None
        assert logits is not None
        if text.on_state is not None and job.data is not None:
            text.on_state(job.data[-1])
        text.chosen = []
        for row, proposed in zip(logits, [*text.proposed, None], strict=True):
            chosen = text.sampler.choose(row, text.input_ids)
            text.chosen.append(chosen)
            text.input_ids.append(chosen.token)
            if chosen.token != proposed:
                break
        if text.speculation is not None:
            text.speculation.compare([one.token for one in text.chosen])
        job.data = job.logits = None
        job.compute_step = ComputeStep.EMBED
