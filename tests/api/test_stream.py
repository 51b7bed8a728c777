"""The one event stream, over HTTP, of a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.api.house import House, house
from tests.support.waiting import soon

from penstock.adapters.http.connection import Event, EventParser
from penstock.adapters.http.engine_api import http_engine_api
from penstock.core.errors import InvalidRequest
from penstock.ports.bus import HANDSHAKE, HEARTBEAT, Farewell, Handshake, WorkerFacts
from penstock.ports.engine_api import KeyRole, StreamBatch, StreamKind, StreamQuery, journal
from penstock.testing.aio import run_async
from penstock.workloads.pipes.status import NodeView, PipesView


class Viewer:
    """Reads a stream, and keeps what it was told."""

    def __init__(self, content: Any) -> None:
        self._content, self._parser = content, EventParser()
        self.events: list[Event] = []
        self._read = 0

    @property
    def last_id(self) -> str:
        return self._parser.last_id

    async def until(self, claim: Callable[[str, Any], bool]) -> Any:
        """The data of the next event for which it is true."""
        async with asyncio.timeout(30):
            while True:
                while self._read < len(self.events):
                    event = self.events[self._read]
                    self._read += 1
                    if event.data and claim(event.kind, data := json.loads(event.data)):
                        return data
                self.events += self._parser.feed(await self._content.readany())

    def told(self, kind: str) -> list[Any]:
        return [json.loads(event.data) for event in self.events if event.kind == kind]


@asynccontextmanager
async def viewing(one: House, query: str = "", **headers: str) -> AsyncIterator[Viewer]:
    headers.setdefault("Authorization", f"Bearer {one.token}")
    async with one.session.get(f"{one.url}/v1/stream?{query}", headers=headers) as response:
        assert response.status == 200, await response.read()
        yield Viewer(response.content)


def ended(job: dict[str, Any]) -> Callable[[str, Any], bool]:
    return lambda kind, data: (
        kind == "job" and data["job_id"] == job["job_id"] and data["event"] in ("succeed", "cancel")
    )


def has_reason(reason: str) -> Callable[[str, Any], bool]:
    return lambda kind, data: kind == "note" and data["reason"].startswith(reason)


@run_async
async def test_one_stream_tells_of_everything(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        talking = await one.submit("job.text.talk", input={"pause": 60})
        async with viewing(one, f"log={talking['job_id']}") as viewer:
            worker = await viewer.until(lambda kind, _: kind == "worker")
            assert (worker["status"], worker["pool"]) == ("ready", "default")
            await viewer.until(lambda kind, _: kind == "pool")
            await viewer.until(lambda kind, data: kind == "log" and data["text"] == "line 3")
            if not (told := viewer.told("progress")):
                told = [await viewer.until(lambda kind, _: kind == "progress")]
            assert told[-1] == {
                "job_id": talking["job_id"],
                "tenant": "default",
                "topic": "job.text.talk",
                "fraction": 0.5,
                "message": "half of it",
            }
            risky = await one.submit("job.text.risky")
            parked = await viewer.until(lambda kind, _: kind == "approval")
            assert (parked["event"], parked["job_id"]) == ("park", risky["job_id"])
            await viewer.until(lambda kind, data: kind == "counts" and data.get("SCHEDULED") == 1)
            await one.call("POST", "/v1/pipelines/tiny/runs", {})
            await viewer.until(has_reason("stage_start double"))
            await viewer.until(has_reason("stage_complete total"))
            await one.call("POST", "/v1/pools/default/pause")
            await viewer.until(lambda kind, data: kind == "pool" and data["paused"])
            await one.call("POST", f"/v1/jobs/{talking['job_id']}/cancel")
            await viewer.until(ended(talking))


@run_async
async def test_workers_that_come_and_go_and_their_nodes_are_told(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        bus = one.engine.bus
        async with viewing(one, "kind=nodes") as nodes, viewing(one, "kind=worker") as workers:
            bus.publish(HANDSHAKE, [Handshake("w-9", "gpu", ("job.x",), 2, {}, session="s")])
            told = await workers.until(lambda kind, data: data["worker_id"] == "w-9")
            assert (told["pool"], told["slots"]) == ("gpu", 2)
            view = PipesView(nodes=(NodeView(node_id="n1", address="a:1", state="ready"),))
            facts = {"pipes": msgspec.to_builtins(view)}
            bus.publish(HEARTBEAT, [WorkerFacts("w-9", "s", facts)])
            shown = await nodes.until(lambda kind, _: kind == "nodes")
            assert [node["node_id"] for node in shown["nodes"]] == ["n1"]
            bus.publish(HANDSHAKE, [Farewell("w-9", session="s")])
            await workers.until(lambda kind, data: kind == "worker_gone")
            shown = await nodes.until(lambda kind, _: kind == "nodes")
            assert shown["nodes"] == []
            assert {event.kind for event in nodes.events if event.data} == {"nodes"}


@run_async
async def test_a_viewer_that_comes_back_misses_nothing_and_gets_nothing_twice(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as one:
        first = await one.submit("job.text.talk", input={"lines": 2})
        await one.call("GET", f"/v1/jobs/{first['job_id']}/wait")
        query = f"kind=job&kind=log&log={first['job_id']}"
        seen, last_id = [], "0"
        for turn in range(3):
            later = await one.submit()
            async with viewing(one, query, **{"Last-Event-ID": last_id}) as viewer:
                await viewer.until(ended(later))
                if turn == 0 and len(viewer.told("log")) < 2:
                    await viewer.until(lambda kind, data: kind == "log" and data["n"] == 2)
                last_id = viewer.last_id
                seen += [event for event in viewer.events if event.data]
        ids = [event.id for event in seen if event.kind == "job"]
        assert len(ids) == len(set(ids))
        moves = [json.loads(event.data) for event in seen if event.kind == "job"]
        assert len(moves) == 4 * 5
        assert [data["cursor"] for data in moves] == sorted(data["cursor"] for data in moves)
        lines = [json.loads(event.data)["n"] for event in seen if event.kind == "log"]
        assert lines == [1, 2]


@run_async
async def test_a_place_that_the_journal_does_not_have_is_told_as_a_gap(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        async with viewing(one, "after=999999999999&kind=job&kind=worker") as viewer:
            assert (
                "not in this engine's journal"
                in (await viewer.until(lambda kind, _: kind == "gap"))["reason"]
            )
            await viewer.until(ended(await one.submit()))
        http = http_engine_api(one.url, one.token)
        await http.connect()
        with pytest.raises(InvalidRequest):
            async for _ in journal(http, 999999999999):
                pass
        await http.close()


@run_async
async def test_who_missed_too_much_goes_on_from_now_and_is_told(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        for _ in range(3):
            job = await one.submit()
            await one.call("GET", f"/v1/jobs/{job['job_id']}/wait")
        async with viewing(one, "after=0&kind=job&replay=100") as viewer:
            await viewer.until(ended(job))
            assert viewer.told("gap") == []
        # What is read at once is at most a few hundred entries.
        jobs = [{"topic": "job.text.shout"} for _ in range(300)]
        await one.call("POST", "/v1/jobs/batch", {"jobs": jobs})
        await soon(lambda: one.engine.open_jobs.waiting() + len(one.engine.open_jobs.held) == 0)
        async with viewing(one, "after=0&kind=job&replay=100") as viewer:
            gap = await viewer.until(lambda kind, _: kind == "gap")
            assert "100 entries" in gap["reason"]
            later = await one.submit()
            await viewer.until(ended(later))
            assert len(viewer.told("job")) < 1000


@run_async
async def test_tenants_and_submitters_see_only_what_is_theirs(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        acme = await one.key("acme", KeyRole.SUBMIT, tenant="acme")
        operator = await one.key("op", KeyRole.OPERATE, KeyRole.SUBMIT, tenant="globex")
        theirs = await one.submit("job.text.talk", input={"pause": 60})
        mine = await one.submit("job.text.talk", input={"pause": 60}, token=acme)
        key = {"Authorization": f"Bearer {acme}"}
        async with viewing(one, "after=0", **key) as viewer:
            await viewer.until(lambda kind, _: kind == "progress")
            await viewer.until(lambda kind, data: kind == "counts" and data == {"RUNNING": 1})
            told = [json.loads(event.data) for event in viewer.events if event.data]
            assert {data["tenant"] for data in told if "tenant" in data} == {"acme"}
            assert {data["job_id"] for data in told if "job_id" in data} == {mine["job_id"]}
            assert not {"worker", "pool", "nodes"} & {event.kind for event in viewer.events}
        for query, status in (
            ("kind=worker", 403),
            ("kind=nodes", 403),
            (f"log={theirs['job_id']}", 404),
            ("kind=weather", 422),
            ("&".join(f"log=j{n}" for n in range(21)), 422),
            ("after=0-1-2", 422),
        ):
            answer = await one.call("GET", f"/v1/stream?{query}", token=acme)
            assert answer.status == status, query
        other = {"Authorization": f"Bearer {operator}"}
        async with viewing(one, "after=0", **other) as viewer:
            await viewer.until(lambda kind, _: kind == "pool")
            assert viewer.told("job") == viewer.told("progress") == []


@run_async
async def test_filters_hold_together(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        one_job, other = await one.submit(), await one.submit("job.text.slow")
        await one.call("GET", f"/v1/jobs/{one_job['job_id']}/wait")
        for query, count in (
            (f"job_id={one_job['job_id']}", 5),
            (f"job_id={one_job['job_id']}&job_id={other['job_id']}&state=RUNNING", 2),
            ("topic=job.text.sh*&state=SUCCEEDED", 1),
            ("event=accept", 2),
        ):
            async with viewing(one, f"after=0&kind=job&{query}") as viewer:
                for _ in range(count):
                    await viewer.until(lambda kind, _: kind == "job")
                await asyncio.sleep(0.1)
                assert len(viewer.told("job")) == count, query


@run_async
async def test_fifty_idle_viewers_share_one_look_at_the_engine(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        source, store = one.engine.parts.stream, one.engine.store
        looks = reads = 0
        look, events = source._look, store.events

        async def counted_look() -> bool:
            nonlocal looks
            looks += 1
            return await look()

        async def counted_events(after: int, limit: int = 1000) -> Any:
            nonlocal reads
            reads += 1
            return await events(after, limit)

        source._look, store.events = counted_look, counted_events  # type: ignore[method-assign]
        responses = [
            await one.session.get(
                f"{one.url}/v1/stream", headers={"Authorization": f"Bearer {one.token}"}
            )
            for _ in range(50)
        ]
        viewers = [Viewer(response.content) for response in responses]
        for viewer in viewers:
            await viewer.until(lambda kind, _: kind == "counts")
        looks = reads = 0
        await asyncio.sleep(2)
        assert looks <= 5
        assert reads <= 2
        job = await one.submit()
        for viewer in viewers:
            await viewer.until(ended(job))
        for response in responses:
            response.close()
        await soon(lambda: source._task is None and one.server.streams == 0)


@run_async
async def test_a_reader_that_takes_nothing_holds_no_memory(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        reader = one.engine.api.stream(StreamQuery())
        await anext(reader)
        job = await one.submit("job.text.talk", input={"pause": 60})
        progress = one.engine.parts.feed
        await soon(lambda: progress.progress_of(job["job_id"]) is not None)
        for _ in range(20):
            await one.submit()
            await asyncio.sleep(0.05)
        assert len(reader._ready) <= 2  # type: ignore[attr-defined]
        values = one.engine.parts.stream.values.since(0)
        assert len(values) <= 8
        moves = 0
        async with asyncio.timeout(20):
            while moves < 21 * 4:  # all of it is in the journal
                moves += len((await anext(reader)).entries)


@run_async
async def test_the_clients_read_the_same_stream(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        http = http_engine_api(one.url, one.token)
        await http.connect()
        job = await one.submit("job.text.talk", input={"pause": 60})
        query = StreamQuery(logs=(job["job_id"],))
        whole = StreamBatch("")
        async with asyncio.timeout(30):
            async for batch in http.stream(query, "0"):
                whole = StreamBatch(
                    batch.place,
                    whole.entries + batch.entries,
                    whole.lines + batch.lines,
                    whole.progress + batch.progress,
                    whole.workers + batch.workers,
                    pools=whole.pools + batch.pools,
                    counts=batch.counts or whole.counts,
                )
                if (
                    len(whole.lines) == 3
                    and whole.progress
                    and whole.workers
                    and whole.pools
                    and whole.counts
                    and len(whole.entries) >= 4
                ):
                    break
        assert [line.text for line in whole.lines] == ["line 1", "line 2", "line 3"]
        assert whole.workers[0].worker_id == one.engine.worker_id
        cursor, line = map(int, whole.place.split("-"))
        assert line == 3
        async with asyncio.timeout(30):
            async for batch in http.stream(StreamQuery(kinds=(StreamKind.JOB,)), str(cursor)):
                if not batch.entries:
                    await one.submit()
                    continue
                assert batch.entries[0].cursor > cursor
                break
        await http.close()


@run_async
async def test_the_stream_of_one_job_tells_every_move_and_line_once(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        for n in range(5):
            job = await one.submit("job.text.talk", input={"pause": 0.02 * n})
            path = f"/v1/jobs/{job['job_id']}/updates"
            whole, live = await one.call("GET", f"{path}?after=0-0"), await one.call("GET", path)
            told = [event for event in EventParser().feed(whole.body) if event.data]
            moves = [json.loads(e.data)["transition"]["n"] for e in told if e.kind == "moved"]
            lines = [json.loads(e.data)["line"]["n"] for e in told if e.kind == "log"]
            history = await one.engine.api.history(job["job_id"])
            assert (moves, lines) == ([entry.n for entry in history], [1, 2, 3])
            assert [event.kind for event in told].count("end") == 1
            assert b'"moved"' not in live.body  # it had ended: nothing moves any more
