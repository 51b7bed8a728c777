"""A CAP control plane: clients and workers written with CAP's SDKs, on a NATS server.

To the engine, a CAP worker is a worker like any other: this bridge speaks for it on the engine's
bus. It introduces it, passes jobs, cancellations, progress and results, and decides nothing:
states, attempts, leases and time limits are the engine's.

What CAP workers don't do, the bridge makes up for:

- *They don't say that they start.* A job that may run only once is reported as started, and that
  is durable, before it is sent. So a worker that dies can't lead to a second run.
- *They don't always announce themselves.* Jobs of a topic that nobody announced go to the topic's
  own subject, in the name of the worker `cap:any`. If nobody listens there, the NATS server says
  so, the job goes back, and the topic is paused for a while.
- *They may ignore a cancellation.* After a grace the job is reported as cancelled; what its worker
  says later does not count.
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

from penstock.adapters.nats import packets
from penstock.adapters.nats.connection import (
    NatsOptions,
    close_client,
    lost_as_not_running,
    open_client,
)
from penstock.adapters.nats.packets import Codec, Rejected
from penstock.adapters.nats.pointers import SCHEME, PointerStore
from penstock.core.check import check_topic
from penstock.core.errors import InvalidRequest, PenstockError, UnreadablePointer
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
from penstock.ports.clock import backoff
from penstock.ports.executor import PAUSED
from penstock.ports.shared_state import SharedState

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

SUBMIT, CANCEL, DLQ, ALERT = "sys.job.submit", "sys.job.cancel", "sys.job.dlq", "sys.alert"
_QUEUE = "cordum-scheduler"
PREFIX = "cap:"
"""How the engine's ids of CAP workers begin."""
ANY = f"{PREFIX}any"
"""The worker that stands for those that never announced themselves."""
DROPPED, LATE = "dropped_packets", "late_results"
"""Facts of that worker: how many packets were dropped, by code; results of jobs that had ended."""
_STATE = "cap/workers/"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:@-]{0,99}(\.[A-Za-z0-9_:@-]{1,99}){0,7}")
_MAX_WORKERS = 10_000
_MAX_TOPICS = 1000
_DELIVERED = 0.25
"""Seconds within which the server has said that nobody listens, if so."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds for which a topic without listeners is paused."""
_ALERT_PAUSE = 1.0
"""Seconds between two alerts of one code about one sender."""
_ANSWERED = 10_000
"""Jobs by which a worker's own result, on the bus already, is known."""


