"""Counts, totals of lists and the timeline, over HTTP and from the clients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.api.house import an_app, house

from penstock.adapters.http.engine_api import http_engine_api
from penstock.app.application import make_executors
from penstock.app.engine import Engine
from penstock.config import load
from penstock.control import engine_api
from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import JobTotal, KeyRole
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async


@run_async
async def test_counts_and_the_timeline_are_those_of_the_caller(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        acme = await one.key("acme", KeyRole.SUBMIT, tenant="acme")
        for topic in ("job.text.shout", "job.text.shout", "job.text.fail"):
            job = await one.submit(topic)
            await one.call("GET", f"/v1/jobs/{job['job_id']}/wait")
        for token in (acme, None):
            held = (await one.submit("job.text.risky", token=token))["job_id"]
            while (await one.engine.api.get(held)).hold is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        mine = (await one.call("GET", "/v1/counts", token=acme)).json
        assert mine == {"states": {"SCHEDULED": 1}, "topics": {"job.text.risky": {"SCHEDULED": 1}}}
        counts = (await one.call("GET", "/v1/counts")).json
        assert counts["states"] == {"SCHEDULED": 2, "SUCCEEDED": 2, "FAILED": 1}
        assert counts["topics"] == {"job.text.risky": {"SCHEDULED": 2}}
        http = http_engine_api(one.url, one.token)
        await http.connect()
        try:
            told = await http.timeline(5)
            assert len(told.points) == 5
            assert (told.total.submitted, told.total.started) == (5, 3)
            assert told.total.ended == {JobState.SUCCEEDED: 2, JobState.FAILED: 1}
            assert told.total.wait_p99 is not None
            assert [(f.topic, f.count) for f in told.failures] == [("job.text.fail", 1)]
            assert (await http.timeline(5, "job.text.sh*")).total.submitted == 2
            assert (await http.counts()).topics == {"job.text.risky": {JobState.SCHEDULED: 2}}
        finally:
            await http.close()
        theirs = (await one.call("GET", "/v1/timeline?minutes=5", token=acme)).json
        assert theirs["total"]["submitted"] == 1
        assert theirs["failures"] == []
        assert (await one.call("GET", "/v1/timeline?minutes=0")).status == 422
        assert (await one.call("GET", "/v1/timeline?minutes=1441")).status == 422


@run_async
async def test_a_list_tells_its_total_when_it_is_asked_to(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_api, "MAX_COUNTED", 3)
    async with house(tmp_path) as one:
        acme = await one.key("acme", KeyRole.SUBMIT, tenant="acme")
        for _ in range(5):
            await one.submit("job.text.risky", token=acme)
        await one.submit("job.text.hasty", labels={"team": "ml"})

        async def total(query: str, token: str | None = None) -> Any:
            page = (await one.call("GET", f"/v1/jobs?limit=1&{query}", token=token)).json
            return page.get("total")

        assert await total("") is None
        assert await total("total=true") == {"count": 6, "exact": True}
        assert await total("total=true", acme) == {"count": 5, "exact": True}
        assert await total("total=true&state=SCHEDULED&tenant=acme") == {"count": 5, "exact": True}
        assert await total("total=true&tenant=acme", acme) == {"count": 5, "exact": True}
        assert await total("total=true&topic=job.text.*") == {"count": 3, "exact": False}
        assert await total("total=true&label=team%3Dml") == {"count": 1, "exact": True}
        assert await total("total=true&label=team%3Dml", acme) == {"count": 0, "exact": True}
        assert await total("total=true&tenant=other", acme) == {"count": 0, "exact": True}
        dead = (await one.call("GET", "/v1/dead?total=true")).json
        assert dead["total"] == {"count": 0, "exact": True}
        http = http_engine_api(one.url, one.token)
        await http.connect()
        assert await http.count(JobQuery(labels={"team": "ml"})) == JobTotal(1, exact=True)
        await http.close()


@run_async
async def test_a_search_for_an_error_says_whether_it_looked_into_all(
    tmp_path: Path, monkeypatch: Any
) -> None:
    async with house(tmp_path) as one:
        for job_id in ("a", "b"):
            await one.submit("job.text.risky", job_id=job_id)
            reason = {"reason": f"the disk of {job_id}"}
            await one.call("POST", f"/v1/jobs/{job_id}/cancel", reason)

        async def found(query: str) -> tuple[list[str], Any]:
            page = (await one.call("GET", f"/v1/jobs?total=true&{query}")).json
            return [job["job_id"] for job in page["jobs"]], page["total"]

        assert await found("error=DISK") == (["b", "a"], {"count": 2, "exact": True})
        monkeypatch.setattr(engine_api, "MAX_SEARCHED", 1)
        assert await found("error=disk+of+a") == (["a"], {"count": 1, "exact": False})
        assert await found("error=disk&state=FAILED") == ([], {"count": 0, "exact": True})


@run_async
async def test_a_restart_keeps_the_numbers_of_the_day(tmp_path: Path) -> None:
    settings = load(flags={"data_dir": str(tmp_path / "data")})
    app = an_app()
    async with Engine(settings, make_executors(app, settings)) as engine:
        request = JobRequest(
            job_id="a", topic="job.text.shout", context_ptr=encode_data(b'{"text": "x"}')
        )
        await engine.api.submit([request])
        await engine.api.wait("a")
    async with Engine(settings) as engine:
        told = await engine.api.timeline(10)
        assert (told.total.submitted, told.total.ended) == (1, {JobState.SUCCEEDED: 1})
