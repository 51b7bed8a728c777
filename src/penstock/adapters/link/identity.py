"""A worker's identity on its own machine: its key, its certificate, and the engine it belongs to.

One folder, for its owner only. `join` fills it; later starts find it there. A process that uses it
holds a lock, and counts how often the worker was started: of two copies the newer one counts.
"""

from __future__ import annotations

import asyncio
import datetime
import fcntl
import logging
import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import (
    PROTOCOL,
    AnyFrame,
    Failure,
    Frame,
    FrameProtocol,
    Join,
    Joined,
    Trust,
    Trusted,
)
from penstock.adapters.link.proxy import RENEW
from penstock.adapters.link.renewal import HANDSHAKE_TIMEOUT
from penstock.adapters.link.secure import Security, explained, open_secure
from penstock.core.errors import AlreadyRunning, Misconfigured, NotRunning, PenstockError
from penstock.ports.credentials import JoinToken
from penstock.ports.process import CALLER_TIMEOUT, close_in_children
from penstock.ports.tls import (
    fingerprint,
    key_pem,
    new_private_key,
    new_request,
    tls_context,
    write_private,
)

log = logging.getLogger(__name__)

_KEY, _CERTIFICATE, _AUTHORITY = "worker.key", "worker.pem", "engine.pem"
_HOSTNAME = "check-hostname"
_decode_bytes = msgspec.msgpack.Decoder(bytes).decode


class RenewalLink(Protocol):
    """The part of a Link that a renewal needs."""

    async def call(
        self, method: str, decode: Callable[[bytes], bytes], params: Mapping[str, Any]
    ) -> bytes: ...


class WorkerIdentity:
    """The folder of one worker, locked by this process."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        """Raises AlreadyRunning if another process uses it."""
        self._folder, self._worker_id = folder, worker_id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        close_in_children(self)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise AlreadyRunning(
                f"another process of this machine is the worker {worker_id}",
                hint="give this one another name with --id",
            ) from None

    def filenos(self) -> list[int]:
        return [self._lock]

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def has_joined(self) -> bool:
        return (self._folder / _CERTIFICATE).is_file()

    def belongs_to(self, token: JoinToken) -> bool:
        """Whether it has a certificate of the engine that the token is of, and that is valid."""
        if not self.has_joined or self._times()[1] <= datetime.datetime.now(datetime.UTC):
            return False
        return fingerprint((self._folder / _AUTHORITY).read_bytes()) == token.authority

    def security(self) -> Security:
        """What a process connects with that starts now. Raises Misconfigured."""
        boots = self._folder / "boots"
        boot = int(boots.read_text()) + 1 if boots.is_file() else 1
        write_private(boots, str(boot).encode())
        checks = (self._folder / _HOSTNAME).exists()
        files = [self._folder / name for name in (_AUTHORITY, _CERTIFICATE, _KEY)]
        return Security(client_context(*files, check_hostname=checks), boot)

    # -- joining -----------------------------------------------------------------------------

    async def join(self, address: Address, token: JoinToken) -> None:
        """Get a certificate. Raises NotRunning, Misconfigured, NotAuthenticated, Conflict."""
        authority = await fetch_authority(address, token.authority)
        context = tls_context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = token.check_hostname
        context.load_verify_locations(cadata=authority.decode())
        request = self._request()
        asked = Join(PROTOCOL, token.token_id, token.secret, self._worker_id, request)
        answer = await _ask(address, Security(context), asked)
        if not isinstance(answer, Joined):
            raise NotRunning(f"{address} sent an unexpected {type(answer).__name__}")
        write_private(self._folder / _AUTHORITY, authority)
        if token.check_hostname:
            write_private(self._folder / _HOSTNAME, b"")
        else:
            (self._folder / _HOSTNAME).unlink(missing_ok=True)
        write_private(self._folder / _CERTIFICATE, answer.certificate)

    def _request(self) -> bytes:
        """A request with the worker's own key, which never leaves this machine."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        file = self._folder / _KEY
        if not file.is_file():
            write_private(file, key_pem(new_private_key()))
        key: Any = load_pem_private_key(file.read_bytes(), None)
        return new_request(key, self._worker_id)

    # -- renewal -----------------------------------------------------------------------------

    async def keep_valid(
        self, link: RenewalLink, security: Security, pause: float = 3600.0
    ) -> None:
        """Get the next certificate when half of the time of this one is over, until cancelled."""
        while True:
            created, expires = self._times()
            if datetime.datetime.now(datetime.UTC) > created + (expires - created) / 2:
                try:
                    await self._renew(link, security)
                except PenstockError as error:
                    log.error("the certificate can't be renewed: %s", error)
            await asyncio.sleep(min(pause, (expires - created).total_seconds() / 10))

    async def _renew(self, link: RenewalLink, security: Security) -> None:
        renewed = await link.call(RENEW, _decode_bytes, {"request": self._request()})
        write_private(self._folder / _CERTIFICATE, renewed)
        security.context.load_cert_chain(self._folder / _CERTIFICATE, self._folder / _KEY)
        log.info("the certificate of worker %s was renewed", self._worker_id)

    def _times(self) -> tuple[datetime.datetime, datetime.datetime]:
        """When the certificate came, and until when it is valid."""
        from cryptography import x509

        file = self._folder / _CERTIFICATE
        came = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)
        return came, x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc


def client_context(
    authority: Path | None,
    certificate: Path | None = None,
    key: Path | None = None,
    *,
    check_hostname: bool,
) -> ssl.SSLContext:
    """For a client that has these files (PEM). Raises Misconfigured."""
    context = tls_context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = check_hostname
    try:
        if authority is not None:
            context.load_verify_locations(authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        names = ", ".join(str(file) for file in (authority, certificate, key) if file)
        raise Misconfigured(f"can't use {names}: {error}") from error
    return context


async def fetch_authority(address: Address, sha256: bytes) -> bytes:
    """The engine's authority (PEM): asked of whoever answers, and believed if it has this
    fingerprint. Raises NotRunning, Misconfigured."""
    unverified = tls_context(ssl.PROTOCOL_TLS_CLIENT)
    unverified.verify_mode = ssl.CERT_NONE
    answer = await _ask(address, Security(unverified), Trust())
    authority = answer.authority if isinstance(answer, Trusted) else b""
    try:
        is_right = fingerprint(authority) == sha256
    except ValueError:
        is_right = False
    if not is_right:
        raise Misconfigured(
            f"the engine at {address} is not the one that the join token is of",
            hint="is the address right? A token is good for the engine that made it",
        )
    return authority


async def _ask(address: Address, security: Security, frame: Frame) -> AnyFrame:
    """Send one frame over a connection of its own, and return the answer."""
    answer: asyncio.Future[AnyFrame] = asyncio.get_running_loop().create_future()

    def take(received: AnyFrame) -> None:
        if not answer.done():
            answer.set_result(received)

    def lost(error: Exception | None) -> None:
        if not answer.done():
            answer.set_exception(error or ConnectionError("end of stream"))
            answer.exception()  # perhaps nobody waits for it yet

    protocol = FrameProtocol(take, lost, CALLER_TIMEOUT)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await open_secure(protocol, address, security)
            protocol.send(frame)
            received = await answer
    except OSError as error:
        if isinstance(error, ssl.SSLError) and (told := explained(error, address)):
            raise told from error
        raise address.unreachable() from error
    finally:
        protocol.close()
    if isinstance(received, Failure):
        raise received.revive()
    return received
