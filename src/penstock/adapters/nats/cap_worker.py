"""A worker of ours under a CAP control plane that is not ours.

`CapWorker` is to our worker what the engine is elsewhere: it gives it jobs and takes its reports,
over a bus inside the process. To the control plane it is a CAP worker, with all that the protocol
asks for: a handshake, heartbeats until it drains, RUNNING when a job really starts, progress,
cancellation, and one result for each dispatch. A dispatch that comes twice is run once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

from cap.pb.cordum.agent.v1 import handshake_pb2, heartbeat_pb2, job_pb2
from msgspec import Struct

from penstock.adapters.nats import packets
from penstock.adapters.nats.codec import Codec
from penstock.adapters.nats.connection import Connection, NatsOptions
from penstock.adapters.nats.packets import Rejected
from penstock.adapters.nats.pointers import SCHEME
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable, UnreadablePointer
from penstock.core.job import RETRY_REQUESTED, JobRequest, JobResult
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs
from penstock.ports.bus import (
    CHECKPOINT,
    HANDSHAKE,
    HEARTBEAT,
    PROGRESS,
    RESULT,
    AnyMessage,
    Bus,
    Checkpointed,
    CheckpointKept,
    Confirmed,
    Dispatch,
    Finished,
    Handshake,
    JobCancel,
    JobProgress,
    Refusal,
    Returned,
    Settled,
    Started,
    StepsRead,
    StepsWanted,
    Welcomed,
    jobs_of,
)

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

CANCEL, ALERT = "sys.job.cancel", "sys.alert"
_BEAT = 2.5
"""Seconds between heartbeats; the protocol asks for 2 to 5."""
_UNNOTICED = 30.0
"""Seconds for which the loss of a connection may have gone unnoticed."""
_ENDED = 10_000
"""Results by which a dispatch that comes twice is known."""
_MAX_WAITING = 10_000
_NO_CHECKPOINTS = InvalidRequest("checkpoint", "a CAP control plane keeps no checkpoints")


class CapWorkerOptions(Struct, frozen=True, kw_only=True):
    worker_id: str
    topics: tuple[str, ...]
    pool: str = "default"
    slots: int = 32
    timeout: float = 3600.0
    """Seconds that a job may take which has no deadline."""


class Memory(Protocol):
    """Where memory pointers lead: a Redis server."""

    async def get(self, key: str) -> bytes | None: ...

    async def set(self, key: str, value: bytes) -> Any: ...


class _Given(Struct):
    """A dispatch that was received and has not ended."""

    request: JobRequest
    attempt: int
    timeout: float
    dispatch: Any
    """The control plane's own identity of it."""
    identity: Any
    """For whom it runs."""
    is_running: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.request.job_id, self.attempt


