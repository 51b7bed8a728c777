"""A CAP control plane: clients and workers written with CAP's SDKs, on a NATS server.

To the engine, a CAP worker is a worker like any other: this bridge speaks for it on the engine's
bus. It introduces it, passes jobs, cancellations, progress and results, and decides nothing:
states, attempts, leases and time limits are the engine's.

What CAP workers don't do, the bridge makes up for:

- *They don't say that they start.* A job that may run only once counts as started in the commit
  that dispatches it, before it is sent. So a worker that dies can't lead to a second run.
- *They don't always announce themselves.* Jobs of a topic that nobody announced go to the topic's
  own subject, in the name of the worker `cap:any`. If nobody listens there, the NATS server says
  so, the job goes back, and the topic is paused for a while.
- *They may ignore a cancellation.* After a grace the job is reported as cancelled; what its worker
  says later does not count.

Submissions and results come out of a JetStream stream, if the server has one to offer, and are
acknowledged when what they say is committed: so those that are sent while the engine is away are
not lost. The others are core NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from cap.pb.cordum.agent.v1 import handshake_pb2, job_pb2
from msgspec import Struct

from penstock.adapters.nats import packets, stream
from penstock.adapters.nats.codec import Codec
from penstock.adapters.nats.connection import Connection, NatsOptions
from penstock.adapters.nats.packets import Rejected
from penstock.adapters.nats.pointers import (
    DATA,
    SCHEME,
    PointerStore,
    artifact_name,
    artifact_pointers,
)
from penstock.adapters.nats.stream import Delivery, delivery_of
from penstock.adapters.nats.trust import SessionIssuer
from penstock.core.artifact import Artifact, check_count
from penstock.core.check import check_topic
from penstock.core.errors import (
    InvalidRequest,
    NotFound,
    PenstockError,
    Unavailable,
    UnreadablePointer,
)
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.journal import Stride
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.bus import (
    HANDSHAKE,
    HEARTBEAT,
    PROGRESS,
    RESULT,
    AnyMessage,
    Bus,
    Confirmed,
    Dispatch,
    Drain,
    Farewell,
    Finished,
    Handshake,
    Heartbeat,
    JobCancel,
    JobProgress,
    Reintroduce,
    Returned,
    Started,
    Subscription,
    WorkerFacts,
    jobs_of,
)
from penstock.ports.executor import PAUSED
from penstock.ports.shared_state import SharedState

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

SUBMIT, CANCEL, DLQ, ALERT = "sys.job.submit", "sys.job.cancel", "sys.job.dlq", "sys.alert"
CHALLENGE = "sys.worker.handshake.challenge"
AUTHENTICATE = "sys.worker.handshake.authenticate"
PREFIX = "cap:"
"""How the engine's ids of CAP workers begin."""
ANY = f"{PREFIX}any"
"""The worker that stands for those that never announced themselves."""
DROPPED, LATE, ALERTS = "dropped_packets", "late_results", "received_alerts"
"""Facts of that worker: how many packets were dropped, by code; results of jobs that had ended;
alerts of others, by code."""
_STATE = "cap/workers/"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:@-]{0,99}(\.[A-Za-z0-9_:@-]{1,99}){0,7}")
_MAX_WORKERS = 10_000
_MAX_TOPICS = 1000
_DELIVERED = 0.25
"""Seconds within which the server has said that nobody listens, if so."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds for which a topic without listeners is paused."""
_ALERT_PAUSE = 1.0
"""Seconds between two alerts of one code about one sender, and between log lines of such."""
_ANSWERED = 10_000
"""Jobs by which a worker's own result, on the bus already, is known."""
_UNCOMMITTED = 10_000
"""Results that wait to be acknowledged; the oldest come again if there are more."""


class CapOptions(Struct, frozen=True, kw_only=True):
    topics: tuple[str, ...] = ()
    """Topics of workers that never announce themselves."""
    slots: int = 64
    """How many jobs such workers are given at once, in all."""
    max_pending: int = 1000
    """Jobs of one tenant that may wait to be accepted; more are refused."""
    jetstream: bool = True
    """Whether submissions and results come out of a stream, if the server has JetStream."""
    replicas: int = 1
    """How many servers of a NATS cluster keep that stream."""
    kill_grace: float = 5.0
    lease: float = 15.0


class CapEngine(Protocol):
    """What the bridge asks of the engine."""

    async def submit(self, request: JobRequest, sender: str) -> None: ...

    async def cancel(self, job_id: str, reason: str, sender: str) -> None: ...

    async def find(self, job_id: str) -> Job | None: ...

    def held(self) -> Iterable[Job]:
        """Jobs that workers have."""

    def serves(self, topic: str) -> bool:
        """Whether a worker is known that serves a topic."""

    def learn(self, topic: str) -> None:
        """From now on, jobs of this topic are accepted."""


