"""The scheduler of passes: queues of jobs, batches, and the one thread that computes.

The thread goes round: take all that arrived; choose the next token of every job that is at its
head; then one pass through layers for the jobs that wait for it. What leaves is collected by
destination, and sent before and after that pass. With nothing to compute the thread blocks on a
condition.

A job's passes go one after the other, in the order in which they came (packets, and a prompt's
next chunks). A pass that stopped for something to be computed waits in one of three lists: `heads`,
`steps` (of running answers) or `chunks` (of prompts). If a computation of many jobs raises, each of
them is tried alone: who fails alone ends with that reason, and the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from penstock.lifecycles.processor import ERRORS, ProcessorEvent, ProcessorState
from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.job import ComputeStep, Job, JobContext, JobTime, NodeTiming
from penstock.workloads.pipes.network_job import NetworkJob
from penstock.workloads.pipes.processor import Head, JobProcessor, Layers, Need

if TYPE_CHECKING:
    from penstock.workloads.pipes.end_model import EndModel
    from penstock.workloads.pipes.llm_model import LlmModel

log = logging.getLogger(__name__)

Begin = Callable[[], JobProcessor | None]
"""Makes a job ready for a pass; None if there is none to make after all. Raises LlmFailure."""


class PassListener(Protocol):
    """The node. Called by the thread that computes: quick, never blocking."""

    def send(self, node_id: str, jobs: Sequence[NetworkJob]) -> None:
        """All that goes to one node now."""

    def acked(self, origin: str, job_id: bytes, sequence: int, times: Sequence[JobTime]) -> None:
        """A pass that returns nothing has been through all layers; its origin is another node."""

    def done(self, job: Job, event: ProcessorEvent, reason: str) -> None:
        """A pass came to DONE. (One that was abandoned did not: who cancelled it knows.)"""

    def failed(self, job_id: bytes, origin: str, sequence: int, failure: LlmFailure) -> None:
        """A job can't go on here, for a reason that the seed's table has no row for."""


class ForwardStep:
    """A pass that is under way here."""

    __slots__ = ("job", "need", "processor", "queue", "steps")

    def __init__(self, processor: JobProcessor, queue: JobQueue) -> None:
        self.processor, self.queue, self.job = processor, queue, queue.job
        self.steps: Generator[Need, None, None] = processor.steps()
        self.need: Need
        """Where it stopped."""


class JobQueue:
    """The passes of one job: one under way, and those that come after it."""

    __slots__ = ("active", "behind", "job")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.active: ForwardStep | None = None
        self.behind: deque[Begin] = deque()


class Group(NamedTuple):
    """Passes that go through the same layers together."""

    model: LlmModel
    end: int
    passes: list[ForwardStep]


class PassScheduler:
    """It is the Outbox of the node's pipes."""

    def __init__(self, listener: PassListener, config: LpConfig, threads: int = 0) -> None:
        self._listener, self._threads = listener, threads
        self._pass_tokens, self._chunk = config.pass_tokens, config.prefill_chunk_size
        self.timing = NodeTiming()
        self.busy_since: float | None = None
        """Since when (`time.monotonic`) it has been at the round that it is at."""
        self.busy_tokens = 0
        """Tokens that go through layers in that round."""
        self._inbox: list[Callable[[], None]] = []
        self._news = threading.Condition()
        self._stopping = self._has_ended = False
        self._thread = threading.Thread(target=self._go, name="penstock-compute", daemon=True)
        # All below is for the thread that computes alone.
        self._queues: dict[bytes, JobQueue] = {}
        self._heads: list[ForwardStep] = []
        self._steps: deque[ForwardStep] = deque()
        self._chunks: deque[ForwardStep] = deque()
        self._out: dict[str, list[NetworkJob]] = {}

    # -- for any thread -------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """After the pass under way; whether it has ended."""
        with self._news:
            self._stopping = True
            self._news.notify()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join(timeout)
        return self._has_ended

    def submit(self, act: Callable[[], None]) -> None:
        """Have something done between two passes, in the order of the calls. After the thread's
        end it is done at once, by the caller."""
        with self._news:
            if not self._has_ended:
                self._inbox.append(act)
                self._news.notify()
                return
        safely(act)

    def begin(self, context: JobContext) -> None:
        """The first pass of a new job, on its origin."""
        assert context.job is not None
        processor = JobProcessor(context)
        processor.time.ready = time.perf_counter()
        self.submit(partial(self.enter, context.job, lambda: processor))

    def acked(self, context: JobContext, sequence: int, times: Sequence[JobTime]) -> None:
        """Another node said so of one of our jobs: there is room for its next chunk."""
        self.submit(partial(self._acked, context, sequence, times, time.perf_counter()))

    @property
    def is_idle(self) -> bool:
        return not (self._inbox or self._has_work)

    @property
    def jobs(self) -> int:
        """Jobs that have a pass under way here."""
        return len(self._queues)

    # -- the thread -----------------------------------------------------------------

    def _go(self) -> None:
        # For this thread: the number of others that it takes along belongs to it.
        if self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while self._wait():
                self.busy_since = time.monotonic()
                try:
                    self.round()
                except Exception as error:
                    log.exception("the thread that computes has lost its place")
                    self._drop_all(error)
                self.busy_since, self.busy_tokens = None, 0
        self._end()

    @property
    def _has_work(self) -> bool:
        return bool(self._steps or self._heads or self._chunks)

    def _wait(self) -> bool:
        """Until there is something to do; False when it is to end."""
        with self._news:
            while not (self._stopping or self._inbox or self._has_work):
                self._news.wait()
            return not self._stopping

    def _end(self) -> None:
        """What others wait for is done all the same; no pass goes on."""
        with self._news:
            self._has_ended = True
            inbox, self._inbox = self._inbox, []
        for act in inbox:
            safely(act)

    def round(self) -> None:
        """What the thread does again and again; it does not wait."""
        began = time.perf_counter()
        with self._news:
            inbox, self._inbox = self._inbox, []
        for act in inbox:
            safely(act)
        if self._heads:
            self._compute_heads()
        self._flush()
        chosen = self._choose()
        self.busy_tokens = tokens = sum(one.job.count for one in chosen)
        if chosen:
            self._compute_layers(chosen)
            self._flush()
        self.timing.add(tokens, time.perf_counter() - began, time.monotonic())

    # -- passes of a job, one after the other ---------------------------------------

    def enter(self, job: Job, begin: Begin) -> None:
        """A pass of this job, behind those that came before."""
        queue = self._queues.get(job.job_id)
        if queue is None:
            queue = self._queues[job.job_id] = JobQueue(job)
        queue.behind.append(begin)
        self._move(queue)

    def _acked(
        self, context: JobContext, sequence: int, times: Sequence[JobTime], now: float
    ) -> None:
        job = context.job
        if job is None or job.text is None or job.cancelled:
            return
        flight = job.text.land(sequence)
        if flight is None:
            return
        away = flight.away + now - flight.left
        job.text.timing.passed(times, away, job.origin_node_id, flight.count)
        job.last_update = time.monotonic()
        self.enter(job, partial(_next_chunk, context))

    def _move(self, queue: JobQueue) -> None:
        """Have a pass of this job under way, if there is one."""
        while queue.active is None and queue.behind:
            try:
                processor = queue.behind.popleft()()
            except Exception as error:
                self.fail(queue.job, error)
                continue
            if processor is not None:
                queue.active = ForwardStep(processor, queue)
                if self._go_on(queue.active):
                    self._enqueue(queue.active)
        if queue.active is None:
            self._queues.pop(queue.job.job_id, None)

    def _go_on(self, one: ForwardStep) -> bool:
        """To where the pass next needs something; False if it came to its end."""
        try:
            for need in one.steps:
                one.need = need
                return True
        except Exception as error:
            self.fail(one.job, error)
        else:
            self._over(one)
        one.queue.active = None
        return False

    def _enqueue(self, one: ForwardStep) -> None:
        """Have it wait for what it needs."""
        if isinstance(one.need, Head):
            self._heads.append(one)
        elif one.job.returns >= one.job.count:
            self._steps.append(one)
        else:
            self._chunks.append(one)

    def _over(self, one: ForwardStep) -> None:
        processor, job = one.processor, one.job
        if processor.state is not ProcessorState.DONE or processor.event is None:
            return
        if processor.event is ProcessorEvent.HANDOFF_COMPLETE:
            if job.text is not None and job.text.chunking.has_more:
                one.queue.behind.append(partial(_next_chunk, processor.context))
        elif processor.event in ERRORS:
            job.cancelled = job.cancelled or processor.reason
        safely(self._listener.done, job, processor.event, processor.reason)

    def _drop(self, one: ForwardStep, error: Exception | None = None) -> None:
        """End a pass where it is: it failed, or its job was cancelled."""
        one.steps.close()
        one.queue.active = None
        if error is not None:
            self.fail(one.job, error)
        self._move(one.queue)

    def _drop_all(self, error: Exception) -> None:
        """Something is wrong with the books themselves: every job here ends, new ones go on."""
        queues, self._queues = self._queues, {}
        self._heads, self._steps, self._chunks = [], deque(), deque()
        for queue in queues.values():
            queue.behind.clear()
            self.fail(queue.job, error)

    def fail(self, job: Job, error: Exception) -> None:
        """It can't go on here: its origin is told, once, and what else comes for it is refused."""
        if job.cancelled:
            return
        failure = failure_of(error)
        job.cancelled = failure.message or str(failure.code)
        self.tell_failure(job.job_id, job.origin_node_id, job.sequence, failure)

    def tell_failure(self, job_id: bytes, origin: str, sequence: int, failure: LlmFailure) -> None:
        """Of a job that may not be known here."""
        safely(self._listener.failed, job_id, origin, sequence, failure)

    # -- many jobs in one pass through layers ----------------------------------------

    def _choose(self) -> list[ForwardStep]:
        """Who takes part in the next pass through layers: steps of running answers first, then
        chunks of prompts as far as there is room. At least one of each: none starves."""
        left = self._pass_tokens
        chosen: list[ForwardStep] = []
        for queue in (self._steps, self._chunks):
            is_first = True
            while queue and (is_first or queue[0].job.count <= left):
                one = queue.popleft()
                if one.job.cancelled:
                    self._drop(one)
                    continue
                chosen.append(one)
                is_first = False
                left -= one.job.count
        return chosen

    def _compute_layers(self, going: list[ForwardStep]) -> None:
        """All of them, through all layers that they find here one after the other."""
        while going:
            group, going = next_group(going)
            for one in self._through(group):
                sequence = one.job.sequence
                if one.job.current_layer < _layers(one).end:
                    going.append(one)
                elif not self._go_on(one):
                    self._move(one.queue)
                elif isinstance(one.need, Layers) and one.job.sequence == sequence:
                    going.append(one)
                else:  # at the head, or with the next chunk of its prompt: others come first
                    self._enqueue(one)

    def _through(self, group: Group) -> list[ForwardStep]:
        """Who came through."""
        jobs = [one.job for one in group.passes]
        before = [(job.current_layer, job.compute_step, job.data) for job in jobs]
        began = time.perf_counter()
        try:
            group.model.process_jobs(jobs, group.end)
        except Exception as error:
            if len(jobs) == 1:
                self._drop(group.passes[0], error)
                return []
            for job, (layer, step, data) in zip(jobs, before, strict=True):
                job.current_layer, job.compute_step, job.data = layer, step, data
            alone = [group._replace(passes=[one]) for one in group.passes]
            return [came for each in alone for came in self._through(each)]
        ended = time.perf_counter()
        for one in group.passes:
            one.processor.time.computed(began, ended, len(jobs))
        return group.passes

    # -- the next token of many jobs --------------------------------------------------

    def _compute_heads(self) -> None:
        """The next token of every job that is at its head."""
        began = time.perf_counter()
        heads, self._heads = self._heads, []
        chosen = [one for one in self._to_logits(self._wanted(heads)) if self._chose(one)]
        self._embed(chosen)
        took = time.perf_counter() - began
        for one in chosen:
            one.processor.head_seconds = took
            if self._go_on(one):
                self._enqueue(one)
            else:
                self._move(one.queue)

    def _wanted(self, passes: list[ForwardStep]) -> list[ForwardStep]:
        for one in passes:
            if one.job.cancelled:
                self._drop(one)
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
                self._drop(heads[0], error)
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
            self._drop(one, error)
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

    # -- what leaves (the outbox of pipes) --------------------------------------------

    def put(self, node_id: str, job: NetworkJob) -> None:
        self._out.setdefault(node_id, []).append(job)

    def land(self, job: Job) -> None:
        times = tuple(job.times)
        safely(self._listener.acked, job.origin_node_id, job.job_id, job.sequence, times)

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, {}
            for node_id, jobs in out.items():
                for frame in framed(jobs, self._pass_tokens):
                    self._send(node_id, frame)

    def _send(self, node_id: str, jobs: Sequence[NetworkJob]) -> None:
        """What can't be sent would be waited for: its origin is told."""
        try:
            self._listener.send(node_id, jobs)
        except Exception as error:
            failure = failure_of(error)
            for job in jobs:
                self.tell_failure(job.job_id, job.origin_node_id, job.sequence, failure)


