"""Many jobs in one computation: who takes part, and what happens when it fails.

If something raises, each job of it is tried alone. Who fails alone ends with that reason, and the
others go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.job import ComputeStep
from penstock.workloads.pipes.job_queues import ForwardStep, JobQueues
from penstock.workloads.pipes.processor import Head, Layers

if TYPE_CHECKING:
    from penstock.workloads.pipes.end_model import EndModel
    from penstock.workloads.pipes.llm_model import LlmModel


class Group(NamedTuple):
    """Passes that go through the same layers together."""

    model: LlmModel
    end: int
    passes: list[ForwardStep]


class Batches:
    def __init__(self, queues: JobQueues, config: LpConfig) -> None:
        self._queues = queues
        self._pass_tokens, self._chunk = config.pass_tokens, config.prefill_chunk_size

    # -- layers ---------------------------------------------------------------------

    def choose(self) -> list[ForwardStep]:
        """Who takes part in the next pass through layers: steps of running answers first, then
        chunks of prompts as far as there is room. At least one of each: none starves."""
        left = self._pass_tokens
        chosen: list[ForwardStep] = []
        for queue in (self._queues.steps, self._queues.chunks):
            is_first = True
            while queue and (is_first or queue[0].job.count <= left):
                one = queue.popleft()
                if one.job.cancelled:
                    self._queues.drop(one)
                    continue
                chosen.append(one)
                is_first = False
                left -= one.job.count
        return chosen

    def compute_layers(self, going: list[ForwardStep]) -> None:
        """All of them, through all layers that they find here one after the other."""
        while going:
            group, going = next_group(going)
            for one in self._through(group):
                sequence = one.job.sequence
                if one.job.current_layer < _layers(one).end:
                    going.append(one)
                elif not self._queues.go_on(one):
                    self._queues.move(one.queue)
                elif isinstance(one.need, Layers) and one.job.sequence == sequence:
                    going.append(one)
                else:  # at the head, or with the next chunk of its prompt: others come first
                    self._queues.enqueue(one)

    def _through(self, group: Group) -> list[ForwardStep]:
        """Who came through."""
        jobs = [one.job for one in group.passes]
        before = [(job.current_layer, job.compute_step, job.data) for job in jobs]
        began = time.perf_counter()
        try:
            group.model.process_jobs(jobs, group.end)
        except Exception as error:
            if len(jobs) == 1:
                self._queues.drop(group.passes[0], error)
                return []
            for job, (layer, step, data) in zip(jobs, before, strict=True):
                job.current_layer, job.compute_step, job.data = layer, step, data
            alone = [group._replace(passes=[one]) for one in group.passes]
            return [came for each in alone for came in self._through(each)]
        ended = time.perf_counter()
        for one in group.passes:
            one.processor.time.computed(began, ended, len(jobs))
        return group.passes

    # -- heads ----------------------------------------------------------------------

    def compute_heads(self) -> None:
        """The next token of every job that is at its head."""
        began = time.perf_counter()
        heads, self._queues.heads = self._queues.heads, []
        chosen = [one for one in self._to_logits(self._wanted(heads)) if self._chose(one)]
        self._embed(chosen)
        took = time.perf_counter() - began
        for one in chosen:
            one.processor.head_seconds = took
            if self._queues.go_on(one):
                self._queues.enqueue(one)
            else:
                self._queues.move(one.queue)

    def _wanted(self, passes: list[ForwardStep]) -> list[ForwardStep]:
        for one in passes:
            if one.job.cancelled:
                self._queues.drop(one)
        return [one for one in passes if not one.job.cancelled]

    def _to_logits(self, heads: list[ForwardStep]) -> list[ForwardStep]:
        """Who has them."""
        if not heads:
            return []
        jobs = [one.job for one in heads]
        before = [(job.compute_step, job.data) for job in jobs]
        try:
            end_model = _end_model(heads[0])
            end_model.compute_norm(jobs)
            end_model.compute_head(jobs)
        except Exception as error:
            if len(jobs) == 1:
                self._queues.drop(heads[0], error)
                return []
            for job, (step, data) in zip(jobs, before, strict=True):
                job.compute_step, job.data = step, data
            return [came for one in heads for came in self._to_logits([one])]
        return heads

    def _chose(self, one: ForwardStep) -> bool:
        """Each by its own sampler."""
        try:
            _end_model(one).choose(one.job)
        except Exception as error:
            self._queues.drop(one, error)
            return False
        return True

    def _embed(self, chosen: Sequence[ForwardStep]) -> None:
        """The new tokens of several jobs in one go: they are past EMBED then."""
        if len(chosen) < 2:
            return
        began = time.perf_counter()
        jobs = [one.job for one in chosen]
        for job in jobs:
            job.begin_pass(self._chunk)
        try:
            _end_model(chosen[0]).compute_embed(jobs)
        except Exception:
            for job in jobs:  # each in its own EMBED then, where it fails alone
                job.compute_step = ComputeStep.EMBED
            return
        for one in chosen:
            one.processor.embedded(began)


def next_group(going: Sequence[ForwardStep]) -> tuple[Group, list[ForwardStep]]:
    """Those that are furthest behind, and the others. They go no further than to where others
    wait for the same layers, so that from there on they go together."""
    first = min(going, key=lambda one: one.job.current_layer)
    model, end = _layers(first)
    layer = first.job.current_layer
    together: list[ForwardStep] = []
    apart: list[ForwardStep] = []
    for one in going:
        need = _layers(one)
        if need.model is not model:
            apart.append(one)
        elif one.job.current_layer == layer:
            together.append(one)
            end = min(end, need.end)
        else:
            apart.append(one)
            end = min(end, one.job.current_layer)
    return Group(model, end, together), apart


def _layers(one: ForwardStep) -> Layers:
    assert isinstance(one.need, Layers)
    return one.need


def _end_model(one: ForwardStep) -> EndModel:
    assert isinstance(one.need, Head)
    return one.need.end_model
