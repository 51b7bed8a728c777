"""What was refused, counted by its reason."""

from __future__ import annotations

import ssl
from collections import Counter
from enum import StrEnum


class Refused(StrEnum):
    """Names in counters and in status."""

    # A connection that did not come about.
    NOT_TLS = "not_tls"
    NO_CERTIFICATE = "no_certificate"
    WRONG_KEY = "wrong_key"
    OLD_PROTOCOL = "old_protocol"
    NODE_ID_MISMATCH = "node_id_mismatch"
    """HELLO names another node than the certificate."""
    OWN_NODE_ID = "own_node_id"
    SECOND_CONNECTION = "second_connection"
    NOT_ADMITTED = "not_admitted"
    NO_HELLO = "no_hello"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    HANDSHAKE_BROKEN = "handshake_broken"
    """The peer went away before it said who it is."""
    TOO_MANY_HANDSHAKES = "too_many_handshakes"
    # A connection that had to be ended.
    BAD_FRAME = "bad_frame"
    UNKNOWN_KIND = "unknown_kind"
    OVERSIZED = "oversized"
    TRUNCATED = "truncated"
    TAMPERED = "tampered"
    """Bytes were changed, or sent again, on the way."""
    SILENT = "silent"
    NOT_READING = "not_reading"
    # One job of a frame.
    BAD_HASH = "bad_hash"
    BAD_DTYPE = "bad_dtype"
    BAD_SHAPE = "bad_shape"
    NOT_FINITE = "not_finite"
    # A node that is in no way.
    OTHER_WEIGHTS = "other_weights"
    # A word about a job.
    UNKNOWN_JOB = "unknown_job"
    """As a rule one that has just ended."""
    FOREIGN_LANDING = "foreign_landing"
    """Not from who computes the last layers, or of a pass that has more to bring."""
    FOREIGN_FAILURE = "foreign_failure"
    """Not from a node of its way."""
    FOREIGN_END = "foreign_end"
    """Not from its origin."""


class Counters(Counter[str]):
    """One for a node. Others count here too, under names of their own."""

    def add(self, what: str) -> None:
        self[str(what)] += 1


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
