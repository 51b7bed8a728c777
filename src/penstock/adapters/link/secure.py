"""TLS of a link: how a client shows who it is, and what an error of it means."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import FrameProtocol
from penstock.core.errors import Misconfigured, NotAuthenticated, PenstockError
from penstock.ports.tls import SecureTransport, Tls

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
