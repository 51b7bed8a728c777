"""What a parent finds whose worker was killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.support.chaos.cluster import cluster, kill
from tests.support.waiting import eventually

from penstock import JobState


def test_a_parent_whose_worker_was_killed_gets_every_outcome_and_no_child_runs_twice(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        c.worker("children", "--concurrency", "2", "--label", "role=child")
        first = c.worker("first", "--label", "role=parent")
        with c.client() as ps:
            given = {"count": 50, "gate": str(gate)}
            job = ps.submit("job.chaos.parent", given, labels={"place.role": "parent"})
            eventually(
                lambda: sum(m[0] == "end" for m in c.marks()) >= 20, "20 of 50 children have run"
            )
            kill(first)
            gate.touch()
            c.worker("second", "--label", "role=parent")
            results = job.result(timeout=60)
            assert len(results) == 50
            for n, said in enumerate(results):
                assert said == n if n % 10 != 9 else f"child {n} failed" in said
            children = ps.jobs(child_of=job.job_id, limit=100)
            assert Counter(one.record.state for one in children) == {
                JobState.SUCCEEDED: 45,
                JobState.FAILED: 5,
            }
            began = Counter(m[1] for m in c.marks() if m[0] == "begin")
            assert {began[one.job_id] for one in children} == {1}
            assert began[job.job_id] == 2
        c.check_history()
