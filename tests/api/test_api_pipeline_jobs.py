"""The paths of seed 002 over HTTP, with a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.api.house import Answer, House, house

from penstock.adapters.http.connection import Event, EventParser
from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async

START = "/v1/pipeline/scheduled-run-async"
JOBS = "/v1/pipeline/jobs"
FOREVER = {"numbers": [1], "pause": 3600}


async def start(one: House, config: dict[str, Any] | None = None, name: str = "tiny") -> Answer:
    return await one.call("POST", f"{START}?pipeline={name}", config)


async def ended(one: House, job_id: str) -> None:
    assert (await one.call("GET", f"/v1/jobs/{job_id}/wait?timeout=20")).status == 200


@pytest.mark.seed("002", "6.4")
@run_async
async def test_a_run_is_started_with_its_config_as_the_body(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        begun = await start(one, {"numbers": [1, 2]})
        job_id = begun.json["job_id"]
        assert (begun.status, begun.json) == (
            202,
            {
                "job_id": job_id,
                "trace_id": begun.json["trace_id"],
                "pipeline": "tiny",
                "status": "PENDING",
                "status_url": f"{JOBS}/{job_id}",
                "stream_url": f"{JOBS}/{job_id}/stream",
            },
        )
        await ended(one, job_id)
        record = (await one.call("GET", begun.json["status_url"])).json
        assert (record["status"], record["config"]["numbers"]) == ("COMPLETED", [1, 2])
        assert (await start(one)).status == 202


@pytest.mark.parametrize(
    ("path", "config", "status", "field"),
    [
        (f"{START}?pipeline=tiny", {"nmbers": []}, 422, "config.nmbers"),
        (f"{START}?pipeline=tny", {}, 404, None),
        (START, {}, 422, "pipeline"),
        (f"{START}?pipeline=tiny", [], 422, "body"),
    ],
)
@run_async
async def test_a_wrong_start_is_refused(
    path: str, config: Any, status: int, field: str | None, tmp_path: Path
) -> None:
    async with house(tmp_path) as one:
        answer = await one.call("POST", path, config)
        assert (answer.status, answer.json.get("field")) == (status, field)


@run_async
async def test_a_second_start_is_a_conflict_and_a_bad_key_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        first = (await start(one, FOREVER)).json["job_id"]
        second = await start(one)
        assert (second.status, second.json["running"]) == (409, first)
        assert (await one.call("GET", JOBS, token="nobody")).status == 401
        looker = await one.key("looker", KeyRole.APPROVE)
        refused = await one.call("POST", f"{JOBS}/{first}/cancel", token=looker)
        assert refused.status == 403


@run_async
async def test_jobs_are_listed_newest_first_with_the_number_that_run(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        ids: list[str] = []
        for _ in range(2):
            ids.insert(0, (await start(one)).json["job_id"])
            await ended(one, ids[0])
        listed = (await one.call("GET", JOBS)).json
        assert [job["job_id"] for job in listed["jobs"]] == ids
        assert (listed["total"], listed["running_count"]) == (2, 0)
        newest = (await one.call("GET", f"{JOBS}?limit=1&status=COMPLETED")).json
        assert [job["job_id"] for job in newest["jobs"]] == ids[:1]
        assert (await one.call("GET", f"{JOBS}?status=FAILED")).json["jobs"] == []
        assert (await one.call("GET", f"{JOBS}?status=odd")).status == 422


@run_async
async def test_an_unknown_job_is_not_found(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/stream")):
            assert (await one.call(method, f"{JOBS}/none{path}")).status == 404


@pytest.mark.seed("002", "8.5")
@run_async
async def test_a_job_is_cancelled_once(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        job_id = (await start(one, FOREVER)).json["job_id"]
        first = await one.call("POST", f"{JOBS}/{job_id}/cancel")
        assert first.json == {"cancelled": True, "message": "job is CANCELLED"}
        second = await one.call("POST", f"{JOBS}/{job_id}/cancel")
        assert (second.status, second.json["cancelled"]) == (200, False)
        assert "CANCELLED" in second.json["reason"]


async def _told(one: House, job_id: str, after: str = "") -> list[Event]:
    headers = {"Last-Event-ID": after} if after else {}
    answer = await one.call("GET", f"{JOBS}/{job_id}/stream", headers=headers)
    assert answer.status == 200
    return [event for event in EventParser().feed(answer.body) if event.kind]


@pytest.mark.seed("002", "6.4")
@run_async
async def test_a_stream_is_resumed_by_its_last_id(tmp_path: Path) -> None:
    async with house(tmp_path) as one, asyncio.timeout(30):
        job_id = (await start(one)).json["job_id"]
        await _told(one, job_id)
        whole = await _told(one, job_id)
        assert (whole[0].kind, whole[-1].kind) == ("job_start", "job_complete")
        history = (await one.call("GET", f"/v1/jobs/{job_id}/history")).json["transitions"]
        assert {int(event.id) for event in whole} <= {entry["n"] for entry in history}
        for index, known in enumerate(whole[:-1]):
            assert await _told(one, job_id, known.id) == whole[index + 1 :]
