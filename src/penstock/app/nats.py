"""What reaches the engine through a NATS server: workers, and whoever speaks CAP."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.adapters.nats.connection import NatsOptions, close_client, open_client
from penstock.adapters.nats.tunnel import NatsDialer, NatsPulse
from penstock.app.application import App, make_executors
from penstock.app.engine import Drain
from penstock.config import Settings
from penstock.control.engine_api import LocalEngineApi
from penstock.control.open_jobs import OpenJobs
from penstock.control.workers import matches
from penstock.core.errors import InvalidRequest, Misconfigured, NotFound, PenstockError
from penstock.core.job import Job, JobRequest
from penstock.ports.address import parse_address
from penstock.ports.bus import MemoryBus
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import Caller, KeyRole
from penstock.ports.executor import is_needed
from penstock.ports.shared_state import SharedState
from penstock.worker.worker import Worker, WorkerOptions
from penstock.workloads.function.executor import FunctionExecutor

if TYPE_CHECKING:
    from penstock.adapters.nats.cap import CapBridge
    from penstock.adapters.nats.codec import Codec, Sender
    from penstock.adapters.nats.pointers import RedisServer
    from penstock.app.parts import Parts

_LAST_WORDS = 5.0
"""Seconds that a stopped worker has to send its last results."""
_CLIENT_ROLES = frozenset({KeyRole.SUBMIT, KeyRole.OPERATE})
_MAX_SENDERS = 1000
"""Senders of CAP packets whose API is kept."""


def nats_options(settings: Settings, token: str) -> NatsOptions:
    """Raises Misconfigured if nats-py is not installed, or the address is none."""
    try:
        import nats  # noqa: F401  (only whether it is there)
    except ImportError as error:
        raise Misconfigured(
            "NATS needs the package nats-py", hint="pip install 'penstock[nats]'"
        ) from error
    bus = settings.bus
    options = NatsOptions(
        url=bus.address,
        prefix=bus.prefix,
        credentials=bus.credentials,
        ca=bus.ca,
        certificate=bus.certificate,
        private_key=bus.private_key,
        token=token,
    )
    options.check()
    return options


class NatsWorker:
    """How a worker process gets to the engine through NATS."""

    def __init__(self, settings: Settings, worker_id: str, token: str) -> None:
        """Without a token, that of the data directory is used. Raises Misconfigured."""
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}"
        if not token:
            try:
                token = settings.token_file.read_text().strip()
            except OSError as error:
                raise Misconfigured(
                    "a worker that joins through NATS needs the engine's token",
                    hint=f"set PENSTOCK_TOKEN to what is in {settings.token_file} of the engine",
                ) from error
        self.token = token
        self._options = nats_options(settings, token)
        self.address = Address(via=str(self._options))
        self.dial = NatsDialer(self._options, self.worker_id)

    def pulse(self, interval: float) -> NatsPulse:
        return NatsPulse(self._options, self.worker_id, interval)

    async def probe(self) -> None:
        """Connect once. Raises NotRunning while there is no engine."""
        link = Link(self.address, token=self.token, dial=self.dial)
        try:
            await link.connect()
        finally:
            await link.close()

    async def close(self) -> None:
        await self.dial.close()


class CapWorkerProcess:
    """A worker process under a CAP control plane of others; as `WorkerProcess` for an engine."""

    def __init__(
        self,
        app: App,
        settings: Settings,
        *,
        worker_id: str = "",
        pool: str = "default",
        drain_timeout: float = 30.0,
    ) -> None:
        """Raises Misconfigured."""
        _needs_cap()
        self._settings, self._app = settings, app
        self._nats = nats_options(settings, "")
        self.left_running = False
        """Whether it ended although a job still ran."""
        self.options = WorkerOptions(
            worker_id=worker_id or f"{socket.gethostname()}-{os.getpid()}",
            pool=pool,
            slots=settings.concurrency,
            drain_timeout=drain_timeout,
        )

    @property
    def address(self) -> str:
        return str(self._nats)

    async def probe(self) -> None:
        """Connect once. Raises NotRunning while there is no NATS server."""
        await close_client(await open_client(self._nats, self.options.worker_id, lambda: None))

    async def run(self) -> None:
        from penstock.adapters.nats.cap_worker import CapWorker, CapWorkerOptions, named

        settings, options = self._settings, self.options
        found: list[object] = [*filter(is_needed, make_executors(self._app, settings))]
        executors: list[Any] = [one for one in found if isinstance(one, FunctionExecutor)]
        if not executors:
            raise Misconfigured("the application has no jobs, so a worker has nothing to serve")
        bus, clock = MemoryBus(), SystemClock()
        max_size = max(settings.limits.max_input, settings.limits.max_result)
        blobs = MemoryBlobs(inline_limit=max_size, max_size=max_size)
        worker = Worker(bus, blobs, executors, clock, options)
        given = CapWorkerOptions(
            worker_id=options.worker_id,
            topics=named(worker.topics),
            pool=options.pool,
            slots=options.slots,
            timeout=settings.timeouts.run,
        )
        memory = _redis(settings.cap.memory)
        codec = _codec(settings, options.worker_id)
        cap = CapWorker(self._nats, given, codec, bus, blobs, memory, clock.now)
        serving = asyncio.create_task(cap.run())
        working = asyncio.create_task(worker.run())
        drain = Drain()
        try:
            await asyncio.wait((serving, working), return_when=asyncio.FIRST_COMPLETED)
            (serving if serving.done() else working).result()
        finally:
            await cap.drain()
            self.left_running = not await drain.end(working)
            with suppress(TimeoutError, PenstockError):
                async with asyncio.timeout(_LAST_WORDS):
                    await cap.finished()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await bus.close()
            if memory is not None:
                await memory.aclose()


def _redis(url: str) -> Any:
    import redis.asyncio

    return redis.asyncio.from_url(url) if url else None


# -- CAP -------------------------------------------------------------------------------


class _CapAccess:
    """What the CAP bridge asks of the engine: see `CapEngine`."""

    def __init__(self, api: LocalEngineApi, open_jobs: OpenJobs) -> None:
        self._api, self._open_jobs = api, open_jobs
        self._as = lru_cache(_MAX_SENDERS)(self._serving)

    def _serving(self, sender: str) -> LocalEngineApi:
        return self._api.serving(Caller(f"cap:{sender}", _CLIENT_ROLES))

    async def submit(self, request: JobRequest, sender: str) -> None:
        await self._as(sender[:100]).submit([request])

    async def cancel(self, job_id: str, reason: str, sender: str) -> None:
        await self._as(sender[:100]).cancel(job_id, reason=reason, timeout=0.0)

    async def find(self, job_id: str) -> Job | None:
        try:
            return await self._api.get(job_id)
        except (NotFound, InvalidRequest):
            return None

    def held(self) -> list[Job]:
        return [*self._open_jobs.held.values()]

    def serves(self, topic: str) -> bool:
        workers = self._open_jobs.roster.workers.values()
        return any(matches(topic, glob) for worker in workers for glob in worker.topics)

    def learn(self, topic: str) -> None:
        self._open_jobs.learn((topic,), {})


@dataclass(frozen=True)
class CapPlane:
    """The CAP side of an engine."""

    bridge: CapBridge
    pointers: RedisServer | None
    redis_port: int = 0


async def open_cap(
    settings: Settings, parts: Parts, api: LocalEngineApi, state: SharedState, token: str
) -> CapPlane:
    """Raises Misconfigured."""
    _needs_cap()
    from penstock.adapters.nats.cap import CapBridge, CapOptions
    from penstock.adapters.nats.pointers import PointerStore, RedisServer
    from penstock.adapters.nats.trust import SessionIssuer

    cap, access = settings.cap, _CapAccess(api, parts.open_jobs)
    store, server, port = None, None, 0
    if cap.pointers:
        store = PointerStore(parts.blobs, access.find, settings.limits.max_input)
        server = RedisServer(store, token)
        try:
            port = await server.listen(*parse_address(cap.pointers))
        except OSError as error:
            raise Misconfigured(f"cap.pointers: can't listen at {cap.pointers}: {error}") from error
    options = CapOptions(
        topics=cap.topics,
        slots=cap.slots,
        max_pending=cap.max_pending,
        jetstream=cap.jetstream,
        replicas=cap.replicas,
        kill_grace=settings.timeouts.kill_grace,
        lease=settings.timeouts.lease,
    )
    codec = _codec(settings, cap.sender_id)
    sessions = None
    if codec.signing_key is not None and codec.senders is not None:
        sessions = SessionIssuer(
            codec.sender_id, codec.signing_key, codec.senders, state, parts.clock.now
        )
    bridge = CapBridge(
        nats_options(settings, token),
        options,
        codec,
        parts.bus,
        access,
        state,
        store,
        parts.clock.now,
        sessions,
    )
    return CapPlane(bridge, server, port)


def _needs_cap() -> None:
    """Raises Misconfigured."""
    try:
        import penstock.adapters.nats.packets  # noqa: F401  (only whether it can be)
    except ImportError as error:
        raise Misconfigured(
            f"CAP needs the package cap-sdk-python: {error}", hint="pip install 'penstock[cap]'"
        ) from error


def _codec(settings: Settings, sender_id: str) -> Codec:
    """Raises Misconfigured."""
    from penstock.adapters.nats.codec import Codec, SigningKey

    cap = settings.cap
    private_key, senders = _private_key(cap.private_key), _senders(cap.keys)
    if cap.production and (private_key is None or senders is None):
        raise Misconfigured("cap.production needs cap.keys and cap.private_key")
    if cap.production and cap.topics:
        raise Misconfigured(
            "cap.topics: with cap.production, workers must announce themselves",
            hint="remove cap.topics",
        )
    key = SigningKey(cap.key_id or sender_id, private_key) if private_key is not None else None
    return Codec(sender_id, key, senders, production=cap.production)


def _private_key(file: Path | None) -> ec.EllipticCurvePrivateKey | None:
    if file is None:
        return None
    try:
        key = load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise Misconfigured(f"cap.private_key: can't read {file}: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not _is_p256(key):
        raise Misconfigured(f"cap.private_key: {file} is not a key of ECDSA (P-256)")
    return key


def _is_p256(key: ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) -> bool:
    return isinstance(key.curve, ec.SECP256R1)


def _senders(folder: Path | None) -> dict[str, Sender] | None:
    """By their ids: `SENDER.pem`, `SENDER=KEY_ID.pem`, and both in folders named by a tenant."""
    if folder is None:
        return None
    if not folder.is_dir():
        raise Misconfigured(f"cap.keys: there is no folder {folder}")
    from penstock.adapters.nats.codec import Sender

    senders: dict[str, Sender] = {}
    for file in sorted([*folder.glob("*.pem"), *folder.glob("*/*.pem")]):
        try:
            key = load_pem_public_key(file.read_bytes())
        except (OSError, ValueError) as error:
            raise Misconfigured(f"cap.keys: can't read {file}: {error}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not _is_p256(key):
            raise Misconfigured(f"cap.keys: {file} is not a key of ECDSA (P-256)")
        sender_id, _, key_id = file.stem.partition("=")
        tenant = file.parent.name if file.parent != folder else ""
        before = senders.get(sender_id, Sender({}, tenant))
        if before.tenant != tenant:
            raise Misconfigured(f"cap.keys: {sender_id} has keys in the folders of two tenants")
        senders[sender_id] = Sender({**before.keys, key_id or sender_id: key}, tenant)
    return senders
