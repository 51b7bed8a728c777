"""Brings back jobs whose server is gone: at the start, and when a peer dies. Blocking code."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable

from penstock.core.errors import Conflict
from penstock.lifecycles.spool import Status
from penstock.ports.clock import Clock
from penstock.workloads.spool.disk.job import JobGone, Loss, count_attempt, give_up, requeue
from penstock.workloads.spool.disk.peers import Peer, Peers, original_runs, returning
from penstock.workloads.spool.disk.workspace import Workspace, is_job_id

log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that a job may be in `processing` with nobody's claim: a tool is just ending it."""
LOST = "SERVER_LOST"


class Recovery:
    """Looks for orphans; how often is its caller's business."""

    def __init__(self, workspace: Workspace, peers: Peers, most: int, clock: Clock) -> None:
        self._workspace, self._peers = workspace, peers
        self._most, self._clock = most, clock
        self._reported: set[str] = set()

    def look(self) -> dict[str, Status]:
        """What has become of each orphan: QUEUED, FAILED, or RUNNING if it could not be moved; the
        next look tries that again."""
        with returning(self._workspace.private):
            dead = [server for server in self._peers.look() if not server.alive]
            # Who is dead, then the jobs, then who has them: a claim is there before its job is.
            names = os.listdir(self._workspace.folder(Status.RUNNING))
            owned = _claimed(server for server in self._peers.look() if server.alive)
            lost = _claimed(dead)
            orphans = [one for one in names if one not in owned and self._is_orphan(one, lost)]
            found = {name: self._recover(name) for name in orphans}
            stuck = {name for name, status in found.items() if status is Status.RUNNING}
            for server in dead:
                if server.claims.isdisjoint(stuck):
                    shutil.rmtree(server.folder, ignore_errors=True)
        return {name: status for name, status in found.items() if status is not Status.MISSING}

    def _is_orphan(self, name: str, lost: set[str]) -> bool:
        """Whether its server is dead, or it has lain there for long enough with nobody's claim."""
        if not is_job_id(name):
            self._report(name, "its name is not a job id")
            return False
        if name in lost:
            return True
        try:
            came = os.lstat(self._workspace.of(Status.RUNNING, name)).st_ctime
        except FileNotFoundError:
            return False
        return self._clock.now() - came >= GRACE and not original_runs(self._workspace.path)

    def _recover(self, job_id: str) -> Status:
        try:
            if self._workspace.holds(Status.QUEUED, job_id):
                raise Conflict("another job with its id is queued")
            attempts = count_attempt(self._workspace, job_id, Loss.LOST)
            if attempts.count < self._most:
                requeue(self._workspace, job_id)
                log.warning("job %s had lost its server; it is queued again", job_id)
                return Status.QUEUED
            give_up(self._workspace, job_id, attempts, LOST, self._clock.now())
            log.error("job %s has lost its server too often; it has failed", job_id)
            return Status.FAILED
        except JobGone:
            return Status.MISSING
        except Exception as error:  # one job that can't be moved must not end the server
            self._report(job_id, str(error))
            return Status.RUNNING

    def _report(self, name: str, why: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            log.warning("%a in processing is left alone: %s", name, why)


def _claimed(servers: Iterable[Peer]) -> set[str]:
    return {job_id for server in servers for job_id in server.claims}
