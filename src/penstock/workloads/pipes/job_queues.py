"""Whose turn it is: the passes of each job one after the other, and what they wait for.

A queue is one job's. The pass at its head is under way; others (packets that came meanwhile, a
prompt's next chunk) are behind it, in the order in which they came. A pass that stopped for
something to be computed is in one of three queues: `heads`, `steps` (of running answers) or
`chunks` (of prompts).

All of this is for the thread that computes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Protocol

from penstock.lifecycles.processor import ERRORS, ProcessorEvent, ProcessorState
from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.job import ComputeStep, Job, JobContext, JobTime
from penstock.workloads.pipes.processor import Head, JobProcessor, Need

log = logging.getLogger(__name__)

Begin = Callable[[], JobProcessor | None]
"""Makes a job ready for a pass; None if there is none to make after all. Raises LlmFailure."""


class Listener(Protocol):
    """Who is told how passes end. Called by the thread that computes: quick, never blocking."""

    def done(self, job: Job, event: ProcessorEvent, reason: str) -> None:
        """A pass came to DONE. (One that was abandoned did not: who cancelled it knows.)"""

    def failed(self, job_id: bytes, origin: str, sequence: int, failure: LlmFailure) -> None:
        """A job can't go on here, for a reason that the seed's table has no row for."""


class ForwardStep:
    """One that is under way here."""

    __slots__ = ("job", "need", "processor", "queue", "steps")

    def __init__(self, processor: JobProcessor, queue: JobQueue) -> None:
        self.processor, self.queue, self.job = processor, queue, queue.job
        self.steps: Generator[Need, None, None] = processor.steps()
        self.need: Need
        """Where it stopped."""


class JobQueue:
    __slots__ = ("active", "behind", "job")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.active: ForwardStep | None = None
        self.behind: deque[Begin] = deque()


class JobQueues:
    def __init__(self, listener: Listener) -> None:
        self.heads: list[ForwardStep] = []
        self.steps: deque[ForwardStep] = deque()
        self.chunks: deque[ForwardStep] = deque()
        self._listener = listener
        self._queues: dict[bytes, JobQueue] = {}

    def __len__(self) -> int:
        """Jobs that have a pass under way here."""
        return len(self._queues)

    @property
    def has_work(self) -> bool:
        return bool(self.steps or self.heads or self.chunks)

    # -- how passes begin -----------------------------------------------------------

    def enter(self, job: Job, begin: Begin) -> None:
        """A pass of this job, behind those that came before."""
        queue = self._queues.get(job.job_id)
        if queue is None:
            queue = self._queues[job.job_id] = JobQueue(job)
        queue.behind.append(begin)
        self.move(queue)

    def begin(self, context: JobContext, since: float) -> None:
        """The first pass of a new job, on its origin."""
        assert context.job is not None
        processor = JobProcessor(context)
        processor.time.ready = since
        self.enter(context.job, lambda: processor)

    def landed(
        self, context: JobContext, sequence: int, times: Sequence[JobTime], now: float
    ) -> None:
        """A chunk of one of our jobs has been through all layers: there is room for another."""
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

    # -- how they go on -------------------------------------------------------------

    def move(self, queue: JobQueue) -> None:
        """Have a pass of this job under way, if there is one."""
        while queue.active is None and queue.behind:
            try:
                processor = queue.behind.popleft()()
            except Exception as error:
                self.fail(queue.job, error)
                continue
            if processor is not None:
                queue.active = ForwardStep(processor, queue)
                if self.go_on(queue.active):
                    self.enqueue(queue.active)
        if queue.active is None:
            self._queues.pop(queue.job.job_id, None)

    def go_on(self, one: ForwardStep) -> bool:
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

    def enqueue(self, one: ForwardStep) -> None:
        """Have it wait for what it needs."""
        if isinstance(one.need, Head):
            self.heads.append(one)
        elif one.job.returns >= one.job.count:
            self.steps.append(one)
        else:
            self.chunks.append(one)

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

    # -- how they are ended ---------------------------------------------------------

    def drop(self, one: ForwardStep, error: Exception | None = None) -> None:
        """End a pass where it is: it failed, or its job was cancelled."""
        one.steps.close()
        one.queue.active = None
        if error is not None:
            self.fail(one.job, error)
        self.move(one.queue)

    def drop_all(self, error: Exception) -> None:
        """Something is wrong with the books themselves: every job here ends, new ones go on."""
        queues, self._queues = self._queues, {}
        self.heads, self.steps, self.chunks = [], deque(), deque()
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


def _next_chunk(context: JobContext) -> JobProcessor | None:
    """A pass for one more chunk of a prompt, if there is one and room for it on the way."""
    job, pipe = context.job, context.pipe
    if job is None or job.text is None or pipe is None or job.cancelled:
        return None
    if not job.text.chunking.has_more or len(job.text.under_way) >= pipe.window:
        return None
    job.compute_step = ComputeStep.EMBED
    return JobProcessor(context)


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
