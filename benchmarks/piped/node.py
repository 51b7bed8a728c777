"""A node that holds layers, in a process of its own: `node.py CONFIG`."""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec
import uvloop

from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.node import Node


async def main(config: LpConfig) -> None:
    node = Node(config)
    await node.start()
    print(json.dumps({"address": node.address, "weights": node.record.weights}), flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)  # until whoever started it ends
    finally:
        await node.stop()


if __name__ == "__main__":
    uvloop.run(
        main(
            msgspec.json.decode(sys.argv[1], type=LpConfig, dec_hook=lambda kind, told: kind(told))
        )
    )
