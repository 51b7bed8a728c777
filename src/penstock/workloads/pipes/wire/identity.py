"""Membership of a network: proof of its key, and the addresses of its nodes.

The key makes a certificate authority, the same in every process that has it, and that signs a
certificate for each process with the node's id as its name. Both sides of a connection ask for
one. So a node without the key can neither join nor listen, and what a node says its id is can be
checked; nodes with the key trust each other.
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from penstock.core.errors import Misconfigured
from penstock.ports.address import parse_host_port
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


# -- addresses --------------------------------------------------------------------------


def parse(address: str) -> tuple[str, int]:
    """Host and port; `[::1]:7000` for IPv6, `:7000` for all interfaces. Raises Misconfigured."""
    try:
        return parse_host_port(address.strip())
    except ValueError:
        raise Misconfigured(f"{address!r} is not an address", hint="write HOST:PORT") from None


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_ELSEWHERE = "192.0.2.1"
"""Nobody's; only asked which way packets would take, and none is sent."""


async def own_address(listening: str, seeds: Sequence[str]) -> str:
    """`listening` itself, unless that is "all interfaces": then the interface by which the first
    of the seeds is reached, or any other node."""
    host, port = parse(listening)
    if not ip_address(host).is_unspecified:
        return listening
    towards = parse(seeds[0])[0] if seeds else _ELSEWHERE
    return join(await _interface(towards or "127.0.0.1"), port)


async def _interface(towards: str) -> str:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, where = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
