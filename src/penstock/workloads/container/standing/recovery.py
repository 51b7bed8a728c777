"""After a restart: what becomes of jobs that ran, and of containers that are still there.

A record names its container before that is started, and the container is removed only after
the record says how it ended. So a job that runs by its record falls in one of four cases: it
names no container and never ran; its container runs, has exited, or may not have been started.
A container that no running record names is nobody's.

`decide` is a function of what was found; `owner_of` is by what it is found.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.config import OnRestart
from penstock.workloads.container.engine import ContainerState, Found
from penstock.workloads.container.job import ContainerRecord

RESTARTED = "the worker was restarted while the job ran"

_OWNER = re.compile(r"worker-[0-9a-f]{32}")


class Adopt(Struct, frozen=True):
    """Take up its container where it is."""

    record: ContainerRecord
    found: Found
    stop: str = ""
    """Why it is to be ended at once; empty: it goes on."""


class Again(Struct, frozen=True):
    """Begin it anew: its container was never started."""

    record: ContainerRecord


class GiveUp(Struct, frozen=True):
    """End the job: nobody can say what its container would have done."""

    record: ContainerRecord
    message: str


class Remove(Struct, frozen=True):
    """A container that no job needs."""

    found: Found


Decision = Adopt | Again | GiveUp | Remove


def decide(
    records: Iterable[ContainerRecord], found: Iterable[Found], on_restart: OnRestart
) -> list[Decision]:
    """What is done about each running record and each container, jobs first."""
    containers = {container.name: container for container in found}
    decisions: list[Decision] = []
    for record in records:
        if record.state is ContainerJobState.RUNNING:
            decision = _of_job(record, containers.get(record.container), on_restart)
            decisions.append(decision)
            if isinstance(decision, Adopt):
                del containers[record.container]
    return [*decisions, *map(Remove, containers.values())]


def _of_job(record: ContainerRecord, found: Found | None, on_restart: OnRestart) -> Decision:
    if not record.container:
        return Again(record)
    if found is None:
        return GiveUp(
            record,
            "the worker was restarted; the job's container had not been made, or was removed "
            "by somebody else",
        )
    if found.state is ContainerState.CREATED:
        # An engine may call one so that it has begun to start: to start it again could be twice.
        return GiveUp(
            record, "the worker was restarted; the job's container was made, but not yet started"
        )
    if on_restart is OnRestart.ADOPT or found.state is ContainerState.EXITED:
        # What has ended by itself is told as it ended.
        return Adopt(record, found)
    return Adopt(record, found, f"{RESTARTED}, and ends what it finds running")


def unsettled(records: Iterable[ContainerRecord], found: Iterable[Found]) -> bool:
    """Whether a job's container was made and not started: the engine may still be about to do
    what the last worker asked of it, so it should be looked at again a little later."""
    made = {one.name for one in found if one.state is ContainerState.CREATED}
    return any(record.container in made for record in records)


def owner_of(folder: Path) -> str:
    """The id by which this folder's containers are known; made once, and kept."""
    path = folder / "owner"
    try:
        owner = path.read_text().strip()
    except FileNotFoundError:
        owner = ""
    if not _OWNER.fullmatch(owner):
        owner = f"worker-{secrets.token_hex(16)}"
        _keep(path, owner + "\n")
    return owner


def _keep(path: Path, text: str) -> None:
    """All of it or nothing, whatever happens; it is there when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with open(new, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