class CapWorker:
    """A service: `run` until cancelled; `drain` first."""

    def __init__(
        self,
        nats: NatsOptions,
        options: CapWorkerOptions,
        codec: Codec,
        bus: Bus,
        blobs: Blobs,
        memory: Memory | None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._options, self._codec, self._bus, self._blobs = options, codec, bus, blobs
        self._memory, self._now = memory, now
        self._connection = Connection(nats, options.worker_id, self._subscribe)
        self._subscriptions: list[Any] = []
        self._given: dict[str, _Given] = {}
        self._waiting: deque[str] = deque()
        """Jobs for which no slot is free."""
        self._running: set[tuple[str, int]] = set()
        self._ended: OrderedDict[tuple[str, int], tuple[bytes, bool, float]] = OrderedDict()
        """Results that were sent, whether they are successes, and when."""
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._is_draining = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        return self._connection.client is not None

    async def run(self) -> None:
        readers = [
            self._bus.subscribe(subject, self._hear)
            for subject in (HANDSHAKE, HEARTBEAT, RESULT, PROGRESS, CHECKPOINT)
        ]
        beating = asyncio.create_task(self._beat())
        try:
            await self._connection.run()
        finally:
            beating.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(beating, *self._tasks, return_exceptions=True)
            for reader in readers:
                await reader.close()

    async def drain(self) -> None:
        """Take no more, and send no more heartbeats; what waits for a slot goes back."""
        self._is_draining = True
        for subscription in self._subscriptions:
            with contextlib.suppress(Exception):  # the connection may be gone
                await subscription.unsubscribe()
        while self._waiting:
            given = self._given[self._waiting.popleft()]
            self._hand_back(given, "the worker is stopping")

    async def finished(self) -> None:
        """Wait until all results have left."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.sent()

    # -- the control plane ---------------------------------------------------------

    async def _subscribe(self, client: Client) -> None:
        jobs = self._guarded("job_request", self._on_job)
        await client.subscribe(CANCEL, cb=self._guarded("job_cancel", self._on_cancel))
        if self._is_draining:
            return
        self._subscriptions = [
            await client.subscribe(f"worker.{self._options.worker_id}.jobs", cb=jobs)
        ]
        for topic in self._options.topics:
            self._subscriptions.append(await client.subscribe(topic, queue=topic, cb=jobs))
        hello = handshake_pb2.Handshake(
            component_id=self._options.worker_id,
            role=handshake_pb2.COMPONENT_ROLE_WORKER,
            supported_versions=[packets.VERSION],
            capabilities=dict.fromkeys(self._options.topics, True),
            ready_topics=self._options.topics,
            sdk_version="penstock",
        )
        self._publish(HANDSHAKE, "hello", handshake=hello)
        self._send_beat()
        self._send_again()

    def _send_again(self) -> None:
        """Results that may have been lost with the connection before; twice is harmless."""
        for data, _, sent_at in [*self._ended.values()]:
            if sent_at > time.monotonic() - _UNNOTICED:
                self._connection.publish(RESULT, data)

    def _publish(self, subject: str, trace: str, identity: Any = None, **payload: Any) -> bytes:
        data = self._codec.encode(subject, trace, self._now(), identity, **payload)
        self._connection.publish(subject, data)
        return data

    async def _beat(self) -> None:
        while not self._is_draining:
            await asyncio.sleep(_BEAT)
            if self.is_connected and not self._is_draining:
                self._send_beat()

    def _send_beat(self) -> None:
        beat = heartbeat_pb2.Heartbeat(
            worker_id=self._options.worker_id,
            type="cpu",
            active_jobs=len(self._given),
            capabilities=self._options.topics,
            pool=self._options.pool,
            max_parallel_jobs=self._options.slots,
        )
        self._publish(HEARTBEAT, self._options.worker_id, heartbeat=beat)

    def _guarded(self, payload: str, handle: Callable[[Any, Any], None]) -> Any:
        async def take(message: Msg) -> None:
            try:
                packet = self._codec.decode(message.data, message.subject, self._now())
                if packet is None:
                    return
                if packet.WhichOneof("payload") != payload:
                    said = f"{packet.WhichOneof('payload')} on {message.subject}"
                    raise Rejected(packets.UNKNOWN_PAYLOAD, said, packet.sender_id)
                handle(packet, getattr(packet, payload))
            except Rejected as rejected:
                log.warning(
                    "CAP: dropped (%d, from %r): %s",
                    *(rejected.code, rejected.sender, rejected.message),
                )
                self._connection.publish(ALERT, self._codec.alert(ALERT, rejected, self._now()))
            except Exception:
                log.exception("a packet on %s failed", message.subject)

        return take

    def _on_job(self, packet: Any, asked: Any) -> None:
        job_id, number = asked.job_id, int(asked.dispatch.attempt)
        before = self._given.get(job_id)
        if before is not None and (not number or number <= before.attempt):
            return  # it runs
        last = self._attempts.get(job_id, 0)
        kept = self._ended.get((job_id, number or last))
        if kept is not None and (number or kept[1]):
            self._connection.publish(RESULT, kept[0])
            return
        if before is not None:
            self._supersede(before)
        attempt = number or last + 1
        self._attempts[job_id] = attempt
        self._attempts.move_to_end(job_id)
        if len(self._attempts) > _ENDED:
            self._attempts.popitem(last=False)
        dispatch = job_pb2.DispatchIdentity()
        dispatch.CopyFrom(asked.dispatch)
        bare = JobRequest(job_id=job_id, topic=asked.topic, env={packets.TRACE: packet.trace_id})
        given = _Given(bare, attempt, self._options.timeout, dispatch, packet.identity)
        self._given[job_id] = given
        self._start(self._receive(packet, asked, given))

    def _supersede(self, given: _Given) -> None:
        """The control plane has given up an attempt: what comes of it does not count."""
        if given.key in self._running:
            self._tell([JobCancel(*given.key, "a new attempt was dispatched", "")])
        elif given.key[0] in self._waiting:
            self._waiting.remove(given.key[0])

    async def _receive(self, packet: Any, asked: Any, given: _Given) -> None:
        """Read its input, and run it as soon as a slot is free."""
        try:
            if len(self._given) > _MAX_WAITING:
                self._hand_back(given, f"{_MAX_WAITING} jobs wait here already")
                return
            if not any(fnmatchcase(asked.topic, glob) for glob in self._options.topics):
                raise InvalidRequest("topic", f"this worker does not serve {asked.topic[:200]!r}")
            pointer = await self._input(asked.context_ptr)
            if self._given.get(asked.job_id) is not given:
                return
            given.request = packets.request_of(packet, pointer, self._now())
            if given.request.deadline is not None:
                given.timeout = max(0.001, given.request.deadline - self._now())
        except Unavailable as error:
            self._hand_back(given, error.message)
            return
        except PenstockError as error:
            code = packets.code_of(error)
            said = packets.refused(asked.job_id, self._options.worker_id, code, error.message)
            self._end(given, said)
            return
        if self._is_draining:
            self._hand_back(given, "the worker is stopping")
            return
        self._waiting.append(asked.job_id)
        self._fill()

    async def _input(self, pointer: str) -> str:
        """Raises InvalidRequest, UnreadablePointer."""
        if not pointer.startswith(SCHEME):
            if pointer and not pointer.startswith("data:"):
                raise InvalidRequest(
                    "context_ptr", f"unsupported pointer scheme: {pointer[:200]!r}"
                )
            return pointer
        if self._memory is None:
            raise InvalidRequest("context_ptr", "this worker has no memory: set cap.memory")
        try:
            data = await self._memory.get(pointer.removeprefix(SCHEME))
        except Exception as error:  # of any Redis client
            raise Unavailable(f"can't read {pointer[:200]!r}: {error}") from error
        if data is None:
            raise UnreadablePointer("context_ptr", f"context not found: {pointer[:200]!r}")
        return await self._blobs.put(data)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._options.slots:
            job_id = self._waiting.popleft()
            given = self._given[job_id]
            self._running.add(given.key)
            dispatch = Dispatch(given.request, given.attempt, given.timeout, given.request.deadline)
            self._tell([dispatch])

    def _on_cancel(self, packet: Any, asked: Any) -> None:
        given = self._given.get(asked.job_id)
        if given is None:
            return  # it is a broadcast
        if given.key in self._running:
            self._tell([JobCancel(*given.key, asked.reason[:500], asked.requested_by)])
        elif asked.job_id in self._waiting:
            self._waiting.remove(asked.job_id)
            self._end(given, self._said(given, JobState.CANCELLED, "CANCELLED", "not begun"))

    # -- our worker ----------------------------------------------------------------

    def _tell(self, messages: Sequence[AnyMessage]) -> None:
        self._bus.publish(jobs_of(self._options.worker_id), messages)

    async def _hear(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            match message:
                case Handshake():
                    self._tell([Welcomed(message.session)])
                case Started(job_id, attempt, _, confirm):
                    self._has_started(job_id)
                    if confirm:
                        self._tell([Confirmed(((job_id, attempt),))])
                case JobProgress(job_id, _, fraction, text):
                    self._has_started(job_id)
                    self._progress(job_id, round(100 * (fraction or 0.0)), text)
                case Finished(result):
                    self._start(self._finish(result))
                case Returned(job_id, _, _, reason):
                    if (given := self._given.get(job_id)) is not None:
                        self._hand_back(given, reason)
                case Checkpointed(job_id, attempt, _, n):
                    refusal = Refusal.of(_NO_CHECKPOINTS)
                    self._tell([CheckpointKept(job_id, attempt, n, refusal)])
                case StepsWanted(_, _, _, n):
                    self._tell([StepsRead(n, (), False)])

    def _has_started(self, job_id: str) -> None:
        given = self._given.get(job_id)
        if given is not None and not given.is_running:
            given.is_running = True
            self._progress(job_id, 0, "")

    def _progress(self, job_id: str, percent: int, text: str) -> None:
        if (given := self._given.get(job_id)) is not None:
            told = job_pb2.JobProgress(
                job_id=job_id,
                percent=min(max(percent, 0), 100),
                message=text,
                status=job_pb2.JOB_STATUS_RUNNING,
                dispatch=given.dispatch,
            )
            trace = packets.trace_of(given.request)
            self._publish(PROGRESS, trace, given.identity, job_progress=told)

    async def _finish(self, result: JobResult) -> None:
        key = result.job_id, result.attempt
        given = self._given.get(result.job_id)
        if given is not None and given.key == key:
            if result.status is not JobState.CANCELLED:
                self._has_started(result.job_id)
            said = await self._result(given, result)
            if self._given.get(result.job_id) is given:
                self._end(given, said)
        self._running.discard(key)
        self._fill()
        self._tell([Settled((key,))])

    async def _result(self, given: _Given, result: JobResult) -> Any:
        pointer, job_id = result.result_ptr or "", result.job_id
        if pointer and self._memory is not None:
            try:
                await self._memory.set(f"res:{job_id}", await self._blobs.get(pointer))
                pointer = f"{SCHEME}res:{job_id}"
            except Exception as error:  # of any Redis client
                return self._said(
                    given, JobState.FAILED, RETRY_REQUESTED, f"can't store the result: {error}"
                )
        elif pointer and not pointer.startswith("data:"):
            said = "the result is too large to be sent: set cap.memory"
            return self._said(given, JobState.FAILED, "TOO_LARGE", said)
        return packets.ended(job_id, result.status, self._options.worker_id, result, pointer)

    def _said(self, given: _Given, state: JobState, code: str, message: str) -> Any:
        result = JobResult(
            job_id=given.request.job_id, status=state, error_code=code, error_message=message
        )
        return packets.ended(result.job_id, state, self._options.worker_id, result, "")

    def _hand_back(self, given: _Given, reason: str) -> None:
        self._end(given, self._said(given, JobState.FAILED, RETRY_REQUESTED, reason))

    def _end(self, given: _Given, said: Any) -> None:
        job_id = given.request.job_id
        if said.status == job_pb2.JOB_STATUS_FAILED and said.error_code == RETRY_REQUESTED:
            said.status = job_pb2.JOB_STATUS_FAILED_RETRYABLE
        said.dispatch.CopyFrom(given.dispatch)
        del self._given[job_id]
        self._running.discard(given.key)
        trace = packets.trace_of(given.request)
        data = self._publish(RESULT, trace, given.identity, job_result=said)
        succeeded = said.status == job_pb2.JOB_STATUS_SUCCEEDED
        self._ended[job_id, given.attempt] = data, succeeded, time.monotonic()
        if len(self._ended) > _ENDED:
            self._ended.popitem(last=False)
        self._fill()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def named(topics: Iterable[str]) -> tuple[str, ...]:
    """Those that can be subjects."""
    return tuple(topic for topic in topics if not set(topic) & set("*?[] "))