@dataclass
class _Worker:
    worker_id: str
    """Of CAP; empty for those that never announced themselves."""
    topics: tuple[str, ...]
    pool: str = "default"
    slots: int = 1
    beats: bool = False
    """Whether it sends heartbeats; until its first one, we do."""
    counts: bool = False
    """Whether it ever said that it is busy."""
    idle_beats: int = 0
    """Heartbeats in a row by which it has nothing to do, though it was given something."""
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    link: int = 1
    subscription: Subscription | None = None
    is_gone: bool = False
    """Nobody listens on its subject, until it is heard of again."""
    is_draining: bool = False
    """It is given nothing more, until a new process says its name."""

    @property
    def name(self) -> str:
        return PREFIX + self.worker_id if self.worker_id else ANY


@dataclass
class _Held:
    """An attempt that a CAP worker has, or is about to be given."""

    request: JobRequest
    attempt: int
    worker: str
    """By the engine's id."""
    dispatch: Dispatch | None = None
    is_sent: bool = False
    has_started: bool = False
    has_artifacts: bool = False
    """Whether progress named some: they may still be on their way into the store."""
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    """By the pointers that its worker named."""
    timer: asyncio.TimerHandle | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.request.job_id, self.attempt


class _Stored(Struct, frozen=True):
    topics: tuple[str, ...]
    pool: str
    slots: int
    beats: bool


