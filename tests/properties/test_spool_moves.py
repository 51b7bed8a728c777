"""Whatever is done to jobs in whatever order: each is in one state, the one the table says."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import data, sampled_from

from penstock.core.errors import Conflict, NotFound, PenstockError
from penstock.lifecycles.spool import SPOOL, VISIBLE, SpoolEvent, Status
from penstock.workloads.spool.client.changes import cancel, clean, retry
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.files import move
from penstock.workloads.spool.disk.job import Meta, fail, finish
from penstock.workloads.spool.disk.workspace import Workspace

_EVENTS = (SpoolEvent.CLAIM, SpoolEvent.RECOVER, SpoolEvent.FINISH, SpoolEvent.FAIL)


class Spool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.workspace = Workspace(self.folder / "w", Sync.NONE)
        self.work, self.flow = Work(self.workspace), Flow(self.workspace)
        self.jobs: dict[str, Status] = {}
        """What each job should be; those that were cleaned away stay, as MISSING."""

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule()
    def submit(self) -> None:
        job_id = self.work.submit("p")
        assert job_id not in self.jobs
        self.jobs[job_id] = Status.QUEUED

    @rule(choice=data(), event=sampled_from(_EVENTS))
    def happen(self, choice: data, event: SpoolEvent) -> None:  # type: ignore[valid-type]
        """A server does its part, or tries to."""
        if not self.jobs:
            return
        job_id = choice.draw(sampled_from(sorted(self.jobs)))  # type: ignore[attr-defined]
        before = self.jobs[job_id]
        try:
            self._act(job_id, event)
        except (Conflict, FileNotFoundError):
            assert (before, event) not in {(state, what) for state, what, _ in SPOOL}
        else:
            self.jobs[job_id] = SPOOL.after(before, event)

    def _act(self, job_id: str, event: SpoolEvent) -> None:
        if event is SpoolEvent.FINISH:
            finish(self.workspace, job_id, Meta(), {"result.txt": job_id.encode()})
        elif event is SpoolEvent.FAIL:
            fail(self.workspace, job_id, Meta(), job_id)
        else:
            claim = event is SpoolEvent.CLAIM
            source = Status.QUEUED if claim else Status.RUNNING
            target = SPOOL.after(source, event)
            places = (self.workspace.of(one, job_id) for one in (source, target))
            move(*places, sync=Sync.NONE)

    @rule(choice=data())
    def cancel(self, choice: data) -> None:  # type: ignore[valid-type]
        if self.jobs:
            job_id = choice.draw(sampled_from(sorted(self.jobs)))  # type: ignore[attr-defined]
            before = self.jobs[job_id]
            try:
                after = cancel(self.workspace, job_id)
            except NotFound:
                assert before is Status.MISSING
                return
            assert after is (before if SPOOL.is_final(before) else Status.FAILED)
            self.jobs[job_id] = after

    @rule(choice=data())
    def retry(self, choice: data) -> None:  # type: ignore[valid-type]
        if self.jobs:
            job_id = choice.draw(sampled_from(sorted(self.jobs)))  # type: ignore[attr-defined]
            try:
                new = retry(self.workspace, job_id)
            except PenstockError:
                assert not SPOOL.is_final(self.jobs[job_id])
            else:
                assert new not in self.jobs
                self.jobs[new] = Status.QUEUED

    @rule(keep=sampled_from([0, 1, 3]))
    def clean(self, keep: int) -> None:
        for job_id in clean(self.workspace, keep=keep):
            assert SPOOL.is_final(self.jobs[job_id])
            self.jobs[job_id] = Status.MISSING
        for status in SPOOL.final:
            assert sum(1 for one in self.jobs.values() if one is status) <= keep

    @invariant()
    def each_job_is_in_one_state_and_what_came_of_it_is_its_own(self) -> None:
        for job_id, status in self.jobs.items():
            held = [one for one in VISIBLE if self.workspace.holds(one, job_id)]
            assert held == ([] if status is Status.MISSING else [status])
            found = self.flow.get(job_id)
            assert found.status is status
            assert (found.content or b"").decode() == (job_id if status is Status.DONE else "")

    @invariant()
    def nothing_is_left_lying_about(self) -> None:
        assert not os.listdir(self.workspace.folder(Status.STAGING))
        assert not os.listdir(self.workspace.private / "trash")
        assert not os.listdir(self.workspace.private / "cancel")
        present = {one for one, status in self.jobs.items() if status is not Status.MISSING}
        assert {one.job_id for one in self.flow.list()} == present


Spool.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestSpool = Spool.TestCase
