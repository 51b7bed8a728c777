"""What a blocking method tells, its async twin tells too."""

from __future__ import annotations

from pathlib import Path

from tests.support.acceptance.bad_jobs import app

import penstock
from penstock.testing.aio import run_async


@run_async
async def test_the_engine_can_be_asked_from_a_callers_own_event_loop(tmp_path: Path) -> None:
    async with app.run(tmp_path) as ps:
        assert await (await ps.asubmit("job.good.add", {"a": 1})) == 2
        failed = await ps.asubmit("job.bad.raises")
        assert (await failed.await_end()).state is penstock.JobState.FAILED
        assert (await ps.astatus()).tally == {
            penstock.JobState.SUCCEEDED: 1,
            penstock.JobState.FAILED: 1,
        }
        (worker,) = await ps.aworkers()
        assert worker.local
        assert (await ps.apipes()).nodes == ()
        assert (await ps.averify()).mismatches == ()

        again = await failed.aretry()
        assert again.record.request.parent_job_id == failed.job_id
        assert (await again.await_end()).state is penstock.JobState.FAILED
        assert (await ps.aprune(0)).jobs == 3
        assert await ps.ajobs() == []
