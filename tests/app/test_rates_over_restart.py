"""A limit's rate counts what an earlier engine let go."""

from __future__ import annotations

from pathlib import Path

from penstock import App
from penstock.core.verdict import Rate
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import Limit


def test_a_restart_is_no_way_around_a_rate(tmp_path: Path) -> None:
    app = App()

    @app.job("job.mail")
    def mail() -> None: ...

    with app.run(tmp_path) as client:
        client.limits.put(Limit(name="mails", rate=Rate(2, 3600.0)))
        for _ in range(2):
            mail.submit().result(10)
    with app.run(tmp_path):
        third = mail.submit()
        while "limit mails is reached: 2/h" not in third.why():
            assert third.state in (JobState.PENDING, JobState.SCHEDULED)
