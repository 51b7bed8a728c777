"""Pipelines over HTTP: the answers themselves, before a store that a test moves by hand."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from tests.support.api.run_house import T0, RunHouse, a_run, run_house
from tests.support.waiting import soon

from penstock.adapters.http.connection import Event, EventParser
from penstock.adapters.http.engine_api import HttpEngineApi, http_engine_api
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    NotPermitted,
    PipelineBusy,
)
from penstock.core.pointer import encode_data
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.operations import cursor
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.interface import RunQuery
from penstock.workloads.pipeline.records import (
    Breaker,
    BreakerState,
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineRecord,
)

_K = PipelineEventKind

# -- what there is ------------------------------------------------------------------------


@run_async
async def test_pipelines_are_listed_and_shown_with_every_field_of_their_stages() -> None:
    async with run_house() as one:
        listed = await one.call("GET", "/v1/pipelines")
        shown = await one.call("GET", "/v1/pipelines/news")
        assert listed.json["pipelines"] == [shown.json]
        assert shown.json["config_schema"] == {"type": "object"}
        ingest, brief = shown.json["stages"]
        assert (ingest["name"], ingest["over"], ingest["concurrency"]) == (
            "ingest",
            "config:feeds",
            5,
        )
        assert (brief["critical"], brief["timeout"], brief["retry"]) == (False, None, {})
        unknown = await one.call("GET", "/v1/pipelines/nws")
        assert (unknown.status, unknown.json["hint"]) == (404, "did you mean news?")


# -- starting -----------------------------------------------------------------------------


@pytest.mark.seed("002", "8.22")
@run_async
async def test_a_start_is_accepted_and_says_where_to_look() -> None:
    async with run_house() as one:
        answer = await one.call("POST", "/v1/pipelines/news/runs", {"config": {"feeds": ["a"]}})
        assert (answer.status, answer.json) == (
            202,
            {
                "job_id": "run-0",
                "trace_id": "trace-run-0",
                "pipeline": "news",
                "status": "PENDING",
                "status_url": "/v1/runs/run-0",
                "stream_url": "/v1/runs/run-0/stream",
            },
        )
        assert answer.headers["Location"] == "/v1/runs/run-0"
        record = await one.call("GET", answer.json["status_url"])
        assert (record.status, record.json["config"]) == (200, {"feeds": ["a"]})


@pytest.mark.seed("002", "7.18", "8.24")
@run_async
async def test_a_second_start_is_refused_with_the_id_of_the_job_that_runs() -> None:
    async with run_house() as one:
        first = await one.call("POST", "/v1/pipelines/news/runs")
        second = await one.call("POST", "/v1/pipelines/news/runs", {})
        assert (first.status, second.status) == (202, 409)
        assert (second.json["code"], second.json["running"]) == (
            "PIPELINE_BUSY",
            first.json["job_id"],
        )


@pytest.mark.seed("002", "8.23")
@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("nws", {}, 404, None),
        ("news", {"config": {"fedes": []}}, 422, "config.fedes"),
        ("news", {"config": []}, 422, "config"),
        ("news", {"cofig": {}}, 422, "cofig"),
        ("news", {"tenant": 7}, 422, "tenant"),
        ("news", [], 422, "body"),
    ],
)
@run_async
async def test_a_start_that_is_wrong_is_refused_naming_the_field(
    path: str, body: Any, status: int, field: str | None
) -> None:
    async with run_house() as one:
        answer = await one.call("POST", f"/v1/pipelines/{path}/runs", body)
        assert (answer.status, answer.json.get("field")) == (status, field)
        assert (await one.call("GET", "/v1/runs")).json["runs"] == []


@run_async
async def test_an_idempotency_key_is_taken_from_the_header_or_the_body_but_not_from_both() -> None:
    async with run_house() as one:
        path, header = "/v1/pipelines/news/runs", {"Idempotency-Key": "k1"}
        for body in ({}, {"idempotency_key": "k1"}):
            answer = await one.call("POST", path, body, headers=header)
            assert (answer.status, answer.json["job_id"]) == (202, "k1")
        differs = await one.call("POST", path, {"idempotency_key": "k2"}, headers=header)
        assert (differs.status, differs.json["code"]) == (409, "CONFLICT")


@pytest.mark.seed("002", "8.25")
@run_async
async def test_who_has_no_key_or_no_right_starts_and_ends_nothing() -> None:
    async with run_house() as one:
        await one.begin()
        for token, status in (("nobody", 401), ("looker", 403)):
            for path in (
                "/v1/pipelines/news/runs",
                "/v1/runs/r1/cancel",
                "/v1/runs/r1/retry-failed",
                "/v1/breakers/feeds/reset",
            ):
                assert (await one.call("POST", path, token=token)).status == status, path
        assert (await one.call("GET", "/v1/runs/r1", token="looker")).status == 200
        assert (await one.call("GET", "/v1/breakers", token="looker")).status == 403


# -- records ------------------------------------------------------------------------------


@pytest.mark.seed("002", "3.6", "7.17")
@run_async
async def test_a_record_has_one_shape_before_while_and_after_it_runs() -> None:
    async with run_house() as one:
        await one.store.create(a_run("r0"))
        await one.begin()
        shapes = [(await one.call("GET", f"/v1/runs/{job_id}")).json for job_id in ("r0", "r1")]
        await one.finish()
        shapes.append((await one.call("GET", "/v1/runs/r1")).json)
        assert [shape["status"] for shape in shapes] == ["PENDING", "RUNNING", "COMPLETED"]
        for shape in shapes:
            assert list(shape) == list(PipelineRecord.__struct_encode_fields__)
            assert list(shape["stage_progress"]) == ["ingest", "brief"]
            assert shape["stage_progress"]["ingest"].keys() == {
                *shapes[0]["stage_progress"]["brief"]
            }
        assert shapes[1]["stage_progress"]["ingest"]["status"] == "running"
        assert (shapes[1]["finished_at"], shapes[2]["finished_at"]) == (None, T0 + 1)


@run_async
async def test_runs_are_listed_in_pages_that_new_ones_do_not_shift() -> None:
    async with run_house() as one:
        for n in range(7):
            await one.store.create(a_run(f"r{n}", created_at=T0 + n // 2))
        seen: list[str] = []
        path = "/v1/runs?limit=3"
        cursor: str | None = ""
        while cursor is not None:
            page = (await one.call("GET", path + (f"&cursor={cursor}" if cursor else ""))).json
            seen += [run["job_id"] for run in page["runs"]]
            cursor = page["next"]
            await one.store.create(a_run(f"late{len(seen)}", created_at=T0 + 99))
        assert seen == ["r6", "r5", "r4", "r3", "r2", "r1", "r0"]


@run_async
async def test_runs_are_found_by_pipeline_status_tenant_and_the_run_they_retry() -> None:
    async with run_house() as one:
        await one.begin("r1")
        await one.begin("r2", tenant="acme", retry_of="r1")
        await one.finish("r2")
        await one.store.create(a_run("r3", pipeline="other"))

        async def found(query: str) -> list[str]:
            answer = await one.call("GET", f"/v1/runs?{query}")
            assert answer.status == 200, answer
            return sorted(run["job_id"] for run in answer.json["runs"])

        assert await found("pipeline=news") == ["r1", "r2"]
        assert await found("status=RUNNING") == ["r1"]
        assert await found("status=RUNNING&status=PENDING") == ["r1", "r3"]
        assert await found("tenant=acme") == await found("retry_of=r1") == ["r2"]
        after_r2 = cursor("list_runs", (T0, "r2"))
        assert await found(f"cursor={after_r2}") == ["r1"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("status=DONE", "status[0]"),
        ("limit=0", "limit"),
        ("limit=501", "limit"),
        ("cursor=nonsense", "cursor"),
        ("cursor=kqFuBQ", "cursor"),
        (f"cursor={cursor('list_runs', (math.inf, 'r1'))}", "cursor"),
        (f"cursor={cursor('list_runs', 5)}", "cursor"),
        ("pipline=news", "pipline"),
    ],
)
@run_async
async def test_a_listing_that_is_wrong_is_refused_naming_the_parameter(
    query: str, field: str
) -> None:
    async with run_house() as one:
        answer = await one.call("GET", f"/v1/runs?{query}")
        assert (answer.status, answer.json["field"]) == (422, field)


@run_async
async def test_tenants_see_and_end_only_their_own() -> None:
    async with run_house() as one:
        await one.begin("a1", tenant="acme")
        await one.begin("b1", tenant="beta")
        for token, mine, theirs in (("ann", "a1", "b1"), ("bob", "b1", "a1")):
            listed = await one.call("GET", "/v1/runs", token=token)
            assert [run["job_id"] for run in listed.json["runs"]] == [mine]
            for method, path in (
                ("GET", ""),
                ("GET", "/stages/ingest/items"),
                ("GET", "/stream"),
                ("POST", "/cancel"),
                ("POST", "/retry-failed"),
            ):
                answer = await one.call(method, f"/v1/runs/{theirs}{path}", token=token)
                assert answer.status == 404, path
        other = await one.call("POST", "/v1/pipelines/news/runs", {"tenant": "beta"}, token="ann")
        assert other.status == 403
        assert not (await one.call("GET", "/v1/runs/b1")).json["cancel_requested"]


# -- items --------------------------------------------------------------------------------

BLOB = "blob:sha256-" + "0" * 64
BIG = encode_data(json.dumps("x" * 5000).encode())
POINTERS = ("input_ptr", "output_ptr")
ITEMS = [
    ItemRecord(seq=0, key="a", input=encode_data(b'{"n": 1.50}'), output=encode_data(b"null")),
    ItemRecord(
        seq=1,
        key="b",
        input=BIG,
        outcome=ItemOutcome.FAILED,
        error_class=ErrorClass.TIMEOUT,
        error_code="TIMEOUT",
        error="it took too long",
        attempts=3,
    ),
    ItemRecord(seq=2, key="c", input=BLOB, output=encode_data(b"x", "text/plain")),
    ItemRecord(seq=3, key="d", outcome=ItemOutcome.OK, output=encode_data(b"{")),
    ItemRecord(seq=4, key="e", outcome=ItemOutcome.OK, output=encode_data(b"[" * 3000)),
]


@run_async
async def test_small_values_of_items_are_shown_and_others_pointed_to() -> None:
    async with run_house() as one:
        await one.begin()
        await one.put_items(ITEMS)
        path = "/v1/runs/r1/stages/ingest/items"
        answer = await one.call("GET", path)
        shown = answer.json["items"]
        values = [
            {name: item[name] for name in item if name in ("input", "output", *POINTERS)}
            for item in shown
        ]
        assert values[:3] == [
            {"input": {"n": 1.5}, "output": None},
            {"input_ptr": BIG},
            {"input_ptr": BLOB, "output_ptr": encode_data(b"x", "text/plain")},
        ]
        assert [list(value) for value in values[3:]] == [["output_ptr"], ["output_ptr"]]
        assert b'{"n": 1.50}' in answer.body
        assert (shown[1]["error_class"], shown[1]["attempts"]) == ("timeout", 3)
        for query, seqs in (
            ("?outcome=failed", [1]),
            ("?outcome=failed&outcome=ok", [1, 3, 4]),
            ("?limit=2", [0, 1]),
        ):
            page = await one.call("GET", path + query)
            assert [item["seq"] for item in page.json["items"]] == seqs
        seen, following = [], page.json["next"]
        while following is not None:
            page = await one.call("GET", f"{path}?limit=2&cursor={following}")
            seen += [item["seq"] for item in page.json["items"]]
            following = page.json["next"]
        assert seen == [2, 3, 4]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("r1/stages/ingets/items", 404),
        ("r9/stages/ingest/items", 404),
        ("r1/stages/ingest/items?outcome=bad", 422),
        ("r1/stages/ingest/items?limit=501", 422),
        ("r1/stages/ingest/items?cursor=nonsense", 422),
    ],
)
@run_async
async def test_items_that_are_not_there_are_not_listed(path: str, status: int) -> None:
    async with run_house() as one:
        await one.begin()
        assert (await one.call("GET", f"/v1/runs/{path}")).status == status


# -- ending and repeating -----------------------------------------------------------------


@run_async
async def test_a_cancel_says_whether_it_was_accepted_and_what_the_status_is_now() -> None:
    async with run_house() as one:
        await one.store.create(a_run("r0"))
        await one.begin("r1")
        pending = await one.call("POST", "/v1/runs/r0/cancel", {"reason": "enough"})
        assert (pending.status, pending.json["accepted"], pending.json["status"]) == (
            200,
            True,
            "CANCELLED",
        )
        running = await one.call("POST", "/v1/runs/r1/cancel", {"timeout": 0})
        assert (running.json["accepted"], running.json["status"]) == (True, "RUNNING")
        assert one.door.apis["owner"].pipelines.asked == [("enough", 10.0), ("", 0.0)]
        assert (await one.call("GET", "/v1/runs/r1")).json["cancel_requested"] is True


@pytest.mark.seed("002", "8.26")
@run_async
async def test_a_cancel_of_a_run_that_has_ended_is_not_accepted_and_no_error() -> None:
    async with run_house() as one:
        await one.begin()
        await one.finish()
        answer = await one.call("POST", "/v1/runs/r1/cancel")
        assert (answer.status, answer.json["accepted"]) == (200, False)
        assert (answer.json["status"], bool(answer.json["reason"])) == ("COMPLETED", True)
        assert (await one.call("POST", "/v1/runs/nothing/cancel")).status == 404
        too_long = await one.call("POST", "/v1/runs/r1/cancel", {"timeout": 61})
        assert (too_long.status, too_long.json["field"]) == (422, "timeout")


@run_async
async def test_what_failed_is_run_again_as_a_new_run_once_the_first_has_ended() -> None:
    async with run_house() as one:
        await one.begin("good", tenant="acme")
        await one.finish("good")
        await one.begin("bad")
        path = "/v1/runs/bad/retry-failed"
        early = await one.call("POST", path)
        assert (early.status, early.json["code"]) == (409, "ILLEGAL_MOVE")
        await one.finish("bad", failed=1)
        again = await one.call("POST", path)
        assert (again.status, again.headers["Location"]) == (202, again.json["status_url"])
        record = await one.call("GET", again.json["status_url"])
        assert record.json["retry_of"] == "bad"
        busy = await one.call("POST", path)
        assert (busy.status, busy.json["running"]) == (409, again.json["job_id"])
        assert (await one.call("POST", "/v1/runs/good/retry-failed")).status == 422
        assert (await one.call("POST", "/v1/runs/nothing/retry-failed")).status == 404


# -- events -------------------------------------------------------------------------------


@asynccontextmanager
async def stream_of(
    one: RunHouse, query: str = "", **headers: str
) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of r1, as a careful reader gets them; the last one where the server ended."""
    given = {"Authorization": "Bearer owner", **headers}
    url = f"{one.url}/v1/runs/r1/stream{query}"
    async with one.session.get(url, headers=given) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")

        async def events() -> AsyncIterator[Event]:
            parser = EventParser()
            async for data in response.content.iter_any():
                for event in parser.feed(data):
                    yield event

        yield events()


