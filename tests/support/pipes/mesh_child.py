"""A node that only knows the others, as a process: KEY NODE_ID JOIN LISTEN. Leaves when its
standard input ends."""

from __future__ import annotations

import asyncio
import sys

from penstock.workloads.pipes.net.mesh import Mesh
from penstock.workloads.pipes.wire.identity import Identity


async def main(key: str, node_id: str, join: str, listen: str) -> None:
    seeds = [join] if join else []
    mesh = Mesh(Identity.make(key, node_id), node_id, listen, join=seeds, ping=0.1, silence=1.0)
    await mesh.start()
    print(mesh.address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await mesh.stop("its input ended")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