def next_group(going: Sequence[ForwardStep]) -> tuple[Group, list[ForwardStep]]:
    """Those that are furthest behind, and the others. They go no further than to where others
    wait for the same layers, so that from there on they go together."""
    first = going[0] if len(going) == 1 else min(going, key=lambda one: one.job.current_layer)
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


def framed(jobs: Sequence[NetworkJob], tokens: int) -> Iterator[list[NetworkJob]]:
    """In the same order, each part with no more tokens than these, or with one job: many prompts
    may begin in one round, and a frame has to end somewhere."""
    part: list[NetworkJob] = []
    left = tokens
    for job in jobs:
        if part and job.count > left:
            yield part
            part, left = [], tokens
        part.append(job)
        left -= job.count
    if part:
        yield part


def _next_chunk(context: JobContext) -> JobProcessor | None:
    """A pass for one more chunk of a prompt, if there is one and room for it on the way."""
    job, pipe = context.job, context.pipe
    if job is None or job.text is None or pipe is None or job.cancelled:
        return None
    if not job.text.chunking.has_more or len(job.text.under_way) >= pipe.window:
        return None
    job.compute_step = ComputeStep.EMBED
    return JobProcessor(context)


def _layers(one: ForwardStep) -> Layers:
    assert isinstance(one.need, Layers)
    return one.need


def _end_model(one: ForwardStep) -> EndModel:
    assert isinstance(one.need, Head)
    return one.need.end_model


def safely(act: Callable[..., None], *args: object) -> None:
    """Nothing that is told to others may end the thread that computes."""
    try:
        act(*args)
    except Exception:
        log.exception("something went wrong beside the computation")


def failure_of(error: Exception) -> LlmFailure:
    if isinstance(error, LlmFailure):
        return error
    # torch says it in words, in an error of no particular kind.
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return LlmFailure(LlmCode.OUT_OF_MEMORY, f"there is not enough memory: {error}")
    log.error("this should not happen", exc_info=error)
    return LlmFailure(LlmCode.ENGINE_ERROR, f"{type(error).__name__}: {error}")
