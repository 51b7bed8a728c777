"""Why a peer does not come in."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from penstock.workloads.pipes.wire.connection import Refusal
from penstock.workloads.pipes.wire.counters import Refused
from penstock.workloads.pipes.wire.messages import Hello

Admit = Callable[[Hello], str]
"""Why a peer that proved who it is can't come in all the same; "" lets it in."""

_WRONG_KEY = frozenset(
    {
        "CERTIFICATE_VERIFY_FAILED",
        # What the other side says when it is the one that finds it.
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "TLSV1_ALERT_DECRYPT_ERROR",
    }
)
_NO_CERTIFICATE = frozenset(
    {"PEER_DID_NOT_RETURN_A_CERTIFICATE", "TLSV13_ALERT_CERTIFICATE_REQUIRED"}
)


def refusing(admit: Admit | None) -> Callable[[Hello], Refusal]:
    def ask(hello: Hello) -> Refusal:
        reason = admit(hello) if admit is not None else ""
        return (Refused.NOT_ADMITTED, reason) if reason else None

    return ask


def failure_of(error: OSError) -> tuple[Refused, str]:
    """What a handshake that failed was refused for."""
    if not isinstance(error, ssl.SSLError):
        return Refused.HANDSHAKE_BROKEN, str(error) or "it closed the connection"
    told = error.reason or ""
    if told in _WRONG_KEY:
        return Refused.WRONG_KEY, "it has another network's key"
    if told in _NO_CERTIFICATE:
        return Refused.NO_CERTIFICATE, "no certificate was shown"
    return Refused.NOT_TLS, f"no handshake: {told.replace('_', ' ').lower() or error}"
