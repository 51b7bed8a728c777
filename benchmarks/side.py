"""One measurement of one side, in a process of its own.

`python side.py SIDE MEASURE FOLDER OPTIONS` prints its figures as JSON. A process each, so
that no side carries another's memory or leaves anything behind for the next.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import sys
from pathlib import Path
from typing import Any

PENSTOCK, HUEY_FSYNC, HUEY = "penstock", "huey-fsync", "huey"
PGQUEUER, DRAMATIQ = "pgqueuer", "dramatiq"

SIDES = {
    PENSTOCK: "Penstock",
    HUEY_FSYNC: "Huey, SQLite, fsync",
    HUEY: "Huey, SQLite, no fsync",
    PGQUEUER: "PgQueuer, PostgreSQL, fsync",
    DRAMATIQ: "Dramatiq, Redis, memory",
}


def measure_penstock(measure: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    from ours import blocking, placing, size, speed, steadiness
    from web import fanout, reading, submitting

    from penstock.app.portal import new_event_loop  # what 'penstock up' runs on

    figures: dict[str, Any]
    for module in (speed, blocking, size, steadiness, placing, submitting, reading, fanout):
        if (wanted := getattr(module, measure, None)) is None:
            continue
        if not inspect.iscoroutinefunction(wanted):
            figures = wanted(folder / "data", **options)
            return figures
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            figures = runner.run(wanted(folder / "data", **options))
            return figures
    raise ValueError(f"nothing measures {measure}")


def measure_peer(
    side: str, measure: str, folder: Path, options: dict[str, Any]
) -> dict[str, float | None]:
    from peers import measures
    from peers.peer import Peer

    peer: Peer
    if side == DRAMATIQ:
        from peers.dramatiq import DramatiqPeer

        peer = DramatiqPeer(folder)
    elif side == PGQUEUER:
        from peers.pgqueuer import PgQueuerPeer

        peer = PgQueuerPeer(folder)
    else:
        from peers.huey import HueyPeer

        peer = HueyPeer(folder, fsync=side == HUEY_FSYNC)
    try:
        peer.clear()
        figures: dict[str, float | None] = getattr(measures, measure)(peer, **options)
        return figures
    finally:
        peer.close()


def main() -> None:
    side, measure, folder, options = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwind, so that nothing is left
    take = measure_penstock if side == PENSTOCK else lambda *rest: measure_peer(side, *rest)
    print(json.dumps(take(measure, Path(folder), json.loads(options))))


if __name__ == "__main__":
    main()