async def kinds_of(events: AsyncIterator[Event]) -> list[str]:
    return [event.kind async for event in events if event.kind]


@pytest.mark.seed("002", "8.16")
@run_async
async def test_a_stream_tells_what_happened_and_what_happens_and_ends_with_the_run() -> None:
    async with run_house() as one:
        await one.begin()
        async with stream_of(one) as events:
            opening = await anext(events)
            assert (opening.id, opening.kind) == ("0", "")
            assert [(await anext(events)).kind for _ in range(2)] == ["job_start", "stage_start"]
            await one.emit("r1", 1, 2)
            await one.save("r1", [(_K.CUSTOM, {"kind": "mine", "text": "a\n\nid: 9"})])
            await one.finish()
            rest = [event async for event in events]
        assert [event.kind for event in rest] == [
            "custom",
            "custom",
            "custom",
            "stage_complete",
            "job_complete",
        ]
        ids = [int(event.id) for event in rest]
        assert ids == sorted(set(ids))
        assert json.loads(rest[2].data) == {
            "id": ids[2],
            "job_id": "r1",
            "at": T0 + 1,
            "kind": "custom",
            "data": {"kind": "mine", "text": "a\n\nid: 9"},
        }


@pytest.mark.seed("002", "8.17")
@run_async
async def test_a_reader_that_comes_back_after_any_event_gets_exactly_the_rest() -> None:
    async with run_house() as one:
        await one.begin()
        await one.emit("r1", 1, 2, 3)
        await one.finish()
        async with stream_of(one) as events:
            whole = [event async for event in events if event.kind]
        assert len(whole) == 7
        for index, known in enumerate(whole[:-1]):
            async with stream_of(one, f"?after={known.id}") as events:
                assert [event async for event in events if event.kind] == whole[index + 1 :]
            last = {"Last-Event-ID": known.id}
            async with stream_of(one, "?after=0", **last) as events:
                assert [event async for event in events if event.kind] == whole[index + 1 :]


