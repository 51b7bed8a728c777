"""TLS between a socket and the frames of a link."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import FrameProtocol
from penstock.core.errors import Misconfigured, NotAuthenticated, PenstockError
from penstock.ports.tls import Tls

PEER_CERTIFICATE = "peer_certificate"
"""What `get_extra_info` calls it: DER, or None."""
_READ = 256 << 10
_PIECE = 256 << 10
"""How much of a large frame is encrypted before it is handed on."""
_LINGER = 1.0
"""Seconds in which the peer of a failed connection can read why."""
_REFUSED = {
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "its certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "its certificate was revoked",
    "TLSV1_ALERT_UNKNOWN_CA": "its certificate is of an authority that the engine does not trust",
    "SSLV3_ALERT_BAD_CERTIFICATE": "its certificate is not valid",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "its certificate is not valid",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "its certificate is not for clients",
    "TLSV1_ALERT_DECRYPT_ERROR": "its certificate is not valid",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it has shown no certificate",
}


class SecureTransport(asyncio.Protocol):
    """To the socket it is the protocol, to a FrameProtocol the transport.

    The FrameProtocol is connected from the start, so that it can end the handshake; it must not
    send before `secured`.
    """

    def __init__(self, frames: FrameProtocol, tls: Tls, *, server_side: bool) -> None:
        self._frames, self._tls, self._server_side = frames, tls, server_side
        self._raw: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(_READ))
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self.secured: asyncio.Future[None] = self._loop.create_future()
        """Done when the handshake is over; the error if it failed."""

    # -- what the socket's transport calls -----------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._frames.connection_made(cast(asyncio.Transport, self))
        if not self._server_side:
            self._tls.shake()
            self._flush()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return  # read only so that the peer gets to what it was told
        try:
            self._tls.feed(data)
            if not self._tls.ready:
                is_ready = self._tls.shake()
                self._flush()
                if not is_ready:
                    return
                if not self.secured.done():
                    self.secured.set_result(None)
            while (count := self._tls.read(self._buffer)) and not self.is_closing():
                self._frames.data_received(bytes(self._buffer[:count]))
        except ssl.SSLError as error:
            self._fail(error)
        else:
            if self._tls.over:
                self.close()

    def _fail(self, error: ssl.SSLError) -> None:
        """The peer is told, and has a moment to read it."""
        self._flush()
        self._end(error)
        if self._raw is not None:
            with suppress(OSError, RuntimeError):
                self._raw.write_eof()
            self._loop.call_later(_LINGER, self._raw.abort)

    def _end(self, error: Exception | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        if not self.secured.done():
            self.secured.set_exception(error or ConnectionError("end of stream"))
            self.secured.exception()  # perhaps nobody waits for it
        self._frames.connection_lost(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def pause_writing(self) -> None:
        self._frames.pause_writing()

    def resume_writing(self) -> None:
        self._frames.resume_writing()

    def _flush(self) -> None:
        if self._raw is not None and (data := self._tls.take()):
            self._raw.write(data)

    # -- what the FrameProtocol calls ----------------------------------------------------------

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            self._tls.write(view[start : start + _PIECE])
            self._flush()

    def is_closing(self) -> bool:
        return self._is_over or self._raw is None or self._raw.is_closing()

    def close(self) -> None:
        if self._raw is not None and not self._raw.is_closing():
            if self._tls.ready:
                self._tls.finish()
                self._flush()
            self._raw.close()

    def abort(self) -> None:
        if self._raw is not None:
            self._raw.abort()

    def set_write_buffer_limits(self, high: int) -> None:
        if self._raw is not None:
            self._raw.set_write_buffer_limits(high=high)

    def get_extra_info(self, name: str) -> Any:
        if name == PEER_CERTIFICATE:
            return self._tls.peer if self._tls.ready else None
        return None if self._raw is None else self._raw.get_extra_info(name)


@dataclass
class Security:
    """How a client shows who it is, and knows the engine."""

    context: ssl.SSLContext
    boot: int = 0
    """How often the worker with this certificate was started."""

    def hostname(self, address: Address) -> str | None:
        return address.host if self.context.check_hostname else None


def needed(security: Security | None, address: Address) -> Security:
    if security is None:
        raise Misconfigured(
            f"the authority of the engine at {address} is not known",
            hint="set link.ca to its certificate (PEM), or to sha256:HEX",
        )
    return security


async def open_secure(
    frames: FrameProtocol, address: Address, security: Security
) -> SecureTransport:
    """Connect; returns after the handshake. Raises OSError."""

    def make() -> SecureTransport:
        tls = Tls(security.context, server_side=False, hostname=security.hostname(address))
        return SecureTransport(frames, tls, server_side=False)

    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(make, address.host, address.port)
    await made.secured
    return made


def explained(error: ssl.SSLError, address: Address) -> PenstockError | None:
    """What a client should be told; None if trying again may help."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Misconfigured(
            f"the engine at {address} can't be trusted: {error.verify_message}",
            hint="is it the right address? The authority that it must have is known from the join "
            "token, or named by --ca or the setting link.ca",
        )
    if (why := _REFUSED.get(error.reason or "")) is not None:
        return NotAuthenticated(
            f"the engine at {address} refused this process: {why}",
            hint="join again with a new token: 'penstock worker token create' makes one",
        )
    if error.reason == "WRONG_VERSION_NUMBER":
        return Misconfigured(f"what answers at {address} does not speak TLS")
    return None


def reason_of(error: ssl.SSLError) -> str:
    """Why a handshake failed, as the engine counts it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        expired = "expired" in error.verify_message
        return "certificate_expired" if expired else "certificate_invalid"
    return "not_tls"