class CapBridge:
    """A service: `run` until cancelled."""

    def __init__(
        self,
        nats: NatsOptions,
        options: CapOptions,
        codec: Codec,
        bus: Bus,
        engine: CapEngine,
        state: SharedState,
        pointers: PointerStore | None,
        now: Callable[[], float] = time.time,
        sessions: SessionIssuer | None = None,
    ) -> None:
        """`pointers`: where memory pointers lead; None: others know. `sessions`: of workers that
        prove who they are; None: nobody can."""
        self._nats, self._options, self._codec, self._bus = nats, options, codec, bus
        self._engine, self._state, self._pointers, self._now = engine, state, pointers, now
        self._sessions = sessions
        self._connection = Connection(nats, codec.sender_id, self._subscribe)
        self._workers: dict[str, _Worker] = {}
        """By the engine's id."""
        self._held: dict[str, _Held] = {}
        self._replies = 0
        self._sent: dict[str, tuple[str, int]] = {}
        """Attempts by the last token of their reply subject."""
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._pauses: dict[str, float] = {}
        self._paused: dict[str, str] = {}
        self._pending: Counter[str] = Counter()
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._submitting: set[int] = set()
        """By their number in the stream."""
        self._uncommitted: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """Attempts whose result is being committed, and its receipt, by job."""
        self._alerted: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._storing = asyncio.Lock()
        """Of artifacts: progress and a result may name the same."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.rejected: Counter[int] = Counter()
        """Packets that were dropped, by code."""
        self.alerts: Counter[int] = Counter()
        """Alerts of others, by code."""
        self._told: dict[str, Any] = {}
        self.late = 0
        """Results of jobs that had ended."""

    # -- service -------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._connection.client is not None

    async def run(self) -> None:
        await self._restore()
        beating = asyncio.create_task(self._beat())
        try:
            await self._connection.run()
        finally:
            for task in (beating, *self._tasks):
                task.cancel()
            await asyncio.gather(beating, *self._tasks, return_exceptions=True)
            for held in self._held.values():
                if held.timer is not None:
                    held.timer.cancel()
            for worker in self._workers.values():
                if worker.subscription is not None:
                    await worker.subscription.close()

    async def _restore(self) -> None:
        """Take up the workers of before, and what they run."""
        silent = _Worker("", tuple(self._options.topics), slots=self._options.slots)
        self._workers[ANY] = silent
        if self._sessions is not None:
            await self._sessions.restore()
        for name, value in (await self._state.read_all(_STATE)).items():
            with contextlib.suppress(msgspec.MsgspecError):
                stored = msgspec.msgpack.decode(value, type=_Stored)
                worker_id = name.removeprefix(_STATE)
                fields = (stored.topics, stored.pool, stored.slots, stored.beats)
                self._workers[PREFIX + worker_id] = _Worker(worker_id, *fields)
        topics = dict.fromkeys(silent.topics)
        for job in self._engine.held():
            name = job.worker_id or ""
            if name.startswith(PREFIX) and job.state is JobState.RUNNING:
                held = _Held(job.request, job.attempt, name, is_sent=True, has_started=True)
                self._held[job.job_id] = held
                if name == ANY:
                    topics[job.request.topic] = None
        silent.topics = tuple(topics)
        for worker in self._workers.values():
            self._announce(worker)

    async def _subscribe(self, client: Client) -> None:
        for subject, payload, handle in (
            (PROGRESS, "job_progress", self._on_progress),
            (CANCEL, "job_cancel", self._on_cancel),
            (HEARTBEAT, "heartbeat", self._on_heartbeat),
            (HANDSHAKE, "handshake", self._on_handshake),
            (ALERT, "alert", self._on_alert),
        ):
            await client.subscribe(subject, cb=self._guarded(subject, payload, handle))
        await client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
        if self._sessions is not None:
            for subject in (CHALLENGE, AUTHENTICATE):
                await client.subscribe(subject, queue=stream.QUEUE, cb=self._on_trust_request)
        await self._subscribe_durably(client)
        hello = handshake_pb2.Handshake(
            component_id=self._codec.sender_id,
            role=handshake_pb2.COMPONENT_ROLE_SCHEDULER,
            supported_versions=[packets.VERSION],
            sdk_version="penstock",
        )
        self._say(HANDSHAKE, "hello", handshake=hello)

    async def _subscribe_durably(self, client: Client) -> None:
        kept = {SUBMIT: ("job_request", self._on_submit), RESULT: ("job_result", self._on_result)}
        if self._options.jetstream:
            handlers = {
                subject: self._guarded(subject, *handler, delivery_of)
                for subject, handler in kept.items()
            }
            if await stream.subscribe(client, handlers, self._options.replicas):
                return
            log.warning(
                "CAP: the NATS server %s has no JetStream: submissions and results that are sent"
                " while the engine is away are lost",
                self._nats,
            )
        for subject, handler in kept.items():
            await client.subscribe(subject, queue=stream.QUEUE, cb=self._guarded(subject, *handler))

    async def _beat(self) -> None:
        """For those that don't; and for all while we can't hear them."""
        while True:
            is_deaf = not self.is_connected
            beats: list[AnyMessage] = [
                Heartbeat(one.name)
                for one in self._workers.values()
                if (is_deaf or not one.beats) and not self._is_away(one)
            ]
            self._bus.publish(HEARTBEAT, beats)
            self._tell_facts()
            await asyncio.sleep(self._options.lease / 5)

    # -- the wire ------------------------------------------------------------------

    def _say(
        self, subject: str, trace: str, identity: Any = None, reply: str = "", **payload: Any
    ) -> None:
        data = self._codec.encode(subject, trace, self._now(), identity, **payload)
        self._connection.publish(subject, data, reply)

    def _identity(self, request: JobRequest) -> Any:
        return packets.identity_of(request) if self._codec.is_production else None

    def _guarded(
        self,
        subject: str,
        payload: str,
        handle: Callable[[Any, Any, Delivery | None], Awaitable[bool]],
        delivered: Callable[[Msg], Delivery] | None = None,
    ) -> Callable[[Msg], Awaitable[None]]:
        """Read a packet, and drop it with an alert if it is none that belongs here.

        `handle` says whether the packet may be forgotten now; `delivered` tells how a message came
        out of a stream."""

        async def take(message: Msg) -> None:
            delivery = delivered(message) if delivered is not None else None
            is_done = True
            try:
                packet = self._codec.decode(message.data, subject, self._now(), delivery)
                if packet is None or packet.sender_id == self._codec.sender_id:
                    pass  # a repetition; another engine's, or one of ours
                elif packet.WhichOneof("payload") != payload:
                    said = f"{packet.WhichOneof('payload')} on {subject}"
                    raise Rejected(packets.UNKNOWN_PAYLOAD, said, packet.sender_id)
                else:
                    is_done = await handle(packet, getattr(packet, payload), delivery)
            except Rejected as rejected:
                self._reject(rejected, subject)
            except Exception:
                log.exception("a packet on %s failed", subject)
            if is_done and delivery is not None:
                self._acknowledge(delivery.receipt)

        return take

    async def _on_trust_request(self, message: Msg) -> None:
        """One of the two requests of a worker that proves who it is."""
        sessions = self._sessions
        if sessions is None or not message.reply:
            return
        try:
            if message.subject == CHALLENGE:
                self._connection.publish(message.reply, sessions.challenge(message.data))
                return
            answer, wrong = await sessions.authenticate(message.data)
            self._connection.publish(message.reply, answer)
            if wrong is not None:
                self._reject(wrong)
        except Rejected as rejected:
            self._reject(rejected)
        except Exception:
            log.exception("a trust handshake failed")

    def _check_session(self, packet: Any, delivery: Delivery | None) -> None:
        """Raises Rejected if a worker's packet does not have the session token that it needs."""
        if self._sessions is None or not (packet.auth_token or self._codec.is_production):
            return
        sent_at = self._now() if delivery is None else delivery.stored_at
        if not self._sessions.is_live(packet.sender_id, packet.auth_token, sent_at):
            raise Rejected(packets.BAD_SIGNATURE, "no live session", packet.sender_id[:128])

    def _acknowledge(self, receipt: str) -> None:
        if receipt:
            self._connection.publish(receipt, b"+ACK")

    def _reject(self, rejected: Rejected, subject: str = "") -> None:
        self.rejected[rejected.code] += 1
        if not self._is_first(f"dropped {rejected.code}", rejected.sender):
            return
        log.warning("CAP: dropped (%d, from %r): %s", *_facts(rejected))
        if subject != ALERT:  # else two components that reject each other never end
            self._connection.publish(ALERT, self._codec.alert(ALERT, rejected, self._now()))

    async def _on_alert(self, packet: Any, told: Any, _: Delivery | None) -> bool:
        code = told.error_code_enum  # one of those that CAP has: others are malformed
        self.alerts[code] += 1
        if self._is_first(f"alert {code}", packet.sender_id):
            said = (code, packet.sender_id[:128], told.message[:500])
            log.warning("CAP: alert (%d, from %r): %r", *said)
        return True

    def _is_first(self, what: str, sender: str) -> bool:
        """Whether nothing of the kind was logged about this sender within a second."""
        key, now = (what, sender[:128]), time.monotonic()
        if now - self._alerted.get(key, -_ALERT_PAUSE) < _ALERT_PAUSE:
            return False
        self._alerted[key] = now
        if len(self._alerted) > _MAX_TOPICS:
            self._alerted.popitem(last=False)
        return True

    # -- from clients --------------------------------------------------------------

    async def _on_submit(self, packet: Any, asked: Any, delivery: Delivery | None) -> bool:
        if delivery is not None and delivery.sequence in self._submitting:
            return False
        tenant = asked.tenant_id[:128]
        if self._pending[tenant] >= self._options.max_pending:
            said = f"{self._pending[tenant]} jobs of tenant {tenant or 'default'!r} are waiting"
            self._refuse(packet, packets.EXHAUSTED, f"{said} to be accepted")
            return True
        self._pending[tenant] += 1
        if delivery is not None:
            self._submitting.add(delivery.sequence)
        self._start(self._submit(packet, tenant, delivery))
        return False

    async def _submit(self, packet: Any, tenant: str, delivery: Delivery | None) -> None:
        asked, context_ptr = packet.job_request, None
        # The same when it comes again.
        now, receipt = (
            (self._now(), "") if delivery is None else (delivery.stored_at, delivery.receipt)
        )
        try:
            pointer = asked.context_ptr
            if not pointer or (self._pointers is None and pointer.startswith(DATA)):
                context_ptr = pointer
            elif self._pointers is not None and pointer.startswith(DATA):
                context_ptr = await self._pointers.keep(pointer)
            elif self._pointers is not None and pointer.startswith(SCHEME):
                context_ptr = await self._pointers.uri_of(pointer, packets.tenant_of(packet))
                if context_ptr is None:
                    raise UnreadablePointer("context_ptr", f"{pointer[:200]!r} is not found")
            request = packets.request_of(packet, context_ptr, now)
            check_topic(request.topic)
            if self._codec.is_production:  # who never announced itself is not trusted
                self._engine.learn(request.topic)
            else:
                self._serve_silently(request.topic)
            await self._engine.submit(request, packet.sender_id)
            if self._pointers is not None:
                self._pointers.forget(request.job_id)
            self._acknowledge(receipt)
        except Unavailable as error:
            if delivery is None:  # else it comes again, to us or to the next engine
                self._refuse(packet, packets.code_of(error), error.message)
        except PenstockError as error:
            code = packets.code_of(error)
            if not (code == packets.DUPLICATE and delivery is not None and delivery.is_repeated):
                self._refuse(packet, code, error.message)
            self._acknowledge(receipt)
        finally:
            if delivery is not None:
                self._submitting.discard(delivery.sequence)
            self._pending[tenant] -= 1
            if not self._pending[tenant]:
                del self._pending[tenant]

    def _refuse(self, packet: Any, code: int, message: str) -> None:
        self._reject(Rejected(code, message, packet.sender_id))
        if code == packets.DUPLICATE:
            return  # there is such a job: this is not its result
        said = packets.refused(packet.job_request.job_id, self._codec.sender_id, code, message)
        for subject in (RESULT, DLQ):
            self._say(subject, packet.trace_id, packet.identity, job_result=said)

    async def _on_cancel(self, packet: Any, asked: Any, _: Delivery | None) -> bool:
        tenant = self._codec.tenant(packet)
        self._start(self._cancel(asked.job_id, asked.reason, packet.sender_id, tenant))
        return True

    async def _cancel(self, job_id: str, reason: str, sender: str, tenant: str) -> None:
        try:
            job = await self._engine.find(job_id) if tenant else None
            if job is not None and job.request.tenant != tenant:
                raise NotFound(f"there is no job {job_id[:200]!r}")
            await self._engine.cancel(job_id, reason[:500], sender)
        except PenstockError as error:
            self._reject(Rejected(packets.code_of(error), error.message, sender))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- workers come and go -------------------------------------------------------

    async def _on_handshake(self, packet: Any, hello: Any, delivery: Delivery | None) -> bool:
        if hello.role != handshake_pb2.COMPONENT_ROLE_WORKER:
            return True
        self._check_session(packet, delivery)
        if hello.supported_versions and packets.VERSION not in hello.supported_versions:
            said = f"supported_versions are {[*hello.supported_versions]}"
            raise Rejected(packets.VERSION_MISMATCH, said, packet.sender_id)
        names = {*hello.ready_topics, *(name for name, has in hello.capabilities.items() if has)}
        await self._know(packet.sender_id, _topics(names), came=True)
        return True

    async def _on_heartbeat(self, packet: Any, beat: Any, delivery: Delivery | None) -> bool:
        self._check_session(packet, delivery)
        name = PREFIX + packet.sender_id
        if name not in self._workers:
            topics = _topics(beat.capabilities)
            if not topics:
                return True  # it gets jobs by its topics' subjects
            await self._know(packet.sender_id, topics)
        worker = self._workers[name]
        pool = beat.pool if _ID.fullmatch(beat.pool) else "default"
        slots = min(max(1, beat.max_parallel_jobs), 10_000)
        if worker.is_gone or (worker.pool, worker.slots, worker.beats) != (pool, slots, True):
            worker.pool, worker.slots, worker.beats = pool, slots, True
            worker.is_gone = False
            self._announce(worker)
            await self._store(worker)
        if not self._is_away(worker):
            self._bus.publish(HEARTBEAT, [Heartbeat(name, beat.active_jobs)])
            self._notice_losses(worker, beat.active_jobs)
        return True

    def _notice_losses(self, worker: _Worker, active: int) -> None:
        """A worker that says twice that it has nothing to do does not run what we gave it."""
        given = [one for one in self._held.values() if one.worker == worker.name and one.is_sent]
        worker.counts = worker.counts or active > 0
        worker.idle_beats = worker.idle_beats + 1 if worker.counts and given and not active else 0
        if worker.idle_beats >= 3:
            worker.idle_beats = 0
            for held in given:
                self._give_back(held, "its worker says that it has nothing to do", charged=True)

    async def _know(self, worker_id: str, topics: tuple[str, ...], came: bool = False) -> None:
        name = PREFIX + worker_id
        if not _ID.fullmatch(worker_id) or name == ANY:
            raise Rejected(packets.MALFORMED, "the id can't be a worker's", worker_id[:128])
        worker = self._workers.get(name)
        if worker is None:
            if len(self._workers) >= _MAX_WORKERS:
                raise Rejected(packets.EXHAUSTED, "there are too many workers", worker_id)
            worker = self._workers[name] = _Worker(worker_id, topics)
        elif came:  # its process began anew: what the one before ran is lost
            worker.link += 1
            if worker.is_draining:
                worker.session, worker.is_draining = secrets.token_hex(8), False
            for held in [one for one in self._held.values() if one.worker == name]:
                self._drop(held)
        worker.topics, worker.is_gone = topics or worker.topics, False
        self._announce(worker)
        silent = self._workers[ANY]
        left = tuple(t for t in silent.topics if t not in topics or t in self._options.topics)
        if left != silent.topics:
            silent.topics = left
            self._announce(silent)
        await self._store(worker)

    async def _store(self, worker: _Worker) -> None:
        stored = _Stored(worker.topics, worker.pool, worker.slots, worker.beats)
        await self._state.write(_STATE + worker.worker_id, msgspec.msgpack.encode(stored))

    def _announce(self, worker: _Worker) -> None:
        name = worker.name
        if self._is_away(worker):
            return
        if worker.subscription is None:
            worker.subscription = self._bus.subscribe(
                jobs_of(name), lambda messages: self._take(worker, messages)
            )
        held = tuple(one.key for one in self._held.values() if one.worker == name)
        said = (name, worker.pool, worker.topics, worker.slots, {"cap": "yes"}, held)
        hello = Handshake(
            *said, "NATS", session=worker.session, link=worker.link, reports_starts=False
        )
        self._bus.publish(HANDSHAKE, [hello])

    def _serve_silently(self, topic: str) -> None:
        """Have jobs of a topic that no worker announced sent to the topic's subject."""
        silent = self._workers[ANY]
        if topic in silent.topics or self._engine.serves(topic):
            return
        if len(silent.topics) < _MAX_TOPICS:
            silent.topics = (*silent.topics, topic)
            self._engine.learn(topic)
            self._announce(silent)

    def _is_away(self, worker: _Worker) -> bool:
        """Whether nothing is said in its name."""
        holds = any(one.worker == worker.name for one in self._held.values())
        return worker.is_gone or (worker.is_draining and not holds)

    def _lose(self, worker: _Worker) -> None:
        """It is gone: it may come back and say so."""
        worker.is_gone = True
        lost = Farewell(worker.name, lost=True, link=worker.link, session=worker.session)
        self._bus.publish(HANDSHAKE, [lost])

    # -- what the engine wants of a worker -----------------------------------------

    async def _take(self, worker: _Worker, messages: list[AnyMessage]) -> None:
        for message in messages:
            try:
                self._take_one(worker, message)
            except Exception:  # the others are still to be read
                log.exception("a message for %s failed", worker.name)

    def _take_one(self, worker: _Worker, message: AnyMessage) -> None:
        match message:
            case Dispatch():
                self._dispatch(worker, message)
            case Confirmed(jobs):
                for job_id, attempt in jobs:
                    held = self._held.get(job_id)
                    if held is not None and held.attempt == attempt and not held.is_sent:
                        self._send(held)
            case JobCancel(job_id, attempt, reason, _):
                self._end(job_id, attempt, worker, reason)
            case Reintroduce():
                self._announce(worker)
            case Drain():
                worker.is_draining = True
                gone = not any(one.worker == worker.name for one in self._held.values())
                self._say_farewell(worker, gone=gone)

    def _dispatch(self, worker: _Worker, dispatch: Dispatch) -> None:
        before = self._held.get(dispatch.request.job_id)
        if before is not None:
            if before.attempt >= dispatch.attempt:
                return  # a bus may deliver twice
            self._drop(before)
        held = _Held(dispatch.request, dispatch.attempt, worker.name, dispatch)
        self._held[dispatch.request.job_id] = held
        if self._sessions is not None and self._codec.is_production:
            tenant = self._sessions.tenant(worker.worker_id)
            if tenant != dispatch.request.tenant:  # the worker would drop it without a word
                self._finish_denied(held, f"{worker.name} has a session of tenant {tenant!r}")
                return
        if dispatch.request.idempotent:
            self._send(held)
        elif dispatch.started:
            held.has_started = True
            self._send(held)
        else:
            held.has_started = True
            self._bus.publish(RESULT, [Started(*held.key, worker.name, confirm=True)])

    def _send(self, held: _Held) -> None:
        dispatch, request = held.dispatch, held.request
        assert dispatch is not None
        seconds, now = dispatch.timeout, self._now()
        if dispatch.deadline is not None:
            seconds = min(seconds, dispatch.deadline - now)
        pointer = request.context_ptr
        if self._pointers is not None and (pointer or packets.TRACE not in request.env):
            pointer = f"{SCHEME}ctx:{request.job_id}"
        worker_id = "" if held.worker == ANY else held.worker.removeprefix(PREFIX)
        cap = packets.dispatched(
            request,
            attempt=held.attempt,
            worker_id=worker_id,
            seconds=seconds,
            context_ptr=pointer,
            constraints=dispatch.constraints,
            dispatch_id=self._codec.dispatch_id(*held.key),
        )
        self._replies += 1
        token = str(self._replies)
        self._sent[token] = held.key
        subject = f"worker.{worker_id}.jobs" if worker_id else request.topic
        held.is_sent = True
        self._say(
            subject,
            packets.trace_of(request),
            self._identity(request),
            f"{self._inbox}.{token}",
            job_request=cap,
        )
        held.timer = asyncio.get_running_loop().call_later(_DELIVERED, self._delivered, token, held)

    async def _on_reply(self, message: Msg) -> None:
        key = self._sent.pop(message.subject.rpartition(".")[2], None)
        held = self._held.get(key[0]) if key else None
        if held is None or held.key != key or (message.headers or {}).get("Status") != "503":
            return
        worker, topic = self._workers[held.worker], held.request.topic
        if worker.worker_id:
            self._give_back(held, f"worker.{worker.worker_id}.jobs has no subscriber")
            self._lose(worker)
        else:
            pause = min(_LONGEST_PAUSE, 2 * self._pauses.get(topic, _FIRST_PAUSE / 2))
            self._pauses[topic] = pause
            self._paused[topic] = f"no CAP worker subscribes to {topic}"
            asyncio.get_running_loop().call_later(pause, self._resume, topic)
            self._tell_facts()
            self._give_back(held, self._paused[topic])

    def _tell_facts(self) -> None:
        silent = self._workers[ANY]
        dropped, alerts = (
            {str(code): count for code, count in counted.items()}
            for counted in (self.rejected, self.alerts)
        )
        facts = {PAUSED: dict(self._paused), DROPPED: dropped, LATE: self.late, ALERTS: alerts}
        if facts != self._told:
            self._told = facts
            self._bus.publish(RESULT, [WorkerFacts(ANY, silent.session, facts)])

    def _resume(self, topic: str) -> None:
        if self._paused.pop(topic, None) is not None:
            self._tell_facts()

    def _delivered(self, token: str, held: _Held) -> None:
        """Nobody said that there is no one: it is as good as started."""
        if self._sent.pop(token, None) is not None:
            self._pauses.pop(held.request.topic, None)
            self._has_started(held)

    def _has_started(self, held: _Held) -> None:
        if not held.has_started:
            held.has_started = True
            self._bus.publish(RESULT, [Started(*held.key, held.worker)])

    def _give_back(self, held: _Held, reason: str, *, charged: bool = False) -> None:
        self._drop(held)
        self._bus.publish(RESULT, [Returned(*held.key, held.worker, reason, charged)])

    def _say_farewell(self, worker: _Worker, *, gone: bool) -> None:
        self._bus.publish(HANDSHAKE, [Farewell(worker.name, session=worker.session, gone=gone)])

    def _finish(self, held: _Held, result: JobResult) -> None:
        self._drop(held)
        self._bus.publish(RESULT, [Finished(result)])
        worker = self._workers.get(held.worker)
        if worker is not None and worker.is_draining and self._is_away(worker):
            self._say_farewell(worker, gone=True)

    def _drop(self, held: _Held) -> None:
        if self._held.get(held.request.job_id) is held:
            del self._held[held.request.job_id]
        if held.timer is not None:
            held.timer.cancel()

    def _end(self, job_id: str, attempt: int, worker: _Worker, reason: str) -> None:
        held = self._held.get(job_id)
        if held is None or held.attempt != attempt:
            self._finish_cancelled(_Held(JobRequest(job_id=job_id, topic=""), attempt, worker.name))
            return
        if not held.is_sent:
            self._finish_cancelled(held)
            return
        cancel = job_pb2.JobCancel(job_id=job_id, reason=reason, requested_by=self._codec.sender_id)
        cancel.dispatch.dispatch_id = self._codec.dispatch_id(*held.key)
        cancel.dispatch.attempt = attempt
        cancel.dispatch.assigned_worker_id = worker.worker_id
        request = held.request
        self._say(CANCEL, packets.trace_of(request), self._identity(request), job_cancel=cancel)
        if held.timer is not None:
            held.timer.cancel()
        held.timer = asyncio.get_running_loop().call_later(
            self._options.kill_grace, self._finish_cancelled, held
        )

    def _finish_denied(self, held: _Held, message: str) -> None:
        result = JobResult(
            job_id=held.request.job_id,
            status=JobState.FAILED,
            worker_id=held.worker,
            attempt=held.attempt,
            error_code="PERMISSION_DENIED",
            error_message=message,
        )
        self._finish(held, result)

    def _finish_cancelled(self, held: _Held) -> None:
        result = JobResult(
            job_id=held.request.job_id,
            status=JobState.CANCELLED,
            worker_id=held.worker,
            attempt=held.attempt,
            error_code="CANCELLED",
            error_message="the CAP worker was asked to end it" if held.is_sent else "not begun",
        )
        self._finish(held, result)

    # -- what workers say ----------------------------------------------------------

    async def _held_by(self, packet: Any, told: Any, delivery: Delivery | None) -> _Held | None:
        """The attempt that a worker speaks of. Raises Rejected."""
        self._check_session(packet, delivery)
        job_id, dispatch = told.job_id, told.dispatch
        held, sender = self._held.get(job_id), packet.sender_id
        if held is None or not held.is_sent:
            if held is None and await self._engine.find(job_id) is None:
                raise Rejected(packets.NOT_FOUND, f"there is no job {job_id[:200]!r}", sender)
            self.late += 1
            return None
        if held.worker not in (ANY, PREFIX + sender):
            said = f"job {job_id} is with {held.worker}, not with this worker"
            raise Rejected(packets.DENIED, said, sender)
        if self._codec.tenant(packet) not in ("", held.request.tenant):
            said = f"job {job_id} is not of tenant {packet.identity.tenant_id[:128]!r}"
            raise Rejected(packets.DENIED, said, sender)
        is_fenced = self._codec.is_production
        if is_fenced and dispatch.dispatch_id != self._codec.dispatch_id(*held.key):
            self.late += 1
            return None
        if dispatch.attempt and dispatch.attempt != held.attempt:
            self.late += 1
            return None
        return held

    async def _on_progress(self, packet: Any, told: Any, delivery: Delivery | None) -> bool:
        held = await self._held_by(packet, told, delivery)
        if held is not None:
            self._has_started(held)
            if told.artifact_ptrs:
                held.has_artifacts = True
                self._start(self._keep_artifacts(held, told.artifact_ptrs))
            fraction = min(max(told.percent, 0), 100) / 100
            self._bus.publish(PROGRESS, [JobProgress(*held.key, fraction, told.message[:500])])
        return True

    async def _on_result(self, packet: Any, told: Any, delivery: Delivery | None) -> bool:
        if delivery is not None and delivery.is_repeated and told.job_id in self._uncommitted:
            return False
        held = await self._held_by(packet, told, delivery)
        if held is None:
            return True
        self._has_started(held)
        if not packets.has_ended(told):
            return True
        if delivery is not None:
            self._uncommitted[told.job_id] = held.attempt, delivery.receipt
            if len(self._uncommitted) > _UNCOMMITTED:
                self._uncommitted.popitem(last=False)
        if told.artifact_ptrs or held.has_artifacts:
            self._start(self._finish_with_artifacts(held, told))
        else:
            await self._finish_as_told(held, told)
        return False

    async def _finish_with_artifacts(self, held: _Held, told: Any) -> None:
        """As long as storing takes, other results are not kept waiting."""
        await self._keep_artifacts(held, told.artifact_ptrs)
        if self._held.get(told.job_id) is held:
            await self._finish_as_told(held, told)

    async def _finish_as_told(self, held: _Held, told: Any) -> None:
        pointer, missing = told.result_ptr or None, False
        if pointer is not None and self._pointers is not None and pointer.startswith(SCHEME):
            pointer = await self._pointers.uri_of(told.result_ptr, held.request.tenant)
            missing = pointer is None
        result = packets.result_of(
            told,
            attempt=held.attempt,
            worker_id=held.worker,
            result_ptr=pointer,
            artifacts=tuple(held.artifacts.values()),
        )
        if missing and result.status is JobState.SUCCEEDED:
            result = msgspec.structs.replace(
                result,
                status=JobState.FAILED,
                error_code="UNREADABLE_POINTER",
                error_message=f"the result {told.result_ptr[:200]!r} is not found",
            )
        else:
            self._answered[told.job_id] = None
            if len(self._answered) > _ANSWERED:
                self._answered.popitem(last=False)
        self._finish(held, result)

    async def _keep_artifacts(self, held: _Held, named: Iterable[str]) -> None:
        """Store what a worker's artifact pointers lead to; what can't be stored is left out."""
        if self._pointers is None:
            return
        async with self._storing:
            for pointer in named:
                if pointer in held.artifacts:
                    continue
                name = artifact_name(pointer, {one.name for one in held.artifacts.values()})
                try:
                    check_count(len(held.artifacts) + 1)
                    held.artifacts[pointer] = await self._pointers.keep_artifact(
                        name, pointer, held.request.tenant
                    )
                except Exception as error:  # the result counts without it
                    said = pointer[:200], held.request.job_id, str(error)[:500]
                    log.warning("CAP: the artifact %r of %s is not kept: %s", *said)

    # -- how jobs end --------------------------------------------------------------

    def hear(self, strides: Iterable[Stride]) -> None:
        """Tell clients how their jobs ended, unless the worker did."""
        for stride in strides:
            if self._uncommitted:
                self._committed(stride)
            if stride.path.after in TERMINAL:
                for job in stride.jobs:
                    if packets.TRACE in job.request.env:
                        try:
                            self._tell(job)
                        except Exception:  # what ends well here must not end the engine
                            log.exception("can't tell how %s ended", job.job_id)

    def _committed(self, stride: Stride) -> None:
        """Acknowledge the results that these moves were made by."""
        for job in stride.jobs:
            known = self._uncommitted.get(job.job_id)
            if known is not None and (job.state is not JobState.RUNNING or job.attempt > known[0]):
                del self._uncommitted[job.job_id]
                self._acknowledge(known[1])

    def _tell(self, job: Job) -> None:
        if self._pointers is not None:
            self._pointers.forget(job.job_id)
        is_told = job.job_id in self._answered
        self._answered.pop(job.job_id, None)
        is_dead = job.state is not JobState.SUCCEEDED and job.successor is None
        if is_told and not is_dead:
            return
        pointer = job.result.result_ptr if job.result is not None else None
        if pointer and self._pointers is not None:
            pointer = f"{SCHEME}res:{job.job_id}"
        said = packets.ended(
            job.job_id, job.state, self._codec.sender_id, job.result, pointer or ""
        )
        if self._pointers is not None:
            said.artifact_ptrs.extend(artifact_pointers(job))
        trace = packets.trace_of(job.request)
        identity = self._identity(job.request)
        if not is_told:
            self._say(RESULT, trace, identity, job_result=said)
        if is_dead:
            self._say(DLQ, trace, identity, job_result=said)


def _topics(names: Iterable[str]) -> tuple[str, ...]:
    """Those that are topics."""
    found = []
    for name in sorted(set(names)):
        with contextlib.suppress(InvalidRequest):
            check_topic(name)
            found.append(name)
    return tuple(found[:_MAX_TOPICS])


def _facts(rejected: Rejected) -> tuple[int, str, str]:
    return rejected.code, rejected.sender, rejected.message
