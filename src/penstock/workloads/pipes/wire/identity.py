"""Membership of a network: proof of its key.

The key makes a certificate authority, the same in every process that has it, and that signs a
certificate for each process with the node's id as its name. Both sides of a connection ask for
one. So a node without the key can neither join nor listen, and what a node says its id is can be
checked; nodes with the key trust each other.
"""

from __future__ import annotations

import base64
import re
import secrets
import ssl
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from penstock.core.errors import Misconfigured
from penstock.ports.tls import Authority, load_leaf, new_private_key, tls_context

_KEY_BYTES = 32
_KEY = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def new_key() -> str:
    """A key for a new network: 32 random bytes as URL-safe text."""
    return secrets.token_urlsafe(_KEY_BYTES)


def check_node_id(node_id: str) -> str:
    if not _NODE_ID.fullmatch(node_id):
        raise Misconfigured(
            f"{node_id!r} can't be a node's id",
            hint="up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
        )
    return node_id


@dataclass(frozen=True)
class Identity:
    """What a process shows of itself, and how it looks at others."""

    node_id: str
    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def make(cls, key: str, node_id: str) -> Identity:
        """Raises Misconfigured for a key or an id that can't be one."""
        check_node_id(node_id)
        authority = Authority(_authority_key(_key_bytes(key)), "penstock network")
        leaf_key = new_private_key()
        # A node has no host name of its own; its id is compared instead (see `connection`).
        leaf = authority.sign(leaf_key.public_key(), node_id, server=True, client=True)
        server, client = tls_context(ssl.PROTOCOL_TLS_SERVER), tls_context(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, client):
            context.load_verify_locations(cadata=authority.pem.decode())
        load_leaf(leaf, leaf_key, server, client)
        return cls(node_id, server, client)


def _key_bytes(key: str) -> bytes:
    if not _KEY.fullmatch(key.strip()):
        raise Misconfigured("this is not a network key", hint="`penstock node key` makes one")
    return base64.urlsafe_b64decode(key.strip() + "=")


def _authority_key(key: bytes) -> Ed25519PrivateKey:
    seed = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=b"penstock pipes: authority").derive(
        key
    )
    return Ed25519PrivateKey.from_private_bytes(seed)
