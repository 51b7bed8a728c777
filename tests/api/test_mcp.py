"""Topics as tools of an AI agent: the client of MCP's own SDK, over standard input and output (a
real process) and over HTTP, with the protocol's older handshake and without."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from tests.support.waiting import soon

import penstock
from penstock import App, Pipeline
from penstock.api.mcp import McpServer
from penstock.app.application import make_executors
from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.errors import NotRunning
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import KeyRole, Limit, TopicView
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async

RULES = """
default = "allow"

[[rules]]
id = "ask-first"
decision = "require_approval"
topics = ["job.risky"]
approval = { approvers = ["alice"], self_approval = true }

[[rules]]
id = "no-agents"
decision = "deny"
topics = ["job.forbidden"]
labels = { via = "mcp" }
reason = "agents may not do this"
"""

WAYS = ["stdio", "stdio-legacy", "http", "http-legacy"]
every_way = pytest.mark.parametrize("way", WAYS)
both_transports = pytest.mark.parametrize("way", ["stdio", "http"])


def an_app(gate: threading.Event) -> App:
    app = App()

    @app.job("job.text.shout")
    def shout(text: str, times: int = 1) -> str:
        """Make a text loud."""
        return text.upper() * times

    @app.job("job.text.fail")
    def fail() -> None:
        raise ValueError("no such luck")

    @app.job("job.risky")
    def risky() -> str:
        return "done"

    @app.job("job.forbidden")
    def forbidden() -> None: ...

    @app.job("job.slow")
    def slow(ctx: penstock.Context) -> dict[str, str]:
        ctx.log("begun", "warning")
        ctx.progress(0.5, "half")
        while not gate.wait(0.02):
            ctx.cancel.raise_if_requested()
        return {"said": "at last"}

    @app.job("job.files")
    def files(ctx: penstock.Context, size: int = 10) -> str:
        ctx.artifact_sync("notes/a b.txt", b"a note")
        ctx.artifact_sync("raw.bin", b"\xff\x00")
        ctx.artifact_sync("huge.bin", bytes(5 << 20))
        return "x" * size

    report = Pipeline("report")

    @report.step()
    async def only(ctx: Any) -> str:
        return "written"

    app.add(report)
    return app


class House:
    """A running engine, and the ways of an agent to it."""

    def __init__(self, engine: Engine, folder: Path, gate: threading.Event) -> None:
        self.engine, self.folder, self.gate = engine, folder, gate
        self.token = (folder / "token").read_text().strip()

    @asynccontextmanager
    async def agent(self, way: str, token: str = "", **options: Any) -> AsyncIterator[Any]:
        transport, _, era = way.partition("-")
        options.setdefault("cache", None)
        if transport == "stdio":
            path = os.pathsep.join(sys.path)
            told = StdioServerParameters(
                command=sys.executable,
                args=["-m", "penstock.cli", "--data", str(self.folder), "mcp"],
                env={**os.environ, "PYTHONPATH": path},
            )
            async with Client(stdio_client(told), mode=era or "auto", **options) as client:
                yield client
            return
        url = options.pop("url", f"{self.engine.url}/mcp")
        headers = {"Authorization": f"Bearer {token or self.token}"}
        async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
            wire = streamable_http_client(url, http_client=http)
            async with Client(wire, mode=era or "auto", **options) as client:
                yield client

    async def jobs(self) -> list[str]:
        return [job.job_id for job in await self.engine.api.find(JobQuery())]

    async def approve(self, job_id: str) -> None:
        alice = await self.key("alice", KeyRole.APPROVE)
        async with penstock.connect(self.engine.url, token=alice) as client:
            await client.api.approvals.approve(job_id)

    async def key(self, name: str, *roles: KeyRole, tenant: str | None = None) -> str:
        return (await self.engine.api.keys.create(name, roles, tenant=tenant)).token


@asynccontextmanager
async def a_house(folder: Path, **flags: Any) -> AsyncIterator[House]:
    gate = threading.Event()
    (folder / "rules.toml").write_text(RULES)
    settings = load(
        flags={
            "data_dir": str(folder),
            "durability": "os",
            "http": "127.0.0.1:0",
            "rules": str(folder / "rules.toml"),
            **flags,
        }
    )
    try:
        async with Engine(settings, make_executors(an_app(gate), settings)) as engine:
            yield House(engine, folder, gate)
    finally:
        gate.set()


def patient(seconds: float) -> Any:
    return {"penstock/wait": seconds}


@every_way
@run_async
async def test_every_topic_is_a_tool_and_a_call_returns_the_result(
    way: str, tmp_path: Path
) -> None:
    async with a_house(tmp_path) as house, house.agent(way) as agent:
        tools = {tool.name: tool for tool in (await agent.list_tools()).tools}
        assert tools.keys() >= {"text__shout", "slow", "pipeline__report", "job_wait", "job_list"}
        assert "Make a text loud." in (tools["text__shout"].description or "")
        schema = tools["text__shout"].input_schema
        assert schema["required"] == ["text"]
        assert schema["properties"]["times"] == {"type": "integer", "default": 1}
        told = await agent.call_tool("text__shout", {"text": "hi", "times": 2})
        assert told.structured_content["result"] == "HIHI"
        assert told.structured_content["state"] == "SUCCEEDED"
        (job_id,) = await house.jobs()
        assert told.structured_content["job_id"] == job_id
        run = await agent.call_tool("pipeline__report", {})
        assert run.structured_content["result"]["status"] == "COMPLETED"


@run_async
async def test_the_command_serves_http_to_agents_with_its_token(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        command = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli", "--data", str(tmp_path)),
            *("mcp", "--http", "127.0.0.1:0"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE,
        )
        assert command.stdout is not None
        try:
            said = (await command.stdout.readuntil(b"ready")).decode()
            (url,) = re.findall(r"http://\S+", said)
            assert str(tmp_path / "token") in said
            assert house.token not in said
            for way in ("http", "http-legacy"):
                async with house.agent(way, url=url) as agent:
                    told = await agent.call_tool("text__shout", {"text": "hi"})
                    assert told.structured_content["result"] == "HI"
            key = await house.key("anna", KeyRole.SUBMIT)
            async with httpx2.AsyncClient() as stranger:
                for headers in ({}, {"Authorization": f"Bearer {key}"}):
                    assert (await stranger.post(url, headers=headers, json={})).status_code == 401
        finally:
            command.send_signal(signal.SIGTERM)
        assert await command.wait() == 0


@both_transports
@run_async
async def test_bad_input_names_the_field_and_stores_nothing(way: str, tmp_path: Path) -> None:
    async with a_house(tmp_path) as house, house.agent(way) as agent:
        for given, said in (
            ({"text": 3}, "input.text: expected string, got integer"),
            ({}, "input.text: is missing"),
            ({"text": "a", "loud": True}, "input.loud: unknown field"),
        ):
            told = await agent.call_tool("text__shout", given)
            assert told.is_error
            assert told.content[0].text.startswith(said)
        told = await agent.call_tool("text__shout", {"text": "a"}, meta=patient(-1))
        assert told.content[0].text.startswith("_meta.penstock/wait: must be from 0 to")
        told = await agent.call_tool("job_wait", {"job_id": "nobody"})
        assert told.is_error
        assert "nobody" in told.content[0].text
        with pytest.raises(MCPError, match="Unknown tool: text__whisper"):
            await agent.call_tool("text__whisper", {})
        assert await house.jobs() == []


@every_way
@run_async
async def test_progress_and_log_lines_reach_the_agent(way: str, tmp_path: Path) -> None:
    lines, steps = [], []

    async def on_log(line: Any) -> None:
        lines.append((line.level, line.data))

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        steps.append((done, total, message))
        house.gate.set()

    async with (
        a_house(tmp_path) as house,
        house.agent(way, log_level="info", logging_callback=on_log) as agent,
    ):
        told = await agent.call_tool("slow", {}, progress_callback=on_progress)
        assert told.structured_content["result"] == {"said": "at last"}
        assert steps == [(0.5, 1.0, "half")]
        assert lines == [("warning", "begun")]


@both_transports
@run_async
async def test_a_long_job_returns_its_id_and_is_waited_for_later(way: str, tmp_path: Path) -> None:
    async with a_house(tmp_path) as house, house.agent(way) as agent:
        told = await agent.call_tool("slow", {}, meta=patient(0.3))
        assert not told.is_error
        job = {"job_id": told.structured_content["job_id"]}
        assert told.structured_content["state"] == "RUNNING"
        assert "job_wait gets its result" in told.structured_content["message"]
        now = await agent.call_tool("job_wait", {**job, "seconds": 0.1})
        assert now.structured_content["state"] == "RUNNING"
        house.gate.set()
        ended = await agent.call_tool("job_wait", job)
        assert ended.structured_content["result"] == {"said": "at last"}
        listed = await agent.call_tool("job_list", {"state": "SUCCEEDED", "topic": "job.sl*"})
        assert [one["job_id"] for one in listed.structured_content["jobs"]] == [job["job_id"]]


@both_transports
@run_async
async def test_what_awaits_approval_says_whose_and_goes_on_after_it(
    way: str, tmp_path: Path
) -> None:
    async with a_house(tmp_path) as house, house.agent(way) as agent:
        told = await agent.call_tool("risky", {})
        assert not told.is_error
        assert told.structured_content["state"] == "SCHEDULED"
        assert "awaiting 1 approval by alice" in told.structured_content["message"]
        assert "(rule ask-first)" in told.structured_content["message"]
        assert "It runs when a person has approved it" in told.structured_content["message"]
        waiting = asyncio.create_task(
            agent.call_tool("job_wait", {"job_id": told.structured_content["job_id"]})
        )
        await house.approve(told.structured_content["job_id"])
        assert (await waiting).structured_content["result"] == "done"


@both_transports
@run_async
async def test_what_is_denied_or_fails_says_why(way: str, tmp_path: Path) -> None:
    async with a_house(tmp_path) as house, house.agent(way) as agent:
        told = await agent.call_tool("forbidden", {})
        assert told.is_error
        assert told.structured_content["state"] == "DENIED"
        assert "no-agents" in told.structured_content["message"]
        assert "agents may not do this" in told.structured_content["message"]
        failed = await agent.call_tool("text__fail", {})
        assert failed.is_error
        assert "no such luck" in failed.structured_content["error"]["message"]
        assert "Traceback" not in str(failed)


@every_way
@run_async
async def test_cancelling_a_call_cancels_its_job(way: str, tmp_path: Path) -> None:
    began = asyncio.Event()

    async def on_progress(*_: Any) -> None:
        began.set()

    async with a_house(tmp_path) as house, house.agent(way) as agent:
        call = asyncio.create_task(agent.call_tool("slow", {}, progress_callback=on_progress))
        await asyncio.wait_for(began.wait(), 20)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        (job_id,) = await house.jobs()
        job = await house.engine.api.wait(job_id, 20)
        assert job.state is JobState.CANCELLED
        told = await agent.call_tool("job_status", {"job_id": job_id})
        assert told.structured_content["state"] == "CANCELLED"


@pytest.mark.parametrize("way", ["stdio", "stdio-legacy", "http-legacy"])
@run_async
async def test_a_job_outlives_the_connection_of_its_agent(way: str, tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        async with house.agent(way) as agent:
            told = await agent.call_tool("slow", {}, meta=patient(0.1))
        house.gate.set()
        job = await house.engine.api.wait(told.structured_content["job_id"], 20)
        assert job.state is JobState.SUCCEEDED


@run_async
async def test_job_cancel_ends_a_job(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house, house.agent("http") as agent:
        told = await agent.call_tool("slow", {}, meta=patient(0.1))
        job_id = told.structured_content["job_id"]
        ended = await agent.call_tool("job_cancel", {"job_id": job_id, "reason": "enough"})
        assert ended.structured_content["state"] == "CANCELLED"


@run_async
async def test_a_request_with_the_same_key_is_the_same_job(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house, house.agent("http") as agent:
        key: Any = {"penstock/idempotency_key": "once"}
        first = await agent.call_tool("text__shout", {"text": "a"}, meta=key)
        again = await agent.call_tool("text__shout", {"text": "a"}, meta=key)
        assert first.structured_content == again.structured_content
        assert len(await house.jobs()) == 1


@both_transports
@run_async
async def test_results_artifacts_and_logs_are_resources_of_bounded_size(
    way: str, tmp_path: Path
) -> None:
    async with a_house(tmp_path) as house, house.agent(way) as agent:
        told = await agent.call_tool("files", {})
        job = f"penstock://jobs/{told.structured_content['job_id']}"
        names = {link.uri: link.name for link in told.content[1:]}
        assert f"{job}/artifacts/notes/a%20b.txt" in names
        (result,) = (await agent.read_resource(f"{job}/result")).contents
        assert result.text == '"xxxxxxxxxx"'
        (note,) = (await agent.read_resource(f"{job}/artifacts/notes/a%20b.txt")).contents
        assert (note.text, note.mime_type) == ("a note", "text/plain")
        (raw,) = (await agent.read_resource(f"{job}/artifacts/raw.bin")).contents
        assert raw.blob == "/wA="
        with pytest.raises(MCPError, match="5,242,880 bytes"):
            await agent.read_resource(f"{job}/artifacts/huge.bin")
        with pytest.raises(MCPError, match="left no artifact"):
            await agent.read_resource(f"{job}/artifacts/none")
        with pytest.raises(MCPError, match="not a resource"):
            await agent.read_resource("file:///etc/passwd")
        long = await agent.call_tool("files", {"size": 100_000})
        assert "result" not in long.structured_content
        assert "read it as a resource" in long.structured_content["message"]
        listed = {resource.uri for resource in (await agent.list_resources()).resources}
        assert f"{job}/result" in listed
        templates = (await agent.list_resource_templates()).resource_templates
        assert "penstock://jobs/{job_id}/result" in {one.uri_template for one in templates}


@run_async
async def test_a_key_sees_its_own_tenant_alone(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        acme = await house.key("ann", KeyRole.SUBMIT, tenant="acme")
        beta = await house.key("bob", KeyRole.SUBMIT, tenant="beta")
        async with house.agent("http", acme) as ann, house.agent("http-legacy", beta) as bob:
            told = await ann.call_tool("text__shout", {"text": "mine"})
            job_id = told.structured_content["job_id"]
            assert (await house.engine.api.get(job_id)).request.tenant == "acme"
            for tool in ("job_status", "job_wait", "job_cancel"):
                assert (await bob.call_tool(tool, {"job_id": job_id})).is_error
            assert (await bob.call_tool("job_list", {})).structured_content == {"jobs": []}
            with pytest.raises(MCPError, match="no job"):
                await bob.read_resource(f"penstock://jobs/{job_id}/result")
            assert (await bob.list_resources()).resources == []


@run_async
async def test_limits_hold_for_the_jobs_of_an_agent(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        limit = Limit(name="one", topics=("job.slow",), concurrency=1, max_waiting=1)
        await house.engine.api.limits.put(limit)
        async with house.agent("http") as agent:
            first = await agent.call_tool("slow", {}, meta=patient(0))
            assert first.structured_content["state"] in ("SCHEDULED", "DISPATCHED", "RUNNING")
            second = await agent.call_tool("slow", {}, meta=patient(0.5))
            assert second.structured_content["state"] == "SCHEDULED"
            assert "limit one" in second.structured_content["message"]
            third = await agent.call_tool("slow", {})
            assert third.is_error
            assert "limit one" in third.content[0].text


@run_async
async def test_a_key_that_may_not_submit_has_no_topics(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        key = await house.key("reader", KeyRole.APPROVE)
        async with house.agent("http", key) as agent:
            names = [tool.name for tool in (await agent.list_tools()).tools]
            assert names == ["job_status", "job_wait", "job_cancel", "job_list"]
            with pytest.raises(MCPError, match="Unknown tool"):
                await agent.call_tool("text__shout", {"text": "a"})


@run_async
async def test_over_http_a_key_is_needed_and_a_session_belongs_to_one(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house, httpx2.AsyncClient() as http:
        url = f"{house.engine.url}/mcp"
        assert (await http.post(url, json={})).status_code == 401
        wrong = {"Authorization": "Bearer nonsense"}
        assert (await http.post(url, json={}, headers=wrong)).status_code == 401
        owner = {"Authorization": f"Bearer {house.token}"}
        elsewhere = {**owner, "Host": "evil.example"}
        assert (await http.post(url, json={}, headers=elsewhere)).status_code == 421
        begin = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "t", "version": "0"},
            },
        }
        accept = {"Accept": "application/json, text/event-stream"}
        opened = await http.post(url, json=begin, headers=owner | accept)
        session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
        other = {"Authorization": f"Bearer {await house.key('bob', KeyRole.SUBMIT)}"}
        listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
        stolen = await http.post(url, json=listing, headers=other | accept | session)
        assert stolen.status_code == 404
        mine = await http.post(url, json=listing, headers=owner | accept | session)
        assert mine.status_code == 200
        figures = (await http.get(f"{house.engine.url}/metrics", headers=owner)).text
        for status in ("401", "404", "200"):
            line = f'penstock_http_requests_total{{method="POST",route="/mcp",status="{status}"}}'
            assert line in figures


@both_transports
@run_async
async def test_an_agent_goes_on_after_a_restart_of_the_engine(way: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with a_house(tmp_path) as house:
            port = house.engine.url.rpartition(":")[2]
            agent = await stack.enter_async_context(house.agent(way))
            told = await agent.call_tool("risky", {})
            assert told.structured_content["state"] == "SCHEDULED"
        job = {"job_id": told.structured_content["job_id"]}
        async with a_house(tmp_path, http=f"127.0.0.1:{port}") as house:
            await house.approve(job["job_id"])
            ended = await agent.call_tool("job_wait", job)
            assert ended.structured_content["result"] == "done"
            again = await agent.call_tool("text__shout", {"text": "still here"})
            assert again.structured_content["result"] == "STILL HERE"
            await stack.aclose()


class Topics:
    """An EngineApi whose topics change."""

    def __init__(self) -> None:
        self.views = [TopicView(topic="job.a")]
        self.is_away = False

    async def describe_topics(self) -> list[TopicView]:
        if self.is_away:
            raise NotRunning("nobody is there")
        return list(self.views)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@run_async
async def test_an_agent_is_told_when_topics_change(mode: str) -> None:
    told: list[str] = []

    async def on_message(message: Any) -> None:
        told.append(type(message).__name__)

    api = Topics()
    mcp = McpServer(lambda _: api, look=0.02)
    async with Client(mcp.server, mode=mode, message_handler=on_message, cache=None) as agent:
        if mode == "auto":
            listening = agent.listen(tools_list_changed=True)
            events = await listening.__aenter__()
        await asyncio.sleep(0.1)
        assert told == []
        api.is_away = True
        await asyncio.sleep(0.1)
        api.is_away = False
        api.views.append(TopicView(topic="job.b"))
        if mode == "auto":
            event = await asyncio.wait_for(anext(aiter(events)), 5)
            assert type(event).__name__ == "ToolsListChanged"
            await listening.__aexit__(None, None, None)
        else:
            await soon(lambda: told == ["ToolListChangedNotification"])
        names = [tool.name for tool in (await agent.list_tools()).tools]
        assert names[:2] == ["a", "b"]
