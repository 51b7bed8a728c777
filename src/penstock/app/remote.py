"""Other machines: how the engine lets them in, and how they get there."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.link.identity import WorkerIdentity, client_context, fetch_authority
from penstock.adapters.link.secure import Security
from penstock.app.parts import Parts
from penstock.config import Settings
from penstock.control.credentials import Listener
from penstock.control.engine_api import LocalEngineApi
from penstock.core.check import check_name
from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.ports.address import parse_address
from penstock.ports.credentials import JoinToken
from penstock.ports.tls import (
    Authority,
    common_name,
    key_pem,
    load_leaf,
    new_private_key,
    tls_context,
    write_private,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

ENGINE = "penstock engine"
"""The name of the authority that an engine makes, and of its certificate."""
_KNOWN = 1.0
"""Seconds after which all shards know a worker that has joined."""
_AUTHORITY = "authority"
"""The file with the key of the engine's authority; its certificate is in the one with `.pem`."""


class Keys:
    """See `penstock.adapters.link.server.KeyAccess`."""

    def __init__(self, parts: Parts, api: LocalEngineApi) -> None:
        self.caller_of, self.is_current = parts.keys.authenticate, parts.keys.is_current
        self.api_for = api.serving


class Remote:
    """See `penstock.adapters.link.server.RemoteAccess`."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        """Makes the engine's authority at the first start. Raises Misconfigured."""
        self._parts, link = parts, settings.link
        own = _own_authority(settings.authority_dir)
        self.context = tls_context(ssl.PROTOCOL_TLS_SERVER)
        # Who has no certificate yet may join, or has an API key.
        self.context.verify_mode = ssl.CERT_OPTIONAL
        self.context.load_verify_locations(cadata=own.pem.decode())
        self.authority = own.pem
        if link.certificate is not None and link.ca is not None:
            self.authority = link.ca.read_bytes()
            try:
                self.context.load_verify_locations(link.ca)
                self.context.load_cert_chain(link.certificate, link.private_key)
            except (OSError, ssl.SSLError) as error:
                raise Misconfigured(f"can't use the files of [link]: {error}") from error
        else:
            key = new_private_key()
            leaf = own.sign(key.public_key(), ENGINE, server=True, client=False)
            load_leaf(leaf, key, self.context)
        self._listener: Callable[[str], Listener] = lambda address: Listener(
            own, self.authority, link.certificate is not None, address, link.lifetime
        )
        self._advertise = link.advertise
        registry = parts.credentials
        self.worker_of, self.join, self.renew = registry.worker_of, registry.join, registry.renew

    def listening(self, address: Address, recheck: Callable[[], None]) -> None:
        """From now on there are tokens to join with."""
        host, port = address.host, address.port
        if self._advertise:
            host, port = parse_address(self._advertise)
        is_known = self._advertise or host not in ("0.0.0.0", "::")
        known = str(Address(host=host, port=port, tls=True)) if is_known else ""
        self._parts.credentials.listener = self._listener(known)
        self._parts.credentials.on_revoked = recheck

    def is_anothers(self, worker_id: str, job_id: str, attempt: int) -> bool:
        job = self._parts.open_jobs.held.get(job_id)
        return job is not None and job.attempt == attempt and job.worker_id != worker_id


def _own_authority(folder: Path) -> Authority:
    """The engine's own, made when it is first needed."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / f"{_AUTHORITY}.key"
    if not file.is_file():
        write_private(file, key_pem(new_private_key()))
    key: Any = load_pem_private_key(file.read_bytes(), None)
    made = Authority(key, ENGINE)
    certificate = folder / f"{_AUTHORITY}.pem"
    if not certificate.is_file() or certificate.read_bytes() != made.pem:
        write_private(certificate, made.pem)
    return made


# -- the other end ---------------------------------------------------------------------------


def is_remote(address: str | None) -> bool:
    """Whether an engine at this address is reached over TLS, and so by a worker that joins."""
    return address is not None and Address.parse(address).tls


async def client_security(address: Address, settings: Settings) -> Security | None:
    """How a client knows the engine, and what it shows besides its API key.

    On the engine's own machine, its authority is found in its data directory.
    """
    if not address.tls:
        return None
    link = settings.link
    if link.fingerprint:
        digest = bytes.fromhex(link.fingerprint.removeprefix("sha256:").replace(":", ""))
        context = client_context(None, check_hostname=False)
        context.load_verify_locations(cadata=(await fetch_authority(address, digest)).decode())
        return Security(context)
    if link.ca is not None:
        return Security(_context_of(settings))
    here = settings.authority_dir / f"{_AUTHORITY}.pem"
    return Security(client_context(here, check_hostname=False)) if here.is_file() else None


def _context_of(settings: Settings) -> ssl.SSLContext:
    """With the files of the settings. The authority that an engine has made signs for that engine
    only; any other one may sign for many hosts, so the host is checked too."""
    link = settings.link
    assert link.ca is not None
    is_engines = name_in(link.ca) == ENGINE
    files = (link.ca, link.certificate, link.private_key)
    return client_context(*files, check_hostname=not is_engines)


def name_in(file: Path) -> str:
    """The common name in a certificate. Raises Misconfigured."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        first = x509.load_pem_x509_certificates(file.read_bytes())[0]
    except (OSError, ValueError) as error:
        raise Misconfigured(f"can't read {file}: {error}") from error
    return common_name(first.public_bytes(Encoding.DER))


