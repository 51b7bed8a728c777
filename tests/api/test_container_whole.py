"""The HTTP API before a real worker, on a fake engine: both sides mean the same."""

from __future__ import annotations

import asyncio
import json
import tarfile
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from tests.support.api.container_house import ContainerHouse, MemoryFacade, a_job
from tests.support.fake_containers import FakeEngine, Say, Script

from penstock.app.container_worker import container_worker
from penstock.config import Settings
from penstock.ports.clock import SystemClock
from penstock.ports.store import Durability
from penstock.testing.aio import run_async
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.job import Stream

EURO = "€".encode()
SCRIPTS = {
    "chatty:1": Script(
        says=(
            Say(b"one " + EURO[:1]),
            Say(b"warning\n", Stream.STDERR),
            Say(EURO[1:] + b" two\n", after=0.02),
        ),
        leaves={"result.txt": b"42"},
    ),
    "fails:1": Script(says=(Say(b"no", Stream.STDERR),), exit_code=3),
    "endless:1": Script(seconds=1e6),
    "echo:1": Script(echoes=True),
}


@asynccontextmanager
async def working(folder: Path) -> AsyncIterator[ContainerHouse]:
    engine = FakeEngine(SystemClock(), SCRIPTS)
    config = WorkerConfig(port=0, jobs_dir=folder / "containers", disk_low_mb=0, stop_grace=0.1)
    settings = Settings(data_dir=folder, durability=Durability.MEMORY)
    async with container_worker(config, settings, engine) as (facade, server):
        house = ContainerHouse(cast("MemoryFacade", facade), server)
        house.session = aiohttp.ClientSession()
        try:
            yield house
        finally:
            await house.end()


def job(job_id: str, image: str, **fields: Any) -> dict[str, Any]:
    return a_job(job_id, runtime={"mode": "image", "image": image}, **fields)


def events_in(body: bytes) -> list[tuple[str, Any]]:
    found = []
    for frame in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if line[:1] != ":")
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


@pytest.mark.seed("003", "1.11")
@run_async
async def test_a_job_runs_and_is_told_of_in_every_way(tmp_path: Path) -> None:
    async with working(tmp_path) as house:
        given = job("a", "chatty:1", outputs=True)
        answer = await house.call("POST", "/jobs?wait=30", given)
        assert (answer.status, answer.json["state"]) == (200, "finished"), answer.body
        told = answer.json
        assert (told["stdout"], told["stderr"]) == ("one € two\n", "warning\n")
        assert (told["exit_code"], told["stdout_bytes"]) == (0, 12)
        events = events_in((await house.call("GET", "/jobs/a/logs?follow=sse")).body)
        texts = {"stdout": "", "stderr": ""}
        for kind, data in events[:-1]:
            texts[kind] += data["text"]
        assert texts == {"stdout": "one € two\n", "stderr": "warning\n"}
        assert events[-1][0] == "end"
        raw = await house.call("GET", "/jobs/a/logs?stream=stdout&raw")
        assert raw.body == "one € two\n".encode()
        (artifact,) = (await house.call("GET", "/jobs/a/artifacts")).json["artifacts"]
        assert artifact["path"] == "result.txt"
        got = await house.call("GET", "/jobs/a/artifacts/result.txt")
        assert (got.body, got.headers["ETag"]) == (b"42", f'"{artifact["sha256"]}"')
        assert (await house.call("GET", "/jobs/a/artifacts/../result.txt")).status == 404
        listed = (await house.call("GET", "/jobs?state=finished")).json["jobs"]
        assert [one["job_id"] for one in listed] == ["a"]


@run_async
async def test_numbers_reach_the_container_as_they_were_submitted(tmp_path: Path) -> None:
    payload = '{"id":1790847362514948097,"ns":1763308800123456789,"f":[1.0,1e400,0.10,-0]}'
    body = (
        b'{"protocol_version":1,"job_id":"a","task":{"payload":%b},"runtime":'
        b'{"mode":"image","image":"echo:1","stdin":"payload","env":{"ID":1790847362514948097}}}'
    ) % payload.encode()
    async with working(tmp_path) as house:
        headers = {"Content-Type": "application/json"}
        answer = await house.call("POST", "/jobs?wait=30", data=body, headers=headers)
        assert (answer.status, answer.json["stdout"]) == (200, payload), answer.body


