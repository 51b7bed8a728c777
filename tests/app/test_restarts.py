"""What an engine knows after a restart on the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock import App
from penstock.core.errors import NotFound, UnknownTopic
from penstock.core.job import RetryPolicy
from penstock.lifecycles.canonical import JobState


def an_app() -> App:
    app = App()

    @app.job("job.ok")
    def ok() -> str:
        return "done"

    @app.job("job.second_try", retries=RetryPolicy(retries=1, delay=0.01))
    def second_try() -> str:
        if not penstock.current().request.retry_number:
            raise ValueError("not yet")
        return "done"

    return app


@pytest.mark.parametrize("topic", ["job.ok", "job.second_try"])
def test_a_job_still_waits_for_a_parent_after_pruning_and_a_restart(
    tmp_path: Path, topic: str
) -> None:
    with an_app().run(tmp_path) as ps:
        parent = ps.submit(topic)
        assert parent.result(timeout=20) == "done"
        child = ps.submit("job.ok", after=parent, delay=3600)
        assert ps.prune(0.0).jobs == 0
    with an_app().run(tmp_path) as ps:
        ps.submit("job.ok").result(timeout=20)  # the scheduler has seen all that waits
        assert ps.get(child.job_id).state is JobState.SCHEDULED
        ps.get(child.job_id).cancel()
        assert ps.prune(0.0).jobs > 1
        with pytest.raises(NotFound):
            ps.get(parent.job_id)


def test_a_topic_is_known_after_a_restart_without_the_app_that_served_it(tmp_path: Path) -> None:
    with an_app().run(tmp_path) as ps:
        ps.submit("job.ok").result(timeout=20)
    with App().run(tmp_path) as ps:
        assert ps.submit("job.ok").state in (JobState.PENDING, JobState.SCHEDULED)
        with pytest.raises(UnknownTopic):
            ps.submit("job.never_served")
