"""A job's output over HTTP: by offset, waiting, as events, and as it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.support.api.container_house import (
    ContainerHouse,
    MemoryFacade,
    container_house,
)
from tests.support.waiting import soon

from penstock.testing.aio import run_async
from penstock.workloads.container.job import ErrorCode, JobError

EURO = "€".encode()


def running(**fields: Any) -> MemoryFacade:
    api = MemoryFacade(**fields)
    api.add("job")
    api.start("job")
    return api


async def _get(house: ContainerHouse, query: str = "") -> dict[str, Any]:
    answer = await house.call("GET", f"/jobs/job/logs{query}")
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


# -- pages --------------------------------------------------------------------------------


@pytest.mark.seed("003", "10.6")
@run_async
async def test_a_stream_is_read_by_offset() -> None:
    async with container_house(running()) as house:
        house.api.write("job", "stdout", b"hello world")
        answer = await house.call("GET", "/jobs/job/logs?stream=stdout")
        assert answer.body == (
            b'{"job_id":"job","stream":"stdout","offset":0,"next":11,"skipped":0,"end":false,'
            b'"text":"hello world"}'
        )
        assert (await _get(house, "?stream=stdout&offset=6&limit=4"))["text"] == "worl"
        assert (await _get(house, "?stream=stdout&offset=-5"))["text"] == "world"
        assert (await _get(house, "?stream=stdout&offset=-500"))["text"] == "hello world"
        assert (await _get(house, "?stream=stdout&offset=11"))["text"] == ""
        assert (await _get(house, "?stream=stderr"))["text"] == ""
        house.api.end("job")
        last = await _get(house, "?stream=stdout&offset=11")
        assert (last["text"], last["next"], last["end"]) == ("", 11, True)


@run_async
async def test_without_a_stream_it_is_stdout() -> None:
    async with container_house(running()) as house:
        house.api.write("job", "stdout", b"out")
        house.api.write("job", "stderr", b"error")
        told = await _get(house, "?offset=1")
        assert (told["stream"], told["text"]) == ("stdout", "ut")


@run_async
async def test_a_character_is_never_cut_in_two() -> None:
    async with container_house(running()) as house:
        data = "aé€😀\n".encode() * 40
        house.api.write("job", "stdout", data[:-3])
        text, offset = "", 0
        for _ in range(200):
            told = await _get(house, f"?stream=stdout&offset={offset}&limit=5")
            assert "\ufffd" not in told["text"]
            text, offset = text + told["text"], told["next"]
            if told["end"]:
                break
            if offset > len(data) - 8 and not house.api.runs["job"].ended:
                house.api.write("job", "stdout", data[-3:])
                house.api.end("job")
        assert text.encode() == data


@run_async
async def test_half_a_character_waits_for_its_rest_and_is_told_at_the_end() -> None:
    async with container_house(running()) as house:
        house.api.write("job", "stdout", b"a" + EURO[:2])
        first = await _get(house, "?stream=stdout")
        assert (first["text"], first["next"]) == ("a", 1)
        held = await _get(house, "?stream=stdout&offset=1")
        assert (held["text"], held["next"], held["end"]) == ("", 1, False)
        asked = asyncio.create_task(_get(house, "?stream=stdout&offset=1&wait=60"))
        await soon(lambda: house.api.waiters)
        assert not asked.done()  # half a character is nothing to answer with
        house.api.write("job", "stdout", EURO[2:])
        told = await asked
        assert (told["text"], told["next"]) == ("€", 4)
        house.api.write("job", "stdout", EURO[:1])
        house.api.end("job")
        last = await _get(house, "?stream=stdout&offset=4")
        assert (last["text"], last["next"], last["end"]) == ("\ufffd", 5, True)


@run_async
async def test_what_is_not_kept_is_counted_and_cut_between_characters() -> None:
    async with container_house(running(kept=20)) as house:
        house.api.write("job", "stdout", EURO * 100)  # kept: 10 bytes, and the last 10
        house.api.end("job")
        text, skipped, offset, end = "", 0, 0, False
        for _ in range(10):
            told = await _get(house, f"?stream=stdout&offset={offset}")
            text, skipped = text + told["text"], skipped + told["skipped"]
            offset, end = told["next"], told["end"]
            if end:
                break
        assert end
        assert text == "€€€" + "\ufffd" + "€€€"  # the tenth byte begins a character that is gone
        assert skipped == 300 - 20 + 1
        tail = await _get(house, "?stream=stdout&offset=-8")
        assert (tail["text"], tail["offset"], tail["skipped"]) == ("€€", 294, 2)


@run_async
async def test_a_wait_is_answered_by_the_next_byte_the_end_or_the_time() -> None:
    async with container_house(running()) as house:
        early = await _get(house, "?stream=stdout&wait=0.01")
        assert (early["text"], early["end"]) == ("", False)
        asked = asyncio.create_task(_get(house, "?stream=stdout&wait=60"))
        await soon(lambda: house.api.waiters)
        house.api.write("job", "stdout", b"x")
        assert (await asked)["text"] == "x"
        asked = asyncio.create_task(_get(house, "?stream=stderr&wait=60"))
        await soon(lambda: house.api.waiters == 1)
        house.api.end("job")
        assert (await asked)["end"] is True
        assert (await _get(house, "?stream=stdout&offset=1&wait=60"))["end"] is True


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("?stream=both", "stream"),
        ("?stream=stdout&limit=3", "limit"),
        ("?stream=stdout&limit=99999999", "limit"),
        ("?stream=stdout&offset=1.5", "offset"),
        ("?follow=ws", "follow"),
        ("?stream=stdout&raw=maybe", "raw"),
    ],
)
@run_async
async def test_a_wrong_parameter_is_named(query: str, field: str) -> None:
    async with container_house(running()) as house:
        answer = await house.call("GET", f"/jobs/job/logs{query}")
        assert (answer.status, answer.json["error"]["field"]) == (400, field)


@pytest.mark.parametrize("query", ["", "?stream=stdout&raw", "?follow=sse", "?wait=5"])
@run_async
async def test_logs_of_an_unknown_job_are_not_found(query: str) -> None:
    async with container_house() as house:
        answer = await house.call("GET", f"/jobs/nope/logs{query}")
        assert (answer.status, answer.body) == (404, b'{"job_id":"nope","state":"not_found"}')


# -- as it is -----------------------------------------------------------------------------


@run_async
async def test_the_bytes_themselves_can_be_downloaded() -> None:
    async with container_house(running(kept=600_000)) as house:
        data = bytes(range(256)) * 4000
        house.api.write("job", "stderr", data)
        answer = await house.call("GET", "/jobs/job/logs?stream=stderr&raw")
        assert answer.body == data[:300_000] + data[-300_000:]
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["Content-Disposition"] == 'attachment; filename="stderr.log"'
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        tail = await house.call("GET", "/jobs/job/logs?stream=stderr&raw=true&offset=-10")
        assert tail.body == data[-10:]
        head = await house.call("HEAD", "/jobs/job/logs?stream=stderr&raw")
        assert (head.status, head.body) == (200, b"")


# -- events -------------------------------------------------------------------------------


class Events:
    """A reader of server-sent events."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.id = ""

    async def next(self) -> tuple[str, Any] | None:
        """The next event, or None at the end."""
        kind, data = "", ""
        while line := await asyncio.wait_for(self._reader.readline(), 20):
            text = line.decode().rstrip("\n")
            name, _, value = text.partition(": ")
            if name == "id":
                self.id = value
            elif name == "event":
                kind = value
            elif name == "data":
                data = value
            elif not text and kind:
                return kind, json.loads(data)
        return None


