"""The thread that computes: everything that this node does to jobs, many of them at once.

It goes round: take all that arrived; choose the next token of every job that is at its head; then
one pass through layers for all jobs that wait for it, steps of running answers first, and chunks
of prompts as far as `pass_tokens` allows (one chunk at least, so that none starves). What leaves
is collected by destination and handed out before and after that pass. Jobs that have nothing to
compute cost nothing: with none left it blocks on a condition.

Of one job the passes go one after the other, in the order in which they came.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.core.llm import LlmCode, LlmFailure
from penstock.lifecycles.processor import ERRORS, ProcessorEvent, ProcessorState
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.job import ComputeStep, Job, JobContext, JobTime
from penstock.workloads.pipes.network_job import NetworkJob
from penstock.workloads.pipes.processor import Head, JobProcessor, Layers, Need
from penstock.workloads.pipes.timing import NodeTiming

if TYPE_CHECKING:
    from penstock.workloads.pipes.end_model import EndModel
    from penstock.workloads.pipes.llm_model import LlmModel

log = logging.getLogger(__name__)

Begin = Callable[[], JobProcessor | None]
"""Makes a job ready for a pass; None if there is none to make. Raises LlmFailure."""


class Node(Protocol):
    """Who is told. Called by the thread that computes: quick, and never blocking."""

    def send(self, node_id: str, jobs: Sequence[NetworkJob]) -> None:
        """All that goes to one node now."""

    def landed(self, origin: str, job_id: bytes, sequence: int, times: Sequence[JobTime]) -> None:
        """A pass that returns nothing has been through all layers; its origin is another node."""

    def done(self, job: Job, event: ProcessorEvent, reason: str) -> None:
        """A pass came to DONE."""

    def failed(self, job_id: bytes, origin: str, sequence: int, failure: LlmFailure) -> None:
        """A job can't go on here."""


class _Lane:
    """The passes of one job: one under way, and others behind it."""

    __slots__ = ("active", "behind", "job")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.active: _Pass | None = None
        self.behind: deque[Begin] = deque()


class _Pass:
    """One that stopped where something is to be computed."""

    __slots__ = ("job", "lane", "need", "processor", "steps")

    def __init__(self, processor: JobProcessor, lane: _Lane) -> None:
        self.processor, self.lane, self.job = processor, lane, lane.job
        self.steps: Generator[Need, None, None] = processor.steps()
        self.need: Need


