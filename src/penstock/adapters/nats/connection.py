"""One connection to a NATS server, made from the settings.

nats-py's own reconnecting is off: what was in flight when a connection broke may be lost, and
whoever uses the connection has to know. It makes a new one, and begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from msgspec import Struct

from penstock.core.errors import Misconfigured, NotAuthenticated, NotRunning, PenstockError
from penstock.ports.clock import backoff

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger(__name__)

_TIMEOUT = 5.0
"""Seconds within which a server must have answered."""
_CLOSE_TIMEOUT = 1.0
_RESEND = 0.05
"""Seconds between two tries to publish while there is no connection."""
_PING = 10
"""Seconds between pings; a server that leaves two unanswered is lost."""
_SCHEMES = ("nats", "tls", "ws", "wss")
_ENCRYPTED = ("tls", "wss")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")
HINT = "write nats://HOST:4222, or tls://HOST:4222 for another machine"


class NatsOptions(Struct, frozen=True, kw_only=True):
    """Where the NATS server is, and how it is reached."""

    url: str
    """One or more, separated by commas; a user and password, or a token, may be inside."""
    prefix: str = "penstock"
    credentials: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    token: str = ""
    """For a server on this machine that asks for one, where the address has none: that which an
    engine started for itself."""

    @property
    def servers(self) -> list[str]:
        return [each.strip() for each in self.url.split(",") if each.strip()]

    @property
    def is_plain(self) -> bool:
        """Whether all servers are on this machine, and nothing says who we are."""
        found = [urlsplit(each) for each in self.servers]
        return all(is_local(each.hostname or "") and not each.username for each in found)

    def __str__(self) -> str:
        """Without passwords."""
        found = [urlsplit(each) for each in self.servers]
        return ",".join(f"{each.scheme}://{each.netloc.rpartition('@')[2]}" for each in found)

    def check(self) -> None:
        """Raises Misconfigured."""
        if not self.servers:
            raise Misconfigured("no NATS server is named", hint=HINT)
        if not _PREFIX.fullmatch(self.prefix):
            raise Misconfigured(
                f"{self.prefix!r} is not a prefix for NATS subjects",
                hint="use letters, digits, '-', '_' and single dots",
            )
        for server in self.servers:
            found = urlsplit(server)
            if found.scheme not in _SCHEMES or not found.hostname:
                raise Misconfigured(f"{server!r} is not the address of a NATS server", hint=HINT)
            if not (self._is_encrypted(found.scheme) or is_local(found.hostname)):
                raise Misconfigured(
                    f"{found.hostname} is not on this machine: the token and all jobs would be "
                    "sent there without encryption",
                    hint=f"use tls://{found.hostname}:{found.port or 4222}, or set bus.ca",
                )

    def _is_encrypted(self, scheme: str) -> bool:
        return scheme in _ENCRYPTED or self.ca is not None

    def tls(self) -> ssl.SSLContext | None:
        """Raises Misconfigured."""
        if not any(self._is_encrypted(urlsplit(each).scheme) for each in self.servers):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.private_key)
        except (OSError, ssl.SSLError) as error:
            raise Misconfigured(f"can't use the files of [bus]: {error}") from error
        return context


def is_local(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def token_of(name: str) -> str:
    """A name as one token of a subject."""
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


async def open_client(
    options: NatsOptions, name: str, on_closed: Callable[[], None], **more: Any
) -> Client:
    """Connect once. Raises NotRunning, NotAuthenticated or Misconfigured."""
    import nats.errors
    from nats.aio.client import Client

    options.check()
    client, context = Client(), options.tls()
    tls: dict[str, Any] = {} if context is None else {"tls": context}
    if options.credentials is not None:
        try:
            is_jwt = b"NATS USER JWT" in options.credentials.read_bytes()
        except OSError as error:
            raise Misconfigured(
                f"can't read the NATS credentials {options.credentials}: {error.strerror}"
            ) from error
        tls["user_credentials" if is_jwt else "nkeys_seed"] = str(options.credentials)
    elif options.token and options.is_plain:
        tls["token"] = options.token
    failures: list[Exception] = []

    async def closed() -> None:
        on_closed()

    async def failed(error: Exception) -> None:
        failures.append(error)
        del failures[:-10]
        log.debug("NATS: %s", error)

    try:
        async with asyncio.timeout(_TIMEOUT):
            await client.connect(
                options.servers,
                name=name,
                error_cb=failed,
                closed_cb=closed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=_PING,
                no_echo=True,
                **tls,
                **more,
            )
    except (OSError, TimeoutError, nats.errors.Error, ValueError) as error:
        await close_client(client)
        causes = [error, *failures]
        if any(_is_refusal(each) for each in causes):
            raise NotAuthenticated(
                f"the NATS server {options} refused the credentials",
                hint="check the user in the address, or the file bus.credentials",
            ) from error
        if (broken := next((e for e in causes if isinstance(e, ssl.SSLError)), None)) is not None:
            raise Misconfigured(f"no TLS with the NATS server {options}: {broken}") from error
        why = next((str(each) for each in reversed(failures) if str(each)), str(error))
        raise NotRunning(
            f"no NATS server answers at {options}: {why or 'timeout'}", hint=HINT
        ) from error
    except BaseException:
        await close_client(client)
        raise
    return client


@contextlib.contextmanager
def lost_as_not_running(options: NatsOptions) -> Iterator[None]:
    """A connection that is lost while it is set up was none: raises NotRunning."""
    import nats.errors

    try:
        yield
    except (nats.errors.Error, OSError) as error:  # TimeoutError is an OSError
        raise NotRunning(f"lost the NATS server {options}: {error}") from error


async def close_client(client: Client) -> None:
    """End the connection; a server that does not answer is not waited for."""
    import nats.errors

    with contextlib.suppress(TimeoutError, OSError, nats.errors.Error):
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await client.close()


class Connection:
    """A connection that is made anew whenever it is lost; what is published waits for it.

    `run` until cancelled. What was published while a connection broke may be lost."""

    def __init__(
        self, options: NatsOptions, name: str, subscribe: Callable[[Client], Awaitable[None]]
    ) -> None:
        """`subscribe` is called with each new connection."""
        self._options, self._name, self._subscribe = options, name, subscribe
        self.client: Client | None = None
        self._out: asyncio.Queue[tuple[str, bytes, str]] = asyncio.Queue()

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        self._out.put_nowait((subject, data, reply))

    async def run(self) -> None:
        sending = asyncio.create_task(self._send_all())
        pauses = _reconnect_pauses()
        try:
            while True:
                try:
                    lost = await self._connect()
                except PenstockError as error:
                    log.warning("CAP: %s", error)
                    await asyncio.sleep(next(pauses))
                    continue
                pauses = _reconnect_pauses()
                await lost.wait()
                self.client = None
                log.warning("CAP: lost the connection to NATS; reconnecting")
        finally:
            if self.client is not None:
                # A receipt that is not sent makes the next engine read its message again.
                with contextlib.suppress(TimeoutError, NotRunning):
                    async with asyncio.timeout(_CLOSE_TIMEOUT):
                        await self.sent()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if self.client is not None:
                await close_client(self.client)

    async def _connect(self) -> asyncio.Event:
        lost = asyncio.Event()
        client = await open_client(self._options, self._name, lost.set)
        try:
            with lost_as_not_running(self._options):
                await self._subscribe(client)
                await client.flush()
        except BaseException:
            await close_client(client)
            raise
        self.client = client
        return lost

    async def _send_all(self) -> None:
        while True:
            subject, data, reply = await self._out.get()
            while not await self._send(subject, data, reply):  # noqa: ASYNC110
                await asyncio.sleep(_RESEND)
            self._out.task_done()

    async def _send(self, subject: str, data: bytes, reply: str) -> bool:
        """Whether there is no more to do for it."""
        client = self.client
        try:
            if client is None:
                return False
            await client.publish(subject, data, reply=reply)
        except Exception as error:  # a closed connection has many names
            if client is None or not client.is_connected:
                return False
            log.error("CAP: can't publish %d bytes on %s: %s", len(data), subject, error)
        return True

    async def sent(self) -> None:
        """Wait until all that was published has left."""
        await self._out.join()
        if self.client is not None:
            with lost_as_not_running(self._options):
                await self.client.flush()


def _reconnect_pauses() -> Iterator[float]:
    return backoff(0.1, 2.0, jitter=0.5)


def _is_refusal(error: BaseException) -> bool:
    return "authorization" in str(error).lower() or "authentication" in str(error).lower()