@run_async
async def test_a_browser_that_has_it_all_is_told_not_to_come_back() -> None:
    async with run_house() as one:
        await one.begin()
        await one.finish()
        last = (await one.store.events("r1"))[-1].id
        answer = await one.call("GET", "/v1/runs/r1/stream", headers={"Last-Event-ID": str(last)})
        assert (answer.status, answer.body) == (204, b"")


@run_async
async def test_a_run_that_is_cancelled_before_it_starts_has_a_stream_that_ends() -> None:
    async with run_house() as one:
        await one.store.create(a_run("r1"))
        async with stream_of(one) as events:
            await anext(events)
            await one.call("POST", "/v1/runs/r1/cancel")
            assert await kinds_of(events) == ["job_complete"]


@pytest.mark.seed("002", "7.19")
@run_async
async def test_a_stream_of_nothing_is_refused_before_it_opens() -> None:
    async with run_house() as one:
        await one.begin()
        missing = await one.call("GET", "/v1/runs/nothing/stream")
        assert (missing.status, missing.headers["Content-Type"]) == (
            404,
            "application/problem+json",
        )
        for query in ("after=x", "after=-1", "after=1-2", "afer=1"):
            assert (await one.call("GET", f"/v1/runs/r1/stream?{query}")).status == 422
        bad = await one.call("GET", "/v1/runs/r1/stream", headers={"Last-Event-ID": "x"})
        assert bad.status == 422
        assert one.server.streams == 0


