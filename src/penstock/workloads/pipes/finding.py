"""Nodes that are workers of one engine find each other through it."""

from __future__ import annotations

from penstock.core.pipes import LABEL
from penstock.ports.desk import Desk


async def addresses(desk: Desk, but: str = "") -> list[str]:
    """Where the nodes among an engine's workers are reached, except for `but` (a worker's id)."""
    found = {
        worker.labels[LABEL]: None
        for worker in await desk.workers()
        if worker.status != "missing" and worker.labels.get(LABEL) and worker.worker_id != but
    }
    return list(found)
