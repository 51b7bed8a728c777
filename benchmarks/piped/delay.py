"""Slow links between nodes on one machine: `delay.py SECONDS COUNT`.

One proxy for each node, which the others know it by. Prints the ports as JSON, where it listens and
where the node is to; what it carries is late by so many seconds in both directions.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from functools import partial

import uvloop


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(1 << 16):
        loop.call_later(delay, writer.write, data)
    loop.call_later(delay, writer.close)


async def link(
    port: int, delay: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        there, back = await asyncio.open_connection("127.0.0.1", port)
    except OSError:  # the node is not there yet
        writer.close()
        return
    for one in (writer, back):
        one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await asyncio.gather(
        carry(reader, back, delay), carry(there, writer, delay), return_exceptions=True
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def main(delay: float, count: int) -> None:
    ports = []
    for _ in range(count):
        port = free_port()
        server = await asyncio.start_server(partial(link, port, delay), "127.0.0.1", 0)
        ports.append((server.sockets[0].getsockname()[1], port))
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it ends


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), int(sys.argv[2])))
