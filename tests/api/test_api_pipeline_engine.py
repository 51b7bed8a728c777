"""Pipelines over HTTP, with a real engine that runs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.api import tiny
from tests.support.api.house import Answer, House, house

from penstock.adapters.http.connection import Event, EventParser
from penstock.adapters.http.engine_api import HttpEngineApi, http_engine_api
from penstock.core.errors import NotFound, PipelineBusy
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.interface import RunQuery
from penstock.workloads.pipeline.records import PipelineEventKind, PipelineInfo

FOREVER = {"numbers": [1], "pause": 3600}


async def start(one: House, config: dict[str, Any] | None = None, **fields: Any) -> Answer:
    name, token = fields.pop("name", "tiny"), fields.pop("token", None)
    body = {"config": config or {}, **fields}
    return await one.call("POST", f"/v1/pipelines/{name}/runs", body, token=token)


async def ended(one: House, job_id: str) -> dict[str, Any]:
    waited = await one.call("GET", f"/v1/jobs/{job_id}/wait?timeout=20")
    assert waited.status == 200
    record: dict[str, Any] = (await one.call("GET", f"/v1/runs/{job_id}")).json
    return record


async def told(one: House, job_id: str, after: int | str = 0) -> list[Event]:
    answer = await one.call("GET", f"/v1/runs/{job_id}/stream?after={after}")
    assert answer.status == 200
    events = EventParser().feed(answer.body)
    return [event for event in events if event.kind not in ("", "stage_progress")]  # kept ones


async def running(one: House, job_id: str) -> None:
    """Until an item of it is under way."""
    async with (
        asyncio.timeout(20),
        one.session.get(
            f"{one.url}/v1/runs/{job_id}/stream", headers={"Authorization": f"Bearer {one.token}"}
        ) as response,
    ):
        parser = EventParser()
        async for data in response.content.iter_any():
            if any(event.kind == "stage_start" for event in parser.feed(data)):
                return


@pytest.mark.seed("002", "6.4")
@run_async
async def test_a_run_is_started_followed_and_looked_at(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        begun = await start(one, {"numbers": [1, 2, 3]})
        assert (begun.status, begun.json["pipeline"]) == (202, "tiny")
        job_id = begun.json["job_id"]
        events = await told(one, job_id)
        kinds = [event.kind for event in events]
        assert (kinds[0], kinds[-1]) == ("job_start", "job_complete")
        assert kinds.count("stage_start") == kinds.count("stage_complete") == 2
        assert kinds.count("custom") == 3
        ids = [int(event.id) for event in events]
        assert ids == sorted(set(ids))
        record = await ended(one, job_id)
        assert (record["job_id"], record["status"]) == (job_id, "COMPLETED")
        assert record["trace_id"] == begun.json["trace_id"]
        assert record["config"] == {"numbers": [1, 2, 3], "pause": 0.0}
        done = record["stage_progress"]["double"]
        assert (done["status"], done["total"], done["ok"]) == ("completed", 3, 3)
        listed = await one.call("GET", f"/v1/runs/{job_id}/stages/double/items")
        assert [(i["key"], i["input"], i["output"]) for i in listed.json["items"]] == [
            ("1", 1, 2),
            ("2", 2, 4),
            ("3", 3, 6),
        ]
        (result,) = (await one.call("GET", f"/v1/runs/{job_id}/stages/total/items")).json["items"]
        assert result["output"] == 12
        job = await one.call("GET", f"/v1/jobs/{job_id}")
        assert job.json["state"] == "SUCCEEDED"


@run_async
async def test_a_reader_that_comes_back_gets_exactly_the_rest(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        job_id = (await start(one)).json["job_id"]
        whole = await told(one, job_id)
        await ended(one, job_id)
        for index, known in enumerate(whole[:-1]):
            assert await told(one, job_id, known.id) == whole[index + 1 :]
        over = await one.call("GET", f"/v1/runs/{job_id}/stream?after={whole[-1].id}")
        assert over.status == 204


@run_async
async def test_an_item_that_fails_leaves_the_run_partial_and_is_run_again(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        tiny.mended.clear()
        first = await start(one, {"numbers": [5, -7]})
        record = await ended(one, first.json["job_id"])
        assert record["status"] == "PARTIAL"
        assert record["stage_progress"]["double"]["failed"] == 1
        path = f"/v1/runs/{first.json['job_id']}/stages/double/items?outcome=failed"
        (bad,) = (await one.call("GET", path)).json["items"]
        assert (bad["key"], bad["input"], "output" in bad) == ("-7", -7, False)
        assert "below zero" in bad["error"]
        tiny.mended.add("-7")
        again = await one.call("POST", f"/v1/runs/{first.json['job_id']}/retry-failed")
        assert (again.status, again.headers["Location"]) == (202, again.json["status_url"])
        record = await ended(one, again.json["job_id"])
        assert (record["status"], record["retry_of"]) == ("COMPLETED", first.json["job_id"])
        done = record["stage_progress"]["double"]
        assert (done["ok"], done["reused"]) == (2, 1)
        nothing = await one.call("POST", f"/v1/runs/{again.json['job_id']}/retry-failed")
        assert (nothing.status, nothing.json["code"]) == (422, "INVALID")


@run_async
async def test_a_second_start_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        first = await start(one, FOREVER)
        second = await start(one)
        assert (second.status, second.json["code"], second.json["running"]) == (
            409,
            "PIPELINE_BUSY",
            first.json["job_id"],
        )
        both = [await start(one, FOREVER, name="many") for _ in range(2)]
        assert [answer.status for answer in both] == [202, 202]
        early = await one.call("POST", f"/v1/runs/{first.json['job_id']}/retry-failed")
        assert early.status == 409
        await one.call("POST", f"/v1/runs/{first.json['job_id']}/cancel")
        assert (await start(one)).status == 202


@run_async
async def test_a_run_is_cancelled_and_an_ended_one_is_not(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        job_id = (await start(one, FOREVER)).json["job_id"]
        await running(one, job_id)
        done = await one.call("POST", f"/v1/runs/{job_id}/cancel", {"reason": "enough"})
        assert (done.status, done.json["accepted"], done.json["status"]) == (
            200,
            True,
            "CANCELLED",
        )
        record = await ended(one, job_id)
        assert (record["status"], record["cancel_effective"]) == ("CANCELLED", True)
        assert record["finished_at"] is not None
        again = await one.call("POST", f"/v1/runs/{job_id}/cancel")
        assert (again.status, again.json["accepted"], again.json["status"]) == (
            200,
            False,
            "CANCELLED",
        )
        assert again.json["reason"]
        assert (await told(one, job_id))[-1].kind == "job_complete"


@pytest.mark.parametrize(
    ("name", "config", "status", "field"),
    [
        ("tinny", {}, 404, None),
        ("tiny", {"numbrs": []}, 422, "config.numbrs"),
        ("tiny", {"numbers": ["x"]}, 422, "config.numbers[0]"),
        ("tiny", {"pause": -1}, 422, "config.pause"),
    ],
)
@run_async
async def test_a_start_that_is_wrong_starts_nothing_and_names_what_is_wrong(
    name: str, config: dict[str, Any], status: int, field: str | None, tmp_path: Path
) -> None:
    async with house(tmp_path) as one:
        answer = await start(one, config, name=name)
        assert (answer.status, answer.json.get("field")) == (status, field)
        if status == 404:
            assert "tiny" in answer.json["hint"]
        assert (await one.call("GET", "/v1/runs")).json["runs"] == []


@run_async
async def test_a_job_that_is_no_run_is_none(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        job = await one.submit()
        for path in ("", "/stream", "/stages/double/items"):
            assert (await one.call("GET", f"/v1/runs/{job['job_id']}{path}")).status == 404
        run = (await start(one)).json["job_id"]
        assert (await one.call("GET", f"/v1/runs/{run}/stages/treble/items")).status == 404


@run_async
async def test_the_same_key_is_the_same_run(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        first = await start(one, FOREVER, idempotency_key="k")
        again = await start(one, FOREVER, idempotency_key="k")
        assert (again.status, again.json["job_id"]) == (202, first.json["job_id"])
        other = await start(one, {}, idempotency_key="k")
        assert other.status == 409


@run_async
async def test_tenants_run_beside_each_other_and_see_only_their_own(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        keys = {
            name: await one.key(name, KeyRole.SUBMIT, KeyRole.OPERATE, tenant=name)
            for name in ("acme", "beta")
        }
        runs = {name: await start(one, FOREVER, token=key) for name, key in keys.items()}
        assert [run.status for run in runs.values()] == [202, 202]
        for name, key in keys.items():
            listed = await one.call("GET", "/v1/runs", token=key)
            assert [run["tenant"] for run in listed.json["runs"]] == [name]
        theirs = runs["acme"].json["job_id"]
        for method, path in (
            ("GET", ""),
            ("GET", "/stages/double/items"),
            ("GET", "/stream"),
            ("POST", "/cancel"),
            ("POST", "/retry-failed"),
        ):
            answer = await one.call(method, f"/v1/runs/{theirs}{path}", token=keys["beta"])
            assert answer.status == 404, path
        reused = await start(one, name="many", retry_of=theirs, token=keys["beta"])
        assert reused.status == 404
        forged = await start(one, name="many", tenant="acme", token=keys["beta"])
        assert forged.status == 403
        busy = await start(one, token=keys["beta"])
        assert busy.json["running"] == runs["beta"].json["job_id"]
        reset = await one.call("POST", "/v1/breakers/x/reset", token=keys["beta"])
        assert reset.status == 403


@run_async
async def test_what_is_only_to_be_looked_at_is_not_to_be_changed(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        looker = await one.key("eve", KeyRole.APPROVE)
        job_id = (await start(one, FOREVER)).json["job_id"]
        assert (await one.call("GET", f"/v1/runs/{job_id}", token=looker)).status == 200
        assert (await start(one, token=looker)).status == 403
        for action in ("cancel", "retry-failed"):
            answer = await one.call("POST", f"/v1/runs/{job_id}/{action}", token=looker)
            assert answer.status in (403, 409), action
        assert not (await one.call("GET", f"/v1/runs/{job_id}")).json["cancel_requested"]


# -- the client ---------------------------------------------------------------------------


@asynccontextmanager
async def a_client(one: House) -> AsyncIterator[HttpEngineApi]:
    api = http_engine_api(one.url, one.token)
    await api.connect()
    try:
        yield api
    finally:
        await api.close()


@run_async
async def test_the_client_sees_what_the_engine_sees(tmp_path: Path) -> None:
    async with house(tmp_path) as one, a_client(one) as api:
        here, there = one.engine.api.pipelines, api.pipelines
        declared = msgspec.json.encode(await here.list())
        assert await there.list() == msgspec.json.decode(declared, type=list[PipelineInfo])
        started = await there.start("tiny", {"numbers": [4]})
        live = [event async for event in there.stream(started.id)]
        events = [event for event in live if event.kind is not PipelineEventKind.STAGE_PROGRESS]
        assert events == [event async for event in here.stream(started.id)]
        await one.engine.api.wait(started.id, 20)
        record = await there.get(started.id)
        assert record == await here.get(started.id)
        assert record.status is PipelineJobStatus.COMPLETED
        assert await there.items(started.id, "double") == await here.items(started.id, "double")
        assert await there.runs(RunQuery()) == await here.runs(RunQuery()) == [record]
        assert (await there.cancel(started.id)).accepted is False
        with pytest.raises(NotFound):
            await there.show("tinny")
        busy = await there.start("tiny", FOREVER)
        with pytest.raises(PipelineBusy) as refused:
            await there.start("tiny")
        assert refused.value.running == busy.id
