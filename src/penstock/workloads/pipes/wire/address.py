"""HOST:PORT, and under which one others reach a node that listens everywhere."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import ip_address

from penstock.core.errors import Misconfigured


def parse(address: str) -> tuple[str, int]:
    """Host and port; `[::1]:7000` for IPv6, `:7000` for all interfaces. Raises Misconfigured."""
    host, colon, port = address.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if (
        not colon
        or not (port.isascii() and port.isdecimal())
        or int(port) > 65535
        or (":" in bare and bare == host)
    ):
        raise Misconfigured(f"{address!r} is not an address", hint="write HOST:PORT")
    return bare, int(port)


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
