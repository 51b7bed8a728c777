"""A worker's connection to the engine, which can be cut, fall silent, stutter, or die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from tests.support.simulation.history import GaveBack, History, Lent

from penstock.ports.bus import (
    HANDSHAKE,
    HEARTBEAT,
    AnyMessage,
    Bus,
    Farewell,
    Handler,
    Heartbeat,
    MemoryBus,
    Returned,
    Started,
    Subscription,
    Waiting,
    jobs_of,
)
from penstock.ports.bus import Finished as FinishedMessage


class SimLink:
    """The worker's end of a connection: a Bus, as `penstock.adapters.link.client.Link` is."""

    def __init__(self, worker_id: str, chance: random.Random, history: History) -> None:
        self.worker_id = worker_id
        self._chance, self._history = chance, history
        self._inner = MemoryBus()
        self._engine: Bus | None = None
        self._subscription: Subscription | None = None
        self._closing: list[asyncio.Future[None]] = []
        self._unsent: list[tuple[str, list[AnyMessage]]] = []
        self._undelivered: list[AnyMessage] = []
        self._said: list[tuple[str, AnyMessage]] = []
        self.on_connect: Callable[[int], None] = lambda link: None
        self.stutter = 0.0
        """How likely a message is to be sent twice."""
        self.silent = False
        self.dead = False
        self.number = 0

    # -- to the engine ------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._engine is not None and not self.dead

    @property
    def healthy(self) -> bool:
        return self.connected and not self.silent

    def connect(self, engine: Bus) -> None:
        if self.dead:
            return
        self.number += 1
        self._engine = engine
        self._subscription = engine.subscribe(jobs_of(self.worker_id), self._deliver)
        self.on_connect(self.number)
        self._flush()

    def disconnect(self, *, told: bool) -> None:
        """The connection is gone; `told`: the engine notices that at once."""
        engine, self._engine = self._engine, None
        if self._subscription is not None:
            self._closing.append(asyncio.ensure_future(self._subscription.close()))
            self._subscription = None
        if engine is not None and told:
            lost = Farewell(self.worker_id, lost=True, link=self.number)
            engine.publish(HANDSHAKE, [lost])

    def fall_silent(self) -> None:
        """Nothing gets through in either direction, and nobody notices."""
        self.silent = True

    def speak_again(self) -> None:
        self.silent = False
        self.beat()
        undelivered, self._undelivered = self._undelivered, []
        if undelivered and not self.dead:
            self._inner.publish(jobs_of(self.worker_id), undelivered)
        self._flush()

    def beat(self) -> None:
        if self._engine is not None and not self.silent and not self.dead:
            self._engine.publish(HEARTBEAT, [Heartbeat(self.worker_id)])

    def repeat_something(self) -> None:
        """An old message arrives once more, as any bus may let it."""
        if self._said and self.connected and not self.silent and self._engine is not None:
            subject, message = self._chance.choice(self._said)
            self._engine.publish(subject, [message])

    # -- as the worker's Bus ------------------------------------------------------

    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        if self.dead:
            return
        for message in messages:
            if isinstance(message, Returned):
                self._history.events.append(
                    GaveBack(message.job_id, message.attempt, self.worker_id)
                )
            elif isinstance(message, Waiting) and message.count:
                self._history.events.append(Lent(message.job_id, message.attempt))
        self._unsent.append((subject, list(messages)))
        self._flush()

    def _flush(self) -> None:
        if self._engine is None or self.silent or self.dead:
            return
        unsent, self._unsent = self._unsent, []
        for subject, messages in unsent:
            self._engine.publish(subject, messages)
            if self.stutter and self._chance.random() < self.stutter:
                self._engine.publish(subject, messages)
            self._said.extend(
                (subject, message)
                for message in messages
                if isinstance(message, Started | FinishedMessage)
            )

    async def _deliver(self, messages: list[AnyMessage]) -> None:
        if self.dead:
            return
        if self.silent:
            self._undelivered.extend(messages)
        else:
            self._inner.publish(jobs_of(self.worker_id), messages)
            if self.stutter and self._chance.random() < self.stutter:
                self._inner.publish(jobs_of(self.worker_id), messages)

    def subscribe(self, subject: str, handler: Handler) -> Subscription:
        return self._inner.subscribe(subject, handler)

    async def close(self) -> None:
        self.disconnect(told=False)
        await asyncio.gather(*self._closing)
        await self._inner.close()


class SimStartLogs:
    """Start logs on the one machine of the simulation, which outlive workers and engines: the
    engine's side."""

    def __init__(self) -> None:
        self.folder = "starts"
        self.begun: set[tuple[str, int]] = set()
        self.revoked: set[tuple[str, int]] = set()

    def revoke(self, job_id: str, attempt: int) -> bool:
        self.revoked.add((job_id, attempt))
        return (job_id, attempt) not in self.begun


class SimStartLog:
    """One worker's side of its start log."""

    def __init__(self, starts: SimStartLogs) -> None:
        self._starts = starts

    def begin(self, job_id: str, attempt: int) -> bool:
        if (job_id, attempt) in self._starts.revoked:
            return False
        self._starts.begun.add((job_id, attempt))
        return True

    def close(self, *, keep: bool) -> None:
        pass