async def _follow(house: ContainerHouse, query: str = "?follow=sse", last: str = "") -> Events:
    """HTTP/1.0, so that the body comes as it is, and its end is that of the connection."""
    reader, writer = await house.connect()
    head = [f"GET /jobs/job/logs{query} HTTP/1.0", "Host: localhost"]
    head += [f"Last-Event-ID: {last}"] if last else []
    writer.write("\r\n".join([*head, "", ""]).encode())
    status = await reader.readline()
    assert b" 200 " in status, status
    while (await reader.readline()).strip():
        pass
    return Events(reader)


@pytest.mark.seed("003", "10.6")
@run_async
async def test_output_is_told_as_it_comes_until_the_end() -> None:
    async with container_house(running()) as house:
        events = await _follow(house)
        house.api.write("job", "stdout", b"one\n")
        assert await events.next() == (
            "stdout",
            {"offset": 0, "next": 4, "text": "one\n", "skipped": 0},
        )
        assert events.id == "4-0"
        house.api.write("job", "stderr", EURO[:2])
        house.api.write("job", "stdout", b"two")
        assert (await events.next() or ("",))[0] == "stdout"
        assert events.id == "7-0"
        house.api.write("job", "stderr", EURO[2:])
        kind, told = await events.next() or ("", {})
        assert (kind, told["text"], events.id) == ("stderr", "€", "7-3")
        house.api.close("job")  # the streams are over, the record is not
        await soon(lambda: house.api.waiters == 1)
        house.api.end("job", 3, JobError(ErrorCode.NON_ZERO_EXIT, "exit code 3"))
        assert await events.next() == (
            "end",
            {
                "job_id": "job",
                "state": "failed",
                "exit_code": 3,
                "error": {"code": "NON_ZERO_EXIT", "message": "exit code 3"},
            },
        )
        assert events.id == "7-3-end"
        assert await events.next() is None
        await soon(lambda: not house.server.streams)


