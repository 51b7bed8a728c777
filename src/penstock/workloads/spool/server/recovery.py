"""Brings back jobs whose server is gone: at the start, and when a peer dies. Blocking code."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable

from msgspec import Struct, field

from penstock.core.errors import Conflict
from penstock.lifecycles.spool import Status
from penstock.ports.clock import Clock
from penstock.workloads.spool.disk.ids import is_job_id
from penstock.workloads.spool.disk.peers import Peer, Peers, original_runs, returning
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.closing import give_up, lose, requeue
from penstock.workloads.spool.server.requests import JobGone
from penstock.workloads.spool.server.running import Loss

log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that a job may be in `processing` with nobody's claim: a tool is just ending it."""
LOST = "SERVER_LOST"


class Recovered(Struct, kw_only=True):
    """What one look did."""

    queued: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    """What could not be moved; the next look tries again."""


class Recovery:
    """Looks for orphans; how often is its caller's business."""

    def __init__(self, workspace: Workspace, peers: Peers, most: int, clock: Clock) -> None:
        self._workspace, self._peers = workspace, peers
        self._most, self._clock = most, clock
        self._reported: set[str] = set()

    def look(self) -> Recovered:
        found = Recovered()
        with returning(self._workspace.private):
            dead = [server for server in self._peers.look() if not server.alive]
            # Who is dead, then the jobs, then who has them: a claim is there before its job is.
            names = os.listdir(self._workspace.folder(Status.RUNNING))
            for name in self._orphans(names, _claimed(dead), self._owned()):
                self._recover(name, found)
            for server in dead:
                if server.claims.isdisjoint(found.stuck):
                    shutil.rmtree(server.folder, ignore_errors=True)
        return found

    def _owned(self) -> set[str]:
        return _claimed(server for server in self._peers.look() if server.alive)

    def _orphans(self, names: Iterable[str], lost: set[str], owned: set[str]) -> list[str]:
        orphans: list[str] = []
        for name in names:
            if not is_job_id(name):
                self._report(name, "its name is not a job id")
            elif name not in owned and (name in lost or self._is_left(name)):
                orphans.append(name)
        return orphans

    def _is_left(self, name: str) -> bool:
        """Whether a job that nobody has claimed has lain there for long enough."""
        try:
            came = os.lstat(self._workspace.of(Status.RUNNING, name)).st_ctime
        except FileNotFoundError:
            return False
        return self._clock.now() - came >= GRACE and not original_runs(self._workspace.path)

    def _recover(self, job_id: str, found: Recovered) -> None:
        try:
            if self._workspace.holds(Status.QUEUED, job_id):
                raise Conflict("another job with its id is queued")
            attempts = lose(self._workspace, job_id, Loss.LOST)
            if attempts.count < self._most:
                requeue(self._workspace, job_id)
                found.queued.append(job_id)
            else:
                give_up(self._workspace, job_id, attempts, LOST, self._clock.now())
                found.failed.append(job_id)
        except JobGone:
            pass
        except Exception as error:  # one job that can't be moved must not end the server
            found.stuck.append(job_id)
            self._report(job_id, str(error))

    def _report(self, name: str, why: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            log.warning("%a in processing is left alone: %s", name, why)


def _claimed(servers: Iterable[Peer]) -> set[str]:
    return {job_id for server in servers for job_id in server.claims}
