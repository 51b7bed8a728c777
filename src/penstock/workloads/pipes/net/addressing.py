"""Under which address others reach a node that listens everywhere."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import ip_address

from penstock.workloads.pipes.wire.address import join, parse

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