def default_worker_id() -> str:
    """The host's name, as far as it can be a worker's id."""
    name = socket.gethostname()
    try:
        check_name("worker_id", name)
    except InvalidRequest:
        return "worker"
    return name


class HomeLink:
    """Calls shard 0, over a connection for each call: for what only shard 0 can do."""

    def __init__(self, address: Address, security: Security) -> None:
        self._address, self._security = address, security

    async def call(self, method: str, decode: Callable[[bytes], T], params: Mapping[str, Any]) -> T:
        link = Link(self._address, security=self._security)
        try:
            await link.connect()
            return await link.call(method, decode, params)
        finally:
            await link.close()


class RemoteWorker:
    """How a worker process gets to an engine on another machine."""

    def __init__(
        self,
        connect: str | None,
        settings: Settings,
        worker_id: str,
        join: str | None,
        shard: int = 0,
    ) -> None:
        """It joins shard 0, and works for any. Raises Misconfigured, AlreadyRunning."""
        self._token = JoinToken.parse(join) if join else None
        named = connect or (self._token.address if self._token else "")
        if not named:
            raise Misconfigured(
                "the join token does not say where the engine is",
                hint="add --connect penstock://HOST:7480",
            )
        self._home = Address.parse(named)
        if not self._home.tls:
            raise Misconfigured(
                f"{self._home} has no TLS, so there is nothing to join",
                hint="connect to penstock://HOST:7480",
            )
        self.address = replace(self._home, port=self._home.port + shard)
        self._settings, self.worker_id = settings, worker_id
        self.identity: WorkerIdentity | None = None
        """None if it has a certificate of the user's own."""
        self._security: Security | None = None
        if settings.link.certificate is not None:
            self.worker_id = worker_id or name_in(settings.link.certificate)
        else:
            self.worker_id = worker_id or default_worker_id() + (f"-{shard}" if shard else "")
            folder = settings.link_dir / "workers" / self.worker_id
            self.identity = WorkerIdentity(folder, self.worker_id)
            if self._token is None and not self.identity.has_joined:
                self.identity.close()
                raise Misconfigured(
                    f"the worker {self.worker_id} has not joined {self._home} yet",
                    hint="'penstock worker token create', run where the engine is, makes a token: "
                    "add --join TOKEN",
                )

    async def enter(self) -> Security:
        """Join if need be. Raises NotRunning while there is no engine."""
        if self._security is None:
            self._security = await self._enter()
        return self._security

    async def _enter(self) -> Security:
        if self.identity is None:
            return Security(_context_of(self._settings))
        if self._token is not None and not self.identity.belongs_to(self._token):
            await self.identity.join(self._home, self._token)
            log.info("joined %s as worker %s", self._home, self.worker_id)
            if self.address != self._home:
                await asyncio.sleep(_KNOWN)
        return self.identity.security()

    def renewing_link(self, link: Link, security: Security) -> Link | HomeLink:
        """What the certificate is renewed over."""
        return link if self.address == self._home else HomeLink(self._home, security)

    async def probe(self) -> None:
        """Join if need be, and connect once. Raises NotRunning while there is no engine."""
        link = Link(self.address, security=await self.enter())
        try:
            await link.connect()
        finally:
            await link.close()

    def close(self) -> None:
        if self.identity is not None:
            self.identity.close()