class Compute:
    """`submit`, `begin`, `landed`, `start` and `stop` are for any thread; all else is for its own.
    It is the Outbox of the node's pipes."""

    def __init__(self, node: Node, config: LpConfig, threads: int = 0) -> None:
        self._node, self._threads = node, threads
        self._pass_tokens, self._chunk = config.pass_tokens, config.prefill_chunk_size
        self.timing = NodeTiming()
        self.busy_since: float | None = None
        """Since when (`time.monotonic`) it has been at the round that it is at."""
        self._inbox: list[Callable[[], None]] = []
        self._news = threading.Condition()
        self._stopping = self._has_ended = False
        self._thread = threading.Thread(target=self._go, name="penstock-compute", daemon=True)
        self._lanes: dict[bytes, _Lane] = {}
        self._heads: list[_Pass] = []
        self._steps: deque[_Pass] = deque()
        self._chunks: deque[_Pass] = deque()
        self._out: dict[str, list[NetworkJob]] = {}

    # -- for any thread -------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """After the pass under way; whether it has ended."""
        with self._news:
            self._stopping = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, act: Callable[[], None]) -> None:
        """Have something done between two passes, in the order of the calls. After the thread's
        end it is done at once, by the caller."""
        with self._news:
            if not self._has_ended:
                self._inbox.append(act)
                self._news.notify()
                return
        self._safely(act)

    def begin(self, context: JobContext) -> None:
        """The first pass of a new job, on its origin."""
        self.submit(partial(self._begin, context, time.perf_counter()))

    def landed(self, context: JobContext, sequence: int, times: Sequence[JobTime]) -> None:
        """Another node said so of one of our jobs: there is room for its next chunk."""
        self.submit(partial(self._landed, context, sequence, times, time.perf_counter()))

    # -- the outbox of pipes --------------------------------------------------------

    def put(self, node_id: str, job: NetworkJob) -> None:
        self._out.setdefault(node_id, []).append(job)

    def land(self, job: Job) -> None:
        self._node.landed(job.origin_node_id, job.job_id, job.sequence, tuple(job.times))

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, {}
            for node_id, jobs in out.items():
                self._safely(self._node.send, node_id, jobs)

    # -- the loop -------------------------------------------------------------------

    def _go(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while (inbox := self._wait()) is not None:
                self.busy_since = time.monotonic()
                self.round(inbox)
                self.busy_since = None
        with self._news:
            self._has_ended = True
            inbox, self._inbox = self._inbox, []
        for act in inbox:
            self._safely(act)

    def _wait(self) -> list[Callable[[], None]] | None:
        """What arrived, as soon as there is anything to do; None when it is to end."""
        with self._news:
            while not (self._inbox or self._stopping or self._has_work):
                self._news.wait()
            if self._stopping:
                return None
            inbox, self._inbox = self._inbox, []
        return inbox

    @property
    def _has_work(self) -> bool:
        return bool(self._heads or self._steps or self._chunks)

    def round(self, inbox: Sequence[Callable[[], None]] = ()) -> None:
        """What the thread does again and again."""
        began = time.perf_counter()
        for act in inbox:
            self._safely(act)
        if self._heads:
            heads, self._heads = self._heads, []
            self._compute_heads(heads)
        self._flush()
        chosen = self._choose()
        if chosen:
            self._compute_layers(chosen)
            self._flush()
        tokens = sum(one.job.count for one in chosen)
        self.timing.add(tokens, time.perf_counter() - began, time.monotonic())

    def _safely(self, act: Callable[..., None], *args: object) -> None:
        """Nothing may end this thread."""
        try:
            act(*args)
        except Exception:
            log.exception("something went wrong beside the computation")

    # -- passes ---------------------------------------------------------------------

    def enter(self, job: Job, begin: Begin) -> None:
        """A pass of this job, behind those that came before."""
        lane = self._lanes.get(job.job_id)
        if lane is None:
            lane = self._lanes[job.job_id] = _Lane(job)
        lane.behind.append(begin)
        self._move(lane)

    def fail(self, job: Job, error: Exception) -> None:
        """It can't go on here: its origin is told, and what else comes for it is refused."""
        failure = _failure(error)
        job.cancelled = job.cancelled or failure.message
        self.tell_failure(job.job_id, job.origin_node_id, job.sequence, failure)

    def tell_failure(self, job_id: bytes, origin: str, sequence: int, failure: LlmFailure) -> None:
        self._safely(self._node.failed, job_id, origin, sequence, failure)

    def _begin(self, context: JobContext, since: float) -> None:
        assert context.job is not None
        processor = JobProcessor(context)
        processor.time.ready = since
        self.enter(context.job, lambda: processor)

    def _landed(
        self, context: JobContext, sequence: int, times: Sequence[JobTime], now: float
    ) -> None:
        job = context.job
        if job is None or job.text is None or job.cancelled:
            return
        flight = job.text.land(sequence)
        if flight is not None:
            away = flight.away + now - flight.left
            job.text.timing.passed(times, away, job.origin_node_id, flight.count)
            job.last_update = time.monotonic()
            self.enter(job, partial(self._next_chunk, context))

    def _next_chunk(self, context: JobContext) -> JobProcessor | None:
        """A pass for one more chunk of a prompt, if there is one and room for it on the way."""
        job, pipe = context.job, context.pipe
        if job is None or job.text is None or pipe is None or job.cancelled:
            return None
        if not job.text.chunking.has_more or len(job.text.under_way) >= pipe.window:
            return None
        job.compute_step = ComputeStep.EMBED
        return JobProcessor(context)

    def _move(self, lane: _Lane) -> None:
        """Have a pass of this job under way, if there is one."""
        while lane.active is None and lane.behind:
            try:
                processor = lane.behind.popleft()()
            except Exception as error:
                self.fail(lane.job, error)
                continue
            if processor is not None:
                lane.active = _Pass(processor, lane)
                if self._go_on(lane.active):
                    self._queue(lane.active)
        if lane.active is None:
            self._lanes.pop(lane.job.job_id, None)

    def _go_on(self, one: _Pass) -> bool:
        """To where the pass next needs something; False if it came to its end."""
        try:
            for need in one.steps:
                one.need = need
                return True
        except Exception as error:
            self.fail(one.job, error)
        else:
            self._over(one)
        one.lane.active = None
        return False

    def _queue(self, one: _Pass) -> None:
        if isinstance(one.need, Head):
            self._heads.append(one)
        elif one.job.returns >= one.job.count:
            self._steps.append(one)
        else:
            self._chunks.append(one)

    def _drop(self, one: _Pass, error: Exception | None = None) -> None:
        """End a pass where it is: it failed, or its job was cancelled."""
        one.steps.close()
        one.lane.active = None
        if error is not None:
            self.fail(one.job, error)
        self._move(one.lane)

    def _over(self, one: _Pass) -> None:
        processor, job = one.processor, one.job
        if processor.state is not ProcessorState.DONE or processor.event is None:
            return  # abandoned: who cancelled it knows
        if processor.event is ProcessorEvent.HANDOFF_COMPLETE:
            if job.text is not None and job.text.chunking.has_more:
                one.lane.behind.append(partial(self._next_chunk, processor.context))
        elif processor.event in ERRORS:
            job.cancelled = job.cancelled or processor.reason
        self._safely(self._node.done, job, processor.event, processor.reason)

    # -- computing ------------------------------------------------------------------

    def _choose(self) -> list[_Pass]:
        """Who takes part in the next pass through layers."""
        left = self._pass_tokens
        chosen: list[_Pass] = []
        for queue, at_least in ((self._steps, 0), (self._chunks, 1)):
            taken = 0
            while queue and (taken < at_least or queue[0].job.count <= left):
                one = queue.popleft()
                if one.job.cancelled:
                    self._drop(one)
                    continue
                chosen.append(one)
                taken += 1
                left -= one.job.count
        return chosen

    def _compute_layers(self, going: list[_Pass]) -> None:
        """All of them, through all layers that they find here one after the other."""
        while going:
            model, end, together, going = _together(going)
            for one in self._through(model, end, together):
                if one.job.current_layer < one.need.end:  # type: ignore[union-attr]
                    going.append(one)
                elif not self._go_on(one):
                    self._move(one.lane)
                elif isinstance(one.need, Layers):
                    going.append(one)
                else:
                    self._queue(one)

    def _through(self, model: LlmModel, end: int, together: list[_Pass]) -> list[_Pass]:
        """One pass; who came through. If it fails, each job is tried alone."""
        jobs = [one.job for one in together]
        before = [(job.current_layer, job.compute_step, job.data) for job in jobs]
        began = time.perf_counter()
        try:
            model.process_jobs(jobs, end)
        except Exception as error:
            if len(together) == 1:
                self._drop(together[0], error)
                return []
            for job, (layer, step, data) in zip(jobs, before, strict=True):
                job.current_layer, job.compute_step, job.data = layer, step, data
            return [came for one in together for came in self._through(model, end, [one])]
        ended = time.perf_counter()
        for one in together:
            one.processor.time.computed(began, ended, len(together))
        return together

    def _compute_heads(self, heads: list[_Pass]) -> None:
        began = time.perf_counter()
        chosen = []
        for one in self._to_logits(heads):
            try:
                _end_model(one).choose(one.job)
            except Exception as error:
                self._drop(one, error)
            else:
                chosen.append(one)
        self._embed_together(chosen)
        took = time.perf_counter() - began
        for one in chosen:
            one.processor.head_seconds = took
            if self._go_on(one):
                self._queue(one)
            else:
                self._move(one.lane)

    def _to_logits(self, heads: list[_Pass]) -> list[_Pass]:
        """Norm and head of all jobs in one go, or of each alone if that fails."""
        for one in [one for one in heads if one.job.cancelled]:
            heads.remove(one)
            self._drop(one)
        if not heads:
            return []
        jobs = [one.job for one in heads]
        before = [(job.compute_step, job.data) for job in jobs]
        try:
            end_model = _end_model(heads[0])
            end_model.compute_norm(jobs)
            end_model.compute_head(jobs)
        except Exception as error:
            if len(heads) == 1:
                self._drop(heads[0], error)
                return []
            for job, (step, data) in zip(jobs, before, strict=True):
                job.compute_step, job.data = step, data
            return [came for one in heads for came in self._to_logits([one])]
        return heads

    def _embed_together(self, chosen: list[_Pass]) -> None:
        """The new tokens of several jobs, in one go: they are past EMBED then."""
        if len(chosen) < 2:
            return
        began = time.perf_counter()
        jobs = [one.job for one in chosen]
        for job in jobs:
            job.begin_pass(self._chunk)
        try:
            _end_model(chosen[0]).compute_embed(jobs)
        except Exception:
            for job in jobs:  # each by its own EMBED, where it fails alone
                job.compute_step = ComputeStep.EMBED
            return
        for one in chosen:
            one.processor.embedded(began)


def _end_model(one: _Pass) -> EndModel:
    assert isinstance(one.need, Head)
    return one.need.end_model


def _together(going: Sequence[_Pass]) -> tuple[LlmModel, int, list[_Pass], list[_Pass]]:
    """Those that are furthest behind: the segment, how far they can go in one pass, they, and the
    others. They go no further than to where others wait for the same layers."""
    first = min(going, key=lambda one: one.job.current_layer)
    layer, model, end = first.job.current_layer, first.need.model, first.need.end  # type: ignore[union-attr]
    together, apart = [], []
    for one in going:
        need = one.need
        assert isinstance(need, Layers)
        if need.model is not model:
            apart.append(one)
        elif one.job.current_layer == layer:
            together.append(one)
            end = min(end, need.end)
        else:
            apart.append(one)
            end = min(end, one.job.current_layer)
    return model, end, together, apart


def _failure(error: Exception) -> LlmFailure:
    if isinstance(error, LlmFailure):
        return error
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return LlmFailure(LlmCode.OUT_OF_MEMORY, f"there is not enough memory: {error}")
    log.error("a job failed alone", exc_info=error)
    return LlmFailure(LlmCode.ENGINE_ERROR, f"{type(error).__name__}: {error}")
