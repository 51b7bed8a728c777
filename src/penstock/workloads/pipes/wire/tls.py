"""TLS over bytes that someone else carries.

asyncio and uvloop have their own. With this one the peer is always told why it is refused, what
waits to be sent can be counted, and both loops behave the same.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import cast

from penstock.workloads.pipes.wire.counters import Refused
from penstock.workloads.pipes.wire.identity import node_id_of

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


class Tls:
    """One side of one connection. Whatever it is asked may leave bytes to be `taken` and sent;
    ssl.SSLError leaves the alert that tells the peer."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self.ready = False
        """Whether the handshake is over."""
        self.over = False
        """Whether the peer said that nothing more will come."""

    def shake(self) -> None:
        try:
            self._tls.do_handshake()
            self.ready = True
        except ssl.SSLWantReadError:
            pass

    def feed(self, data: memoryview) -> None:
        self._incoming.write(data)

    def read(self, into: memoryview) -> int:
        """How many bytes were put there: 0 if there are none, or only a part of a record."""
        # To ask is much cheaper than SSLWantReadError.
        if not self._incoming.pending and not self._tls.pending():
            return 0
        try:
            # With a buffer it is a number; typeshed knows only the other form.
            count = cast(int, self._tls.read(len(into), into))
        except ssl.SSLWantReadError:
            return 0
        self.over = count == 0
        return count

    def write(self, data: bytes | memoryview) -> None:
        self._tls.write(data)

    def finish(self) -> None:
        """Nothing more will be written."""
        # It would wait for the peer to say the same, and need not.
        with suppress(ssl.SSLError):
            self._tls.unwrap()

    def take(self) -> bytes:
        """What is to be sent."""
        return self._outgoing.read()

    @property
    def node_id(self) -> str:
        """The one in the peer's certificate."""
        return node_id_of(self._tls)


def refusal_of(error: ssl.SSLError) -> tuple[Refused, str]:
    """What it failed for."""
    told = error.reason or ""
    if told in _WRONG_KEY:
        return Refused.WRONG_KEY, "it has another network's key"
    if told in _NO_CERTIFICATE:
        return Refused.NO_CERTIFICATE, "no certificate was shown"
    if told == "DECRYPTION_FAILED_OR_BAD_RECORD_MAC":
        return Refused.TAMPERED, "what came was changed on the way"
    return Refused.NOT_TLS, f"no handshake: {told.replace('_', ' ').lower() or error}"