@pytest.mark.seed("002", "7.19")
@run_async
async def test_a_silent_stream_gives_signs_of_life_that_tell_where_it_is() -> None:
    async with run_house(heartbeat=0.05) as one:
        await one.begin()
        last = (await one.store.events("r1"))[-1].id
        reader, writer = await one.connect()
        writer.write(one.head("GET", "/v1/runs/r1/stream"))
        beat = b": still here\nid: %d\n\n" % (last or 0)
        await asyncio.wait_for(reader.readuntil(beat), 10)
        await asyncio.wait_for(reader.readuntil(beat), 10)


@pytest.mark.seed("002", "8.18")
@run_async
async def test_a_slow_reader_holds_up_nobody_and_nothing_is_kept_for_it() -> None:
    async with run_house(stall=0.5) as one:
        await one.begin()
        lazy, writer = await one.connect()
        writer.write(one.head("GET", "/v1/runs/r1/stream"))
        await asyncio.wait_for(lazy.readuntil(b"\r\n\r\n"), 10)
        lazy._transport.pause_reading()  # type: ignore[attr-defined]
        drawn = _count_reads(one)
        news = [(_K.CUSTOM, {"text": "x" * 10_000}) for _ in range(100)]
        async with stream_of(one) as events:
            reading = asyncio.create_task(kinds_of(events))
            for _ in range(30):
                await one.save("r1", news)
            await soon(lambda: one.server.streams == 1)  # the lazy one was cut off
            await one.finish()
            assert len(await reading) == 3004
        # Of 30 MB, the lazy one was given what the sockets took, and no more was drawn for it.
        assert sum(drawn) < 3004 + 2000


