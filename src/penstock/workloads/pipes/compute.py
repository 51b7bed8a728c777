"""The thread that computes: everything that this node does to jobs, many of them at once.

It goes round: take all that arrived; choose the next token of every job that is at its head; then
one pass through layers for the jobs that wait for it. What leaves is collected by destination, and
handed out before and after that pass. Jobs that have nothing to compute cost nothing: with none
left it blocks on a condition.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from penstock.workloads.llm.values import LlmFailure
from penstock.workloads.pipes.batches import Batches
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.job import Job, JobContext, JobTime
from penstock.workloads.pipes.job_queues import Begin, JobQueues, Listener, failure_of, log, safely
from penstock.workloads.pipes.network_job import NetworkJob
from penstock.workloads.pipes.timing import NodeTiming


class Around(Listener, Protocol):
    """The node. Called by the thread that computes: quick, never blocking."""

    def send(self, node_id: str, jobs: Sequence[NetworkJob]) -> None:
        """All that goes to one node now."""

    def landed(self, origin: str, job_id: bytes, sequence: int, times: Sequence[JobTime]) -> None:
        """A pass that returns nothing has been through all layers; its origin is another node."""


class Compute:
    """It is the Outbox of the node's pipes."""

    def __init__(self, around: Around, config: LpConfig, threads: int = 0) -> None:
        self._around, self._threads = around, threads
        self._most = config.pass_tokens
        self._queues = JobQueues(around)
        self._batches = Batches(self._queues, config)
        self.timing = NodeTiming()
        self.busy_since: float | None = None
        """Since when (`time.monotonic`) it has been at the round that it is at."""
        self.busy_tokens = 0
        """Tokens that go through layers in that round."""
        self._inbox: list[Callable[[], None]] = []
        self._news = threading.Condition()
        self._stopping = self._has_ended = False
        self._thread = threading.Thread(target=self._go, name="penstock-compute", daemon=True)
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
        self.submit(partial(self._queues.begin, context, time.perf_counter()))

    def landed(self, context: JobContext, sequence: int, times: Sequence[JobTime]) -> None:
        """Another node said so of one of our jobs: there is room for its next chunk."""
        self.submit(partial(self._queues.landed, context, sequence, times, time.perf_counter()))

    @property
    def is_idle(self) -> bool:
        return not (self._inbox or self._queues.has_work)

    # -- for the receiver, in this thread -------------------------------------------

    def enter(self, job: Job, begin: Begin) -> None:
        """A pass of this job, behind those that came before."""
        self._queues.enter(job, begin)

    def fail(self, job: Job, failure: LlmFailure) -> None:
        self._queues.fail(job, failure)

    def tell_failure(self, job_id: bytes, origin: str, sequence: int, failure: LlmFailure) -> None:
        """Of a job that is not known here."""
        self._queues.tell_failure(job_id, origin, sequence, failure)

    # -- the outbox of pipes, in this thread ----------------------------------------

    def put(self, node_id: str, job: NetworkJob) -> None:
        self._out.setdefault(node_id, []).append(job)

    def land(self, job: Job) -> None:
        times = tuple(job.times)
        safely(self._around.landed, job.origin_node_id, job.job_id, job.sequence, times)

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, {}
            for node_id, jobs in out.items():
                for frame in framed(jobs, self._most):
                    self._hand_out(node_id, frame)

    def _hand_out(self, node_id: str, jobs: Sequence[NetworkJob]) -> None:
        """What can't be sent would be waited for: its origin is told."""
        try:
            self._around.send(node_id, jobs)
        except Exception as error:
            failure = failure_of(error)
            for job in jobs:
                self.tell_failure(job.job_id, job.origin_node_id, job.sequence, failure)

    # -- the loop -------------------------------------------------------------------

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
                    self._queues.drop_all(error)
                self.busy_since, self.busy_tokens = None, 0
        self._end()

    def _wait(self) -> bool:
        """Until there is something to do; False when it is to end."""
        with self._news:
            while not (self._stopping or self._inbox or self._queues.has_work):
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
        if self._queues.heads:
            self._batches.compute_heads()
        self._flush()
        chosen = self._batches.choose()
        self.busy_tokens = tokens = sum(one.job.count for one in chosen)
        if chosen:
            self._batches.compute_layers(chosen)
            self._flush()
        self.timing.add(tokens, time.perf_counter() - began, time.monotonic())


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
