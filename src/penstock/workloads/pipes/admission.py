"""Who comes in: a node's answer to OPEN, and what becomes of a job's room when it ends.

Everything here happens in the event loop. The thread that computes may still be at a job that is
ended early: its room is given back by that thread, after what it is doing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.job import ComputeStep, Hop, Job, JobTable
from penstock.workloads.pipes.model.cache import CacheFull, JobCache, KvPool
from penstock.workloads.pipes.pipe import Outbox, Pipe
from penstock.workloads.pipes.routes import check_hops
from penstock.workloads.pipes.wire.messages import End, Open, Opened, Refused

if TYPE_CHECKING:
    from penstock.workloads.pipes.llm_model import LlmModel


class _Reservation(Struct):
    """A job that waits for room."""

    sender: str
    message: Open
    until: float


class Admission:
    """`answer` sends an Opened to the sender; `after_pass` has something done by the thread that
    computes, between two passes."""

    def __init__(
        self,
        node_id: str,
        config: LpConfig,
        jobs: JobTable,
        pool: KvPool,
        *,
        num_layers: int,
        segments: Callable[[], Sequence[LlmModel]],
        outbox: Outbox,
        answer: Callable[[str, Opened], None],
        after_pass: Callable[[Callable[[], None]], None],
        refused: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_id, self._config, self._jobs, self._pool = node_id, config, jobs, pool
        self._num_layers = num_layers
        self._segments, self._outbox, self._answer = segments, outbox, answer
        self._after_pass, self._refused, self._now = after_pass, refused, now
        self._waiting: deque[_Reservation] = deque()
        self.closing = ""
        """Why nobody is let in any more."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def open(self, sender: str, message: Open) -> None:
        """Answered at once, or with a word that it waits, and then again."""
        try:
            self._check(sender, message)
        except LlmFailure as failure:
            self._refuse(sender, message, failure)
            return
        reservation = _Reservation(
            sender, message, self._now() + min(self._config.open_timeout, message.deadline)
        )
        if self._waiting or not self._let_in(reservation):
            self._wait(reservation)

    def retry(self) -> None:
        """Room was given back, or time has passed."""
        now = self._now()
        while self._waiting and (self._waiting[0].until <= now or self._let_in(self._waiting[0])):
            reservation = self._waiting.popleft()
            if reservation.until <= now and reservation.message.job_id not in self._jobs:
                self._refuse(
                    reservation.sender,
                    reservation.message,
                    self._no_room("there was no room in time"),
                )

    def end(self, sender: str, message: End) -> None:
        """From a job's origin only. One that has ended is not wanted any more, even if it was to be
        kept."""
        self._forget_reservation(sender, message.job_id)
        job = self._jobs.get(message.job_id)
        if job is None:
            self._pool.drop(_key(sender, message.job_id))
            return
        if job.origin_node_id != sender:
            self._refused(Refused.FOREIGN_END)
            return
        self._end(message.job_id, message.reason or "ended", message.seconds if message.keep else 0)

    def lose(self, origin: str) -> None:
        """An origin is gone: nobody will ask for its jobs again."""
        self._waiting = deque(
            reservation for reservation in self._waiting if reservation.sender != origin
        )
        for job in self._jobs.of_origin(origin):
            self._end(job.job_id, f"its origin {origin} is gone")

    # -- letting in -----------------------------------------------------------------

    def _check(self, sender: str, message: Open) -> None:
        if self.closing:
            raise LlmFailure(LlmCode.PIPE_UNAVAILABLE, f"{self._node_id} {self.closing}")
        waits = any(reservation.message.job_id == message.job_id for reservation in self._waiting)
        if waits or message.job_id in self._jobs:
            raise LlmFailure(LlmCode.ENGINE_ERROR, "a job with this id is open already")
        if message.model != self._config.model:
            raise LlmFailure(
                LlmCode.MODEL_NOT_FOUND,
                f"{self._node_id} has {self._config.model}, not {message.model}",
            )
        if wrong := check_hops(message.hops, self._num_layers):
            raise LlmFailure(LlmCode.PIPE_UNAVAILABLE, f"invalid route: {wrong}")
        self._check_layers(message)
        if message.tokens > self._config.context:
            raise LlmFailure(
                LlmCode.CONTEXT_EXCEEDED,
                f"{message.tokens} tokens were asked for, and {self._node_id} takes"
                f" {self._config.context}",
            )

    def _check_layers(self, message: Open) -> None:
        if missing := [hop for hop in self._own(message) if not self._holds(hop)]:
            raise LlmFailure(
                LlmCode.NO_LOCAL_MODEL,
                f"{self._node_id} does not hold layers {missing[0].start}-{missing[0].end - 1}",
            )

    def _own(self, message: Open) -> list[Hop]:
        return [hop for hop in message.hops if hop.node_id == self._node_id]

    def _holds(self, hop: Hop) -> bool:
        held = (segment.layers for segment in self._segments())
        return any(layers.start <= hop.start and hop.end <= layers.end for layers in held)

    def _let_in(self, reservation: _Reservation) -> bool:
        """False if there is no room now."""
        if len(self._jobs) >= self._config.max_jobs:
            return False
        message = reservation.message
        layers = [n for hop in self._own(message) for n in range(hop.start, hop.end)]
        try:
            self._check_layers(message)  # it may have got others while this one waited
            cache, have, same = self._room(reservation.sender, message, layers)
        except CacheFull:
            return False
        except LlmFailure as failure:
            self._refuse(reservation.sender, message, failure)
            return True
        job = self._job(reservation.sender, message, cache, same)
        self._jobs.add(job, self._pipe(message))
        self._answer(reservation.sender, Opened(job_id=message.job_id, ok=True, have=have))
        return True

    def _room(
        self, sender: str, message: Open, layers: list[int]
    ) -> tuple[JobCache | None, int, int]:
        """With how many positions it has, and how many of them are this job's."""
        if not layers:
            return None, message.tokens, 0
        boundaries = [hop.end for hop in self._own(message) if hop.end < self._num_layers]
        if message.reuse:
            key = _key(sender, message.reuse)
            cache = self._pool.take(key, layers, message.tokens, boundaries)
            if cache is not None:
                return cache, cache.tokens, message.same
        return self._pool.reserve(layers, message.tokens, boundaries), 0, 0

    def _job(self, sender: str, message: Open, cache: JobCache | None, same: int) -> Job:
        return Job(
            job_id=message.job_id,
            pipe_id=message.pipe_id,
            model_id=message.model,
            origin_node_id=sender,
            hops=message.hops,
            wire=message.wire,
            cache=cache,
            same=same,
            compute_step=ComputeStep.TOKENIZE if sender == self._node_id else ComputeStep.LAYER,
        )

    def _pipe(self, message: Open) -> Pipe:
        return Pipe(
            message.pipe_id,
            message.model,
            message.hops,
            self._num_layers,
            self._node_id,
            tuple(self._segments()),
            self._outbox,
        )

    def _wait(self, reservation: _Reservation) -> None:
        if len(self._waiting) >= self._config.max_waiting:
            failure = self._no_room(f"queue is full (max_waiting={self._config.max_waiting})")
            self._refuse(reservation.sender, reservation.message, failure)
            return
        self._waiting.append(reservation)
        reason = f"waits for room on {self._node_id}: {self._why(reservation)}"
        self._answer(
            reservation.sender,
            Opened(job_id=reservation.message.job_id, ok=False, waiting=True, reason=reason),
        )

    def _why(self, reservation: _Reservation) -> str:
        if len(self._jobs) >= self._config.max_jobs:
            return f"it has {len(self._jobs)} jobs, as many as it takes"
        if len(self._waiting) > 1:
            return f"{len(self._waiting) - 1} others wait before it"
        used, total = self._pool.used >> 20, self._pool.total >> 20
        return f"{used} of {total} MiB of its cache are in use"

    def _no_room(self, why: str) -> LlmFailure:
        return LlmFailure(LlmCode.NO_ROOM, f"{self._node_id} is full: {why}")

    def _refuse(self, sender: str, message: Open, failure: LlmFailure) -> None:
        self._refused(f"open_{failure.code.lower()}")
        self._answer(
            sender,
            Opened(job_id=message.job_id, ok=False, code=str(failure.code), reason=failure.message),
        )

    # -- ending ---------------------------------------------------------------------

    def _forget_reservation(self, sender: str, job_id: bytes) -> None:
        self._waiting = deque(
            reservation
            for reservation in self._waiting
            if (reservation.sender, reservation.message.job_id) != (sender, job_id)
        )

    def _end(self, job_id: bytes, reason: str, keep: float = 0) -> None:
        job = self._jobs.remove(job_id)
        if job is None:
            return
        job.cancelled = reason
        if keep > 0 and job.cache is not None:
            # At once: the job that goes on from it may be at the door already. A last pass may
            # still be under way in it, but the next job's first pass comes after that one.
            key = _key(job.origin_node_id, job.job_id)
            self._pool.keep(job.cache, key, self._now() + keep)
        else:
            self._after_pass(lambda: _release(job))


def _key(origin: str, job_id: bytes) -> bytes:
    """Of a kept cache: nobody but its origin goes on from it."""
    return origin.encode() + job_id


def _release(job: Job) -> None:
    job.data = job.logits = None
    if job.cache is not None:
        job.cache.free()
