"""The seed's job status diagram, against what a run's status is: the fold of its job's state."""

from __future__ import annotations

import pytest

from penstock.core.job import Job, JobRequest, JobResult
from penstock.lifecycles.canonical import CANONICAL, JobState
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobStatus
from penstock.workloads.pipeline.rows import status_of

_S = PipelineJobStatus

ARROWS = {
    (_S.PENDING, _S.RUNNING),
    (_S.PENDING, _S.CANCELLED),
    (_S.RUNNING, _S.COMPLETED),
    (_S.RUNNING, _S.PARTIAL),
    (_S.RUNNING, _S.FAILED),
    (_S.RUNNING, _S.CANCELLED),
    (_S.PENDING, _S.FAILED),
}
"""The diagram's, and the one of 'Stale Job Cleanup'."""


def _statuses(state: JobState) -> set[PipelineJobStatus]:
    """What a run may be whose job is in this state."""
    request = JobRequest(job_id="a", topic="job.pipeline.p")
    results: list[JobResult | None] = [None]
    if state is JobState.SUCCEEDED:
        results += [JobResult(job_id="a", status=state, error_code=c) for c in (None, "PARTIAL")]
    return {
        status_of(
            Job(
                seq=1,
                request=request,
                state=state,
                version=1,
                accepted_at=0.0,
                updated_at=0.0,
                result=result,
            )
        )
        for result in results
    }


@pytest.mark.seed("002", "1.14", "8.1")
def test_the_table_has_the_arrows_of_the_diagram_and_no_other() -> None:
    assert {(before, after) for before, _, after in PIPELINE if before is not after} == ARROWS


@pytest.mark.seed("002", "1.13")
def test_the_moves_of_a_job_are_the_arrows_of_its_run() -> None:
    moves = {
        (before, after)
        for was, _, now in CANONICAL
        for before in _statuses(was)
        for after in _statuses(now)
        if was is not now and before is not after
    }
    assert moves == ARROWS


def test_a_run_is_final_when_its_job_is() -> None:
    for state in JobState:
        for status in _statuses(state):
            assert PIPELINE.is_final(status) is CANONICAL.is_final(state)