class CapOptions(Struct, frozen=True, kw_only=True):
    topics: tuple[str, ...] = ()
    """Topics of workers that never announce themselves."""
    slots: int = 64
    """How many jobs such workers are given at once, in all."""
    max_pending: int = 1000
    """Jobs of one tenant that may wait to be accepted; more are refused."""
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
    ) -> None:
        """`pointers`: where memory pointers lead; None: others know."""
        self._nats, self._options, self._codec, self._bus = nats, options, codec, bus
        self._engine, self._state, self._pointers, self._now = engine, state, pointers, now
        self._client: Client | None = None
        self._lost = asyncio.Event()
        self._workers: dict[str, _Worker] = {}
        """By the engine's id."""
        self._held: dict[str, _Held] = {}
        self._out: asyncio.Queue[tuple[str, bytes, str]] = asyncio.Queue()
        self._replies = 0
        self._sent: dict[str, tuple[str, int]] = {}
        """Attempts by the last token of their reply subject."""
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._pauses: dict[str, float] = {}
        self._paused: dict[str, str] = {}
        self._pending: Counter[str] = Counter()
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._alerted: OrderedDict[tuple[int, str], float] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self.rejected: Counter[int] = Counter()
        """Packets that were dropped, by code."""
        self._told: dict[str, Any] = {}
        self.late = 0
        """Results of jobs that had ended."""

    # -- service -------------------------------------------------------------------

    async def run(self) -> None:
        await self._restore()
        sending = asyncio.create_task(self._send_all())
        beating = asyncio.create_task(self._beat())
        try:
            await self._stay_connected()
        finally:
            for task in (sending, beating, *self._tasks):
                task.cancel()
            await asyncio.gather(sending, beating, *self._tasks, return_exceptions=True)
            for held in self._held.values():
                if held.timer is not None:
                    held.timer.cancel()
            for worker in self._workers.values():
                if worker.subscription is not None:
                    await worker.subscription.close()
            if self._client is not None:
                await close_client(self._client)

    async def _restore(self) -> None:
        """Take up the workers of before, and what they run."""
        silent = _Worker("", tuple(self._options.topics), slots=self._options.slots)
        self._workers[ANY] = silent
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

    async def _stay_connected(self) -> None:
        pauses = backoff(0.1, 2.0, jitter=0.5)
        while True:
            try:
                await self._connect()
            except PenstockError as error:
                log.warning("CAP: %s", error)
                await asyncio.sleep(next(pauses))
                continue
            pauses = backoff(0.1, 2.0, jitter=0.5)
            await self._lost.wait()
            self._client = None
            log.warning("CAP: lost the connection to NATS; reconnecting")

    async def _connect(self) -> None:
        lost = self._lost = asyncio.Event()
        client = await open_client(self._nats, self._codec.sender_id, lost.set)
        try:
            with lost_as_not_running(self._nats):
                for subject, payload, handle, queue in (
                    (SUBMIT, "job_request", self._on_submit, _QUEUE),
                    (RESULT, "job_result", self._on_result, _QUEUE),
                    (PROGRESS, "job_progress", self._on_progress, ""),
                    (CANCEL, "job_cancel", self._on_cancel, ""),
                    (HEARTBEAT, "heartbeat", self._on_heartbeat, ""),
                    (HANDSHAKE, "handshake", self._on_handshake, ""),
                ):
                    callback = self._guarded(payload, handle)
                    await client.subscribe(subject, queue=queue, cb=callback)
                await client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
                await client.flush()
        except BaseException:
            await close_client(client)
            raise
        self._client = client
        hello = handshake_pb2.Handshake(
            component_id=self._codec.sender_id,
            role=handshake_pb2.COMPONENT_ROLE_SCHEDULER,
            supported_versions=[packets.VERSION],
            sdk_version="penstock",
        )
        self._publish(HANDSHAKE, self._codec.encode("hello", self._now(), handshake=hello))

    async def _beat(self) -> None:
        """For those that don't; and for all while we can't hear them."""
        while True:
            is_deaf = self._client is None
            beats: list[AnyMessage] = [
                Heartbeat(one.name)
                for one in self._workers.values()
                if (is_deaf or not one.beats) and not self._is_away(one)
            ]
            self._bus.publish(HEARTBEAT, beats)
            self._tell_facts()
            await asyncio.sleep(self._options.lease / 5)

    # -- the wire ------------------------------------------------------------------

    def _publish(self, subject: str, data: bytes, reply: str = "") -> None:
        self._out.put_nowait((subject, data, reply))

    async def _send_all(self) -> None:
        while True:
            subject, data, reply = await self._out.get()
            while True:
                client = self._client
                try:
                    if client is not None:
                        await client.publish(subject, data, reply=reply)
                        break
                except Exception as error:  # a closed connection has many names
                    if client is not None and client.is_connected:
                        log.error(
                            "CAP: can't publish %d bytes on %s: %s", len(data), subject, error
                        )
                        break
                await asyncio.sleep(0.05)

    def _guarded(
        self, payload: str, handle: Callable[[Any, Any], Awaitable[None]]
    ) -> Callable[[Msg], Awaitable[None]]:
        """Read a packet, and drop it with an alert if it is none that belongs here."""

        async def take(message: Msg) -> None:
            try:
                packet = self._codec.decode(message.data, self._now())
                if packet.sender_id == self._codec.sender_id:
                    return  # another engine's, or an old one of ours
                if packet.WhichOneof("payload") != payload:
                    said = f"{packet.WhichOneof('payload')} on {message.subject}"
                    raise Rejected(packets.UNKNOWN_PAYLOAD, said, packet.sender_id)
                await handle(packet, getattr(packet, payload))
            except Rejected as rejected:
                self._reject(rejected)
            except Exception:
                log.exception("a packet on %s failed", message.subject)

        return take

    def _reject(self, rejected: Rejected) -> None:
        self.rejected[rejected.code] += 1
        key, now = (rejected.code, rejected.sender), time.monotonic()
        if now - self._alerted.get(key, -_ALERT_PAUSE) < _ALERT_PAUSE:
            return
        self._alerted[key] = now
        if len(self._alerted) > _MAX_TOPICS:
            self._alerted.popitem(last=False)
        log.warning("CAP: dropped (%d, from %r): %s", *_facts(rejected))
        self._publish(ALERT, self._codec.alert(rejected, self._now()))

    # -- from clients --------------------------------------------------------------

    async def _on_submit(self, packet: Any, asked: Any) -> None:
        tenant = asked.tenant_id[:128]
        if self._pending[tenant] >= self._options.max_pending:
            said = f"{self._pending[tenant]} jobs of tenant {tenant or 'default'!r} are waiting"
            self._refuse(packet, packets.EXHAUSTED, f"{said} to be accepted")
            return
        self._pending[tenant] += 1
        self._start(self._submit(packet, tenant))

    async def _submit(self, packet: Any, tenant: str) -> None:
        asked, context_ptr = packet.job_request, None
        try:
            pointer = asked.context_ptr
            if not pointer:
                context_ptr = ""
            elif self._pointers is not None and pointer.startswith(SCHEME):
                context_ptr = await self._pointers.uri_of(pointer)
                if context_ptr is None:
                    raise UnreadablePointer("context_ptr", f"{pointer[:200]!r} is not found")
            request = packets.request_of(packet, context_ptr, self._now())
            check_topic(request.topic)
            if not self._engine.serves(request.topic):
                self._serve_silently(request.topic)
            await self._engine.submit(request, packet.sender_id)
            if self._pointers is not None:
                self._pointers.forget(request.job_id)
        except PenstockError as error:
            self._refuse(packet, packets.code_of(error), error.message)
        finally:
            self._pending[tenant] -= 1
            if not self._pending[tenant]:
                del self._pending[tenant]

    def _refuse(self, packet: Any, code: int, message: str) -> None:
        self._reject(Rejected(code, message, packet.sender_id))
        if code == packets.DUPLICATE:
            return  # there is such a job: this is not its result
        said = packets.refused(packet.job_request.job_id, self._codec.sender_id, code, message)
        data = self._codec.encode(packet.trace_id, self._now(), job_result=said)
        self._publish(RESULT, data)
        self._publish(DLQ, data)

    async def _on_cancel(self, packet: Any, asked: Any) -> None:
        self._start(self._cancel(asked.job_id, asked.reason, packet.sender_id))

    async def _cancel(self, job_id: str, reason: str, sender: str) -> None:
        try:
            await self._engine.cancel(job_id, reason[:500], sender)
        except PenstockError as error:
            self._reject(Rejected(packets.code_of(error), error.message, sender))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- workers come and go -------------------------------------------------------

    async def _on_handshake(self, packet: Any, hello: Any) -> None:
        if hello.role != handshake_pb2.COMPONENT_ROLE_WORKER:
            return
        if hello.supported_versions and packets.VERSION not in hello.supported_versions:
            said = f"supported_versions are {[*hello.supported_versions]}"
            raise Rejected(packets.VERSION_MISMATCH, said, packet.sender_id)
        names = {*hello.ready_topics, *(name for name, has in hello.capabilities.items() if has)}
        await self._know(packet.sender_id, _topics(names), came=True)

    async def _on_heartbeat(self, packet: Any, beat: Any) -> None:
        name = PREFIX + packet.sender_id
        if name not in self._workers:
            topics = _topics(beat.capabilities)
            if not topics:
                return  # it gets jobs by its topics' subjects
            await self._know(packet.sender_id, topics)
        worker = self._workers[name]
        pool = beat.pool if _ID.fullmatch(beat.pool) else "default"
        slots = min(max(1, beat.max_parallel_jobs), 10_000)
        if worker.is_gone or (worker.pool, worker.slots, worker.beats) != (pool, slots, True):
            worker.pool, worker.slots, worker.beats = pool, slots, True
            worker.is_gone = False
            self._announce(worker)
            await self._store(worker)
        if self._is_away(worker):
            return
        self._bus.publish(HEARTBEAT, [Heartbeat(name, beat.active_jobs)])
        self._notice_losses(worker, beat.active_jobs)

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
        hello = Handshake(*said, "NATS", session=worker.session, link=worker.link)
        self._bus.publish(HANDSHAKE, [hello])

    def _serve_silently(self, topic: str) -> None:
        silent = self._workers[ANY]
        if topic not in silent.topics and len(silent.topics) < _MAX_TOPICS:
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
        if dispatch.request.idempotent:
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
        if pointer and self._pointers is not None:
            pointer = f"{SCHEME}ctx:{request.job_id}"
        worker_id = "" if held.worker == ANY else held.worker.removeprefix(PREFIX)
        cap = packets.dispatched(
            request,
            attempt=held.attempt,
            worker_id=worker_id,
            seconds=seconds,
            context_ptr=pointer,
            constraints=dispatch.constraints,
        )
        self._replies += 1
        token = str(self._replies)
        self._sent[token] = held.key
        subject = f"worker.{worker_id}.jobs" if worker_id else request.topic
        data = self._codec.encode(packets.trace_of(request), now, job_request=cap)
        held.is_sent = True
        self._publish(subject, data, f"{self._inbox}.{token}")
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
        dropped = {str(code): count for code, count in self.rejected.items()}
        facts = {PAUSED: dict(self._paused), DROPPED: dropped, LATE: self.late}
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
        trace = packets.trace_of(held.request)
        self._publish(CANCEL, self._codec.encode(trace, self._now(), job_cancel=cancel))
        if held.timer is not None:
            held.timer.cancel()
        held.timer = asyncio.get_running_loop().call_later(
            self._options.kill_grace, self._finish_cancelled, held
        )

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

    async def _held_by(self, packet: Any, job_id: str, dispatch: Any) -> _Held | None:
        """The attempt that a worker speaks of. Raises Rejected."""
        held, sender = self._held.get(job_id), packet.sender_id
        if held is None or not held.is_sent:
            if held is None and await self._engine.find(job_id) is None:
                raise Rejected(packets.NOT_FOUND, f"there is no job {job_id[:200]!r}", sender)
            self.late += 1
            return None
        if held.worker not in (ANY, PREFIX + sender):
            said = f"job {job_id} is with {held.worker}, not with this worker"
            raise Rejected(packets.DENIED, said, sender)
        if dispatch.attempt and dispatch.attempt != held.attempt:
            self.late += 1
            return None
        return held

    async def _on_progress(self, packet: Any, told: Any) -> None:
        held = await self._held_by(packet, told.job_id, told.dispatch)
        if held is not None:
            self._has_started(held)
            fraction = min(max(told.percent, 0), 100) / 100
            self._bus.publish(PROGRESS, [JobProgress(*held.key, fraction, told.message[:500])])

    async def _on_result(self, packet: Any, told: Any) -> None:
        held = await self._held_by(packet, told.job_id, told.dispatch)
        if held is None:
            return
        self._has_started(held)
        if not packets.has_ended(told):
            return
        pointer, missing = told.result_ptr or None, False
        if pointer is not None and self._pointers is not None and pointer.startswith(SCHEME):
            pointer = await self._pointers.uri_of(told.result_ptr)
            missing = pointer is None
        result = packets.result_of(
            told, attempt=held.attempt, worker_id=held.worker, result_ptr=pointer
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

    # -- how jobs end --------------------------------------------------------------

    def hear(self, strides: Iterable[Stride]) -> None:
        """Tell clients how their jobs ended, unless the worker did."""
        for stride in strides:
            if stride.path.after in TERMINAL:
                for job in stride.jobs:
                    if packets.TRACE in job.request.env:
                        try:
                            self._tell(job)
                        except Exception:  # what ends well here must not end the engine
                            log.exception("can't tell how %s ended", job.job_id)

    def _tell(self, job: Job) -> None:
        pointer = job.result.result_ptr if job.result is not None else None
        if pointer and self._pointers is not None:
            pointer = f"{SCHEME}res:{job.job_id}"
        said = packets.ended(
            job.job_id, job.state, self._codec.sender_id, job.result, pointer or ""
        )
        trace = packets.trace_of(job.request)
        data = self._codec.encode(trace, self._now(), job_result=said)
        if self._answered.pop(job.job_id, 0) == 0:
            self._publish(RESULT, data)
        if job.state is not JobState.SUCCEEDED and job.successor is None:
            self._publish(DLQ, data)
        if self._pointers is not None:
            self._pointers.forget(job.job_id)


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