@run_async
async def test_who_comes_back_goes_on_where_they_were_and_is_sent_away_at_the_end() -> None:
    async with container_house(running()) as house:
        house.api.write("job", "stdout", b"one two")
        house.api.write("job", "stderr", b"error")
        events = await _follow(house, last="4-2")
        told = dict([await events.next() or ("", {}), await events.next() or ("", {})])
        assert told["stdout"]["text"] == "two"
        assert told["stderr"]["text"] == "ror"
        house.api.end("job")
        again = await _follow(house, last=events.id)
        assert (await again.next() or ("",))[0] == "end"
        headers = {"Accept": "text/event-stream", "Last-Event-ID": again.id}
        answer = await house.call("GET", "/jobs/job/logs", headers=headers)
        assert (answer.status, answer.body) == (204, b"")


@pytest.mark.parametrize("last", ["x", "1", "-1-2", "1-2-3", "1-99999999999999999999"])
@run_async
async def test_an_id_that_no_stream_gave_is_refused(last: str) -> None:
    async with container_house(running()) as house:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": last}
        answer = await house.call("GET", "/jobs/job/logs", headers=headers)
        assert (answer.status, answer.json["error"]["field"]) == (400, "Last-Event-ID")


@run_async
async def test_one_stream_can_be_followed_from_its_tail() -> None:
    async with container_house(running()) as house:
        house.api.write("job", "stdout", b"hello world")
        house.api.write("job", "stderr", b"error")
        events = await _follow(house, "?follow=sse&stream=stdout&offset=-5")
        assert (await events.next() or ("", {}))[1] == {
            "offset": 6,
            "next": 11,
            "text": "world",
            "skipped": 0,
        }
        house.api.end("job")
        assert (await events.next() or ("",))[0] == "end"


@run_async
async def test_a_stream_of_a_silent_job_gives_signs_of_life() -> None:
    async with container_house(running(), limits={"heartbeat": 0.05}) as house:
        reader, writer = await house.connect()
        writer.write(house.head("GET", "/jobs/job/logs?follow=sse"))
        async with asyncio.timeout(10):
            await reader.readuntil(b": still here\nid: 0-0\n\n")
            await reader.readuntil(b": still here\nid: 0-0\n\n")


@run_async
async def test_a_browser_gets_events_by_its_accept_header() -> None:
    async with container_house(running()) as house:
        house.api.end("job")
        headers = {"Accept": "text/event-stream"}
        answer = await house.call("GET", "/jobs/job/logs", headers=headers)
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.body.startswith(b"retry: 1000\nid: 0-0\n\n")
        assert (await house.call("HEAD", "/jobs/job/logs", headers=headers)).status == 200


@run_async
async def test_readers_that_leave_or_take_nothing_are_dropped_and_hold_up_nobody() -> None:
    limits = {"stall": 0.4, "max_streams": 2, "max_streams_per_key": 2}
    async with container_house(running(kept=64 << 20), limits=limits) as house:
        _, leaving = await house.connect()
        leaving.write(house.head("GET", "/jobs/job/logs?follow=sse"))
        await soon(lambda: house.server.streams == 1)
        stalled_reader, stalled = await house.connect()
        stalled_reader._transport.pause_reading()  # type: ignore[attr-defined]
        stalled.write(house.head("GET", "/jobs/job/logs?follow=sse"))
        await soon(lambda: house.server.streams == 2)
        full = await house.call("GET", "/jobs/job/logs?follow=sse")
        assert (full.status, full.json["error"]["code"]) == (429, "TOO_MANY")
        leaving.close()
        await soon(lambda: house.server.streams == 1)
        house.api.write("job", "stdout", b"x" * (16 << 20))
        assert (await house.call("GET", "/jobs/job")).status == 200
        await soon(lambda: house.server.streams == 0)
        await soon(lambda: not house.api.waiters)


@run_async
async def test_a_closing_server_ends_its_streams() -> None:
    async with container_house(running()) as house:
        events = await _follow(house)
        waiting = asyncio.create_task(house.call("GET", "/jobs/job?wait=60"))
        await soon(lambda: house.api.waiters == 3)
        await house.server.close()
        assert await events.next() is None
        answer = await waiting
        assert (answer.status, answer.json["error"]["code"]) == (503, "UNAVAILABLE")
        assert house.api.waiters == 0