def _count_reads(one: RunHouse) -> list[int]:
    """How many events are drawn from the store, by all readers."""
    drawn: list[int] = []
    read = one.store.events

    async def counted(job_id: str, after: int = 0, limit: int = 1000) -> list[PipelineEvent]:
        events = await read(job_id, after, limit)
        drawn.append(len(events))
        return events

    one.store.events = counted  # type: ignore[method-assign]
    return drawn


# -- breakers -----------------------------------------------------------------------------


@run_async
async def test_breakers_are_listed_and_closed_by_hand() -> None:
    async with run_house() as one:
        opened = Breaker(name="feeds/a", state=BreakerState.OPEN, failures=5, opened_at=T0)
        assert await one.store.put_breaker(opened)
        (listed,) = (await one.call("GET", "/v1/breakers")).json["breakers"]
        assert (listed["name"], listed["state"], listed["trials"]) == ("feeds/a", "open", 1)
        closed = await one.call("POST", "/v1/breakers/feeds%2Fa/reset")
        assert (closed.status, closed.json["state"]) == (200, "closed")
        assert (await one.call("POST", "/v1/breakers/none/reset")).status == 404


# -- the client ---------------------------------------------------------------------------


@asynccontextmanager
async def a_client(one: RunHouse, token: str = "owner") -> AsyncIterator[HttpEngineApi]:
    api = http_engine_api(one.url, token)
    await api._http.open()  # type: ignore[attr-defined] # this house has no status to ask for
    try:
        yield api
    finally:
        await api.close()


