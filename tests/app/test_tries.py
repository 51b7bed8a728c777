"""An id names one try; the doors agree on what is about that try, and what about the job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import eventually

import penstock
from penstock import JobState


def test_every_door_says_the_same_of_a_try_that_was_retried(tmp_path: Path) -> None:
    app = penstock.App()

    @app.job("job.fails", retries=penstock.RetryPolicy(retries=1, delay=3600))
    def fails() -> None:
        raise OSError("no such site")

    with app.run(tmp_path, http__listen="127.0.0.1:0") as here:
        first = fails.submit().job_id
        second = eventually(lambda: here.get(first).record.successor, "it is retried")
        with (
            penstock.connect(data=tmp_path) as by_link,
            penstock.connect(here.url, token=(tmp_path / "token").read_text()) as by_http,
        ):
            for client in (here, by_link, by_http):
                job = client.get(first)
                assert (job.record.job_id, job.state) == (first, JobState.FAILED)
                assert [moved.job_id for moved in job.history()] == [first] * len(job.history())
                assert re.sub(r"\d+\.\d s", "… s", job.why()) == (
                    f"it ended FAILED: no such site; try 2 is {second}: "
                    "retry backoff: may start in … s"
                )
                assert client.get(second).why().startswith("retry backoff: may start in ")
                with pytest.raises(penstock.WaitTimedOut, match="is still SCHEDULED"):
                    job.result(timeout=0.01)
                assert [one.record.job_id for one in client.jobs()] == [second]
        for named in (first, second):
            shown = show(tmp_path, named)
            assert shown["job_id"] == second
            assert shown["why"].startswith("retry backoff: may start in ")
            assert shown["chain"] == [first, second]
        assert here.get(first).cancel().job.job_id == second


def show(data: Path, job_id: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "--data", str(data), "show", job_id, "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    return json.loads(done.stdout)