@run_async
async def test_a_body_that_was_accepted_is_not_too_large_at_the_start(tmp_path: Path) -> None:
    numbers = b",".join([b"1e20"] * 60_000)  # JavaScript would write 21 digits for each
    body = (
        b'{"protocol_version":1,"job_id":"a","task":{"payload":[%b]},'
        b'"runtime":{"mode":"image","image":"chatty:1"}}'
    ) % numbers
    async with working(tmp_path) as house:
        headers = {"Content-Type": "application/json"}
        answer = await house.call("POST", "/jobs?wait=30", data=body, headers=headers)
        assert (answer.status, answer.json["state"]) == (200, "finished"), answer.json["error"]


@run_async
async def test_a_tar_with_a_made_up_header_fails_its_job_at_once(tmp_path: Path) -> None:
    digits = b"1" * (128 << 10)  # Python's own reader would freeze the worker for a minute
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(digits)
    packed = header.tobuf(tarfile.USTAR_FORMAT) + digits
    packed += tarfile.TarInfo("file").tobuf(tarfile.USTAR_FORMAT) + bytes(1024)
    inputs = [{"path": ".", "archive": "tar", "base64": b64encode(packed).decode()}]
    async with working(tmp_path) as house:
        answer = await house.call("POST", "/jobs?wait=30", job("a", "chatty:1", inputs=inputs))
        assert answer.json["error"]["code"] == "INVALID_FIELD", answer.body
        assert "header" in answer.json["error"]["message"]


@run_async
async def test_output_is_followed_live_until_the_end(tmp_path: Path) -> None:
    async with working(tmp_path) as house:
        await house.call("POST", "/jobs", job("a", "chatty:1"))
        events = events_in((await house.call("GET", "/jobs/a/logs?follow=sse")).body)
        assert "".join(d["text"] for kind, d in events if kind == "stdout") == "one € two\n"
        assert events[-1] == (
            "end",
            {"job_id": "a", "state": "finished", "exit_code": 0, "error": None},
        )


@run_async
async def test_a_running_job_is_cancelled_and_a_failed_one_says_why(tmp_path: Path) -> None:
    async with working(tmp_path) as house:
        await house.call("POST", "/jobs", job("a", "endless:1"))
        follows = asyncio.create_task(house.call("GET", "/jobs/a/logs?follow=sse"))
        while (await house.call("GET", "/jobs/a")).json["state"] != "running":
            pass
        answer = await house.call("DELETE", "/jobs/a?wait=30")
        assert (answer.status, answer.json["state"]) == (200, "failed")
        told = (await house.call("GET", "/jobs/a")).json
        assert (told["error"]["code"], told["exit_code"]) == ("CANCELLED", None)
        assert events_in((await follows).body)[-1][1]["error"]["code"] == "CANCELLED"
        failed = await house.call("POST", "/jobs?wait=30", job("b", "fails:1"))
        assert (failed.json["exit_code"], failed.json["error"]["code"]) == (3, "NON_ZERO_EXIT")
        assert failed.json["stderr"] == "no"


@run_async
async def test_bad_submissions_are_refused_as_the_protocol_says(tmp_path: Path) -> None:
    async with working(tmp_path) as house:
        await house.call("POST", "/jobs", job("a", "endless:1"))
        again = await house.call("POST", "/jobs", job("a", "endless:1"))
        assert (again.status, again.json["error"]["code"]) == (409, "JOB_ID_ALREADY_EXISTS")
        dash = await house.call("POST", "/jobs", job("b", "--privileged"))
        assert (dash.status, dash.json["error"]["code"]) == (400, "INVALID_IMAGE")
        for data in (b"{", b"[1", b'{"a":1,"a":2}', b"\xff"):
            headers = {"Content-Type": "application/json"}
            refused = await house.call("POST", "/jobs", data=data, headers=headers)
            assert (refused.status, refused.json["error"]["code"]) == (400, "INVALID_BODY")
        while (await house.call("GET", "/health")).json["running_jobs"] != 1:
            pass
        assert b"penstock" in (await house.call("GET", "/metrics")).body
        assert (await house.call("GET", "/info")).json["worker_id"] == "worker-unnamed"
