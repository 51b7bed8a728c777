"""What reaches the engine through a NATS server: workers, and whoever speaks CAP."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.nats.connection import NatsOptions
from penstock.adapters.nats.tunnel import NatsDialer, NatsPulse
from penstock.config import Settings
from penstock.config.loading import parse_host_port
from penstock.control.engine_api import LocalEngineApi
from penstock.control.open_jobs import OpenJobs
from penstock.control.workers import matches
from penstock.core.errors import InvalidRequest, Misconfigured, NotFound
from penstock.core.job import Job, JobRequest
from penstock.ports.engine_api import Caller, KeyRole
from penstock.ports.shared_state import SharedState

if TYPE_CHECKING:
    from penstock.adapters.nats.cap import CapBridge
    from penstock.adapters.nats.pointers import RedisServer
    from penstock.app.parts import Parts

_CLIENT_ROLES = frozenset({KeyRole.SUBMIT, KeyRole.OPERATE})


def nats_options(settings: Settings) -> NatsOptions:
    """Raises Misconfigured if nats-py is not installed, or the address is none."""
    try:
        import nats  # noqa: F401  (only whether it is there)
    except ImportError as error:
        raise Misconfigured(
            "NATS needs the package nats-py", hint="pip install 'penstock[nats]'"
        ) from error
    bus = settings.bus
    options = NatsOptions(
        url=bus.url,
        prefix=bus.prefix,
        credentials=bus.credentials,
        ca=bus.ca,
        certificate=bus.certificate,
        private_key=bus.private_key,
    )
    options.check()
    return options


class NatsWorker:
    """How a worker process gets to the engine through NATS."""

    def __init__(self, settings: Settings, worker_id: str, token: str) -> None:
        """Without a token, that of the data directory is used. Raises Misconfigured."""
        self._options = nats_options(settings)
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self.address = Address(via=str(self._options))
        self.dial = NatsDialer(self._options, self.worker_id)
        if not token:
            try:
                token = settings.token_file.read_text().strip()
            except OSError as error:
                raise Misconfigured(
                    "a worker that joins through NATS needs the engine's token",
                    hint=f"set PENSTOCK_TOKEN to what is in {settings.token_file} of the engine",
                ) from error
        self.token = token

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


# -- CAP -------------------------------------------------------------------------------


class _CapAccess:
    """What the CAP bridge asks of the engine: see `CapEngine`."""

    def __init__(self, api: LocalEngineApi, open_jobs: OpenJobs) -> None:
        self._api, self._open_jobs = api, open_jobs

    def _as(self, sender: str) -> LocalEngineApi:
        return self._api.serving(Caller(f"cap:{sender[:100]}", _CLIENT_ROLES))

    async def submit(self, request: JobRequest, sender: str) -> None:
        await self._as(sender).submit([request])

    async def cancel(self, job_id: str, reason: str, sender: str) -> None:
        await self._as(sender).cancel(job_id, reason=reason, timeout=0.0)

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
    try:
        from penstock.adapters.nats.cap import CapBridge, CapOptions
        from penstock.adapters.nats.packets import Codec
        from penstock.adapters.nats.pointers import PointerStore, RedisServer
    except ImportError as error:
        raise Misconfigured(
            f"CAP needs the package cap-sdk-python: {error}", hint="pip install 'penstock[cap]'"
        ) from error
    cap, access = settings.cap, _CapAccess(api, parts.open_jobs)
    store, server, port = None, None, 0
    if cap.pointers:
        store = PointerStore(parts.blobs, access.find, settings.limits.max_input)
        server = RedisServer(store, token)
        try:
            port = await server.listen(*parse_host_port(cap.pointers))
        except OSError as error:
            raise Misconfigured(f"cap.pointers: can't listen at {cap.pointers}: {error}") from error
    options = CapOptions(
        topics=cap.topics,
        slots=cap.slots,
        max_pending=cap.max_pending,
        kill_grace=settings.timeouts.kill_grace,
        lease=settings.timeouts.lease,
    )
    codec = Codec(cap.sender_id, _private_key(cap.private_key), _public_keys(cap.keys))
    bridge = CapBridge(
        nats_options(settings), options, codec, parts.bus, access, state, store, parts.clock.now
    )
    return CapPlane(bridge, server, port)


def _private_key(file: Path | None) -> ec.EllipticCurvePrivateKey | None:
    if file is None:
        return None
    try:
        key = load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise Misconfigured(f"cap.private_key: can't read {file}: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Misconfigured(f"cap.private_key: {file} is not a key of ECDSA (P-256)")
    return key


def _public_keys(folder: Path | None) -> dict[str, ec.EllipticCurvePublicKey] | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise Misconfigured(f"cap.keys: there is no folder {folder}")
    keys: dict[str, ec.EllipticCurvePublicKey] = {}
    for file in sorted(folder.glob("*.pem")):
        try:
            key = load_pem_public_key(file.read_bytes())
        except (OSError, ValueError) as error:
            raise Misconfigured(f"cap.keys: can't read {file}: {error}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise Misconfigured(f"cap.keys: {file} is not a key of ECDSA (P-256)")
        keys[file.stem] = key
    return keys