@run_async
async def test_a_client_is_answered_as_if_the_engine_were_here() -> None:
    async with run_house() as one, a_client(one) as api:
        here, there = one.door.apis["owner"].pipelines, api.pipelines
        assert await there.list() == await here.list()
        assert await there.show("news") == await here.show("news")
        started = await there.start("news", {"feeds": []}, idempotency_key="r0")
        assert started == await here.get("r0")
        await one.begin()
        await one.put_items(ITEMS)
        assert await there.get("r1") == await here.get("r1")
        assert await there.items("r1", "ingest") == await here.items("r1", "ingest")
        failed = (ItemOutcome.FAILED,)
        assert [item.seq for item in await there.items("r1", "ingest", outcomes=failed)] == [1]
        for query in (
            RunQuery(),
            RunQuery(limit=1),
            RunQuery(before=(T0, "r1")),
            RunQuery(statuses=(PipelineJobStatus.PENDING,), pipeline="news", tenant="default"),
        ):
            assert await there.runs(query) == await here.runs(query) != []
        assert (await there.cancel("r0")).accepted is True
        assert await there.cancel("r0") == await here.cancel("r0")
        await one.store.put_breaker(Breaker(name="feeds", state=BreakerState.OPEN))
        assert await there.breakers() == await here.breakers()
        assert (await there.reset_breaker("feeds")).state is BreakerState.CLOSED


@run_async
async def test_a_client_is_refused_as_if_the_engine_were_here() -> None:
    async with run_house() as one, a_client(one) as api, a_client(one, "looker") as looker:
        await one.begin()
        there = api.pipelines
        with pytest.raises(PipelineBusy) as busy:
            await there.start("news")
        assert busy.value.running == "r1"
        with pytest.raises(InvalidRequest) as wrong:
            await there.start("news", {"fedes": 1})
        assert wrong.value.field == "config.fedes"
        with pytest.raises(NotFound, match="did you mean news"):
            await there.show("nws")
        with pytest.raises(NotFound):
            await anext(aiter(there.stream("nothing")))
        with pytest.raises(Conflict):
            await there.retry_failed("r1")
        with pytest.raises(NotPermitted):
            await looker.pipelines.start("news")


@run_async
async def test_a_client_pages_through_more_than_one_call_gives() -> None:
    async with run_house() as one, a_client(one) as api:
        await one.begin()
        await one.put_items([ItemRecord(seq=n, key=f"{n}") for n in range(1203)])
        for n in range(602):
            await one.store.create(a_run(f"r-{n}", created_at=T0 - 1 - n // 3))
        items = await api.pipelines.items("r1", "ingest", limit=1201)
        assert [item.seq for item in items] == list(range(1201))
        runs = await api.pipelines.runs(RunQuery(limit=5000))
        assert len({run.id for run in runs}) == len(runs) == 603


@run_async
async def test_a_client_follows_a_run_over_lost_connections_without_gap_or_repeat() -> None:
    async with run_house() as one, a_client(one) as api:
        await one.begin()
        stream = api.pipelines.stream("r1")
        async with aclosing(stream):  # type: ignore[type-var]
            seen = [await anext(stream) for _ in range(2)]
            for n in range(1, 6):
                for connection in one.server._connections():
                    connection.transport.abort()
                await one.emit("r1", n)
                seen.append(await anext(stream))
            await one.finish()
            seen += [event async for event in stream]
        assert seen == await one.store.events("r1")
        again = [event async for event in api.pipelines.stream("r1", after=seen[-1].id)]
        assert again == []
