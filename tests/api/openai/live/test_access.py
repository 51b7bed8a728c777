"""Who may ask: the door has the same keys, tenants, rules, limits and rates as the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support.openai.door import Door, door, saying

from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import KeyRole, Limit
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
DENY = """
default = "allow"
[[rules]]
id = "never"
decision = "deny"
topics = ["job.llm.*"]
reason = "no models on Sundays"
"""
ASK = """
default = "allow"
[[rules]]
id = "ask"
decision = "require_approval"
topics = ["job.llm.*"]
approval = { needed = 1, expires = "1h" }
"""


async def ask(one: Door, token: str | None = None, **fields: Any) -> Any:
    async with one.client(token) as client:
        return await client.chat.completions.create(
            **{"model": "fake", "messages": HELLO, **fields}
        )


@run_async
async def test_without_a_valid_key_nothing_is_answered(tmp_path: Path) -> None:
    async with door(tmp_path) as one:
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask(one, "sk-nobody")
        assert (caught.value.code, caught.value.type) == (
            "invalid_api_key",
            "invalid_request_error",
        )
        assert "www-authenticate" in caught.value.response.headers
        none = await one.call("GET", "/v1/models", token="")
        assert (none.status, none.json["error"]["code"]) == (401, "invalid_api_key")


@run_async
async def test_a_key_needs_the_role_to_submit_but_any_may_list_models(tmp_path: Path) -> None:
    async with door(tmp_path) as one:
        reader = await one.key("reader", KeyRole.APPROVE)
        with pytest.raises(openai.PermissionDeniedError, match="role submit") as caught:
            await ask(one, reader)
        assert caught.value.code == "insufficient_permissions"
        async with one.client(reader) as client:
            assert [model.id async for model in client.models.list()] == ["fake"]


@run_async
async def test_a_tenants_request_is_its_own_job_and_unseen_by_others(tmp_path: Path) -> None:
    async with door(tmp_path) as one:
        acme = await one.key("a", KeyRole.SUBMIT, tenant="acme")
        other = await one.key("b", KeyRole.SUBMIT, tenant="other")
        answer = await ask(one, acme)
        assert answer.choices[0].message.content == "HELLO"
        job_id = answer._request_id
        mine = await one.call("GET", f"/v1/jobs/{job_id}", token=acme)
        assert (mine.status, mine.json["request"]["tenant"]) == (200, "acme")
        theirs = await one.call("GET", f"/v1/jobs/{job_id}", token=other)
        assert theirs.status == 404


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@run_async
async def test_a_rule_that_denies_is_told_with_its_reason(tmp_path: Path, stream: bool) -> None:
    async with door(tmp_path, rules=DENY) as one:
        with pytest.raises(openai.PermissionDeniedError, match="no models on Sundays") as caught:
            await ask(one, stream=stream)
        assert caught.value.code == "denied_by_policy"
        (job,) = await one.engine.api.find(JobQuery())
        assert (job.state, job.job_id) == (JobState.DENIED, caught.value.request_id)


@run_async
async def test_a_request_waits_for_its_approval(tmp_path: Path) -> None:
    async with door(tmp_path, rules=ASK) as one:
        waiting = asyncio.ensure_future(ask(one, await one.key("ann", KeyRole.SUBMIT)))
        job = await _parked(one)
        assert not waiting.done()
        await one.engine.api.approvals.approve(job.job_id)
        answer = await waiting
        assert answer.choices[0].message.content == "HELLO"


@run_async
async def test_an_approval_that_does_not_come_in_time_is_told_with_the_job(tmp_path: Path) -> None:
    async with door(tmp_path, rules=ASK) as one:
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(one, extra_body={"timeout": 0.5})
        (job,) = await one.engine.api.find(JobQuery())
        assert caught.value.status_code == 408
        assert job.job_id in str(caught.value)
        assert job.is_final


async def _parked(one: Door) -> Any:
    async with asyncio.timeout(10):
        while True:
            for job in await one.engine.api.find(JobQuery()):
                if job.hold is not None:
                    return job
            await asyncio.sleep(0.005)


@run_async
async def test_a_key_that_asks_too_often_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with door(tmp_path, rate=0.1, burst=1) as one:
        await ask(one)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(one)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) >= 1


@run_async
async def test_a_full_queue_is_a_rate_limit_too(tmp_path: Path) -> None:
    async with door(tmp_path, saying(asyncio.Event())) as one:
        limit = Limit(name="one", topics=("job.llm.*",), concurrency=1, max_waiting=1)
        await one.engine.api.limits.put(limit)
        asked = [asyncio.ensure_future(ask(one))]
        await _used(one, running=1, waiting=0)
        asked.append(asyncio.ensure_future(ask(one)))
        await _used(one, running=1, waiting=1)
        with pytest.raises(openai.RateLimitError):
            await ask(one)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def _used(one: Door, *, running: int, waiting: int) -> None:
    async with asyncio.timeout(20):
        while True:
            ((use,),) = [view.uses or (None,) for view in await one.engine.api.limits.list()]
            if use is not None and (use.running, use.waiting) == (running, waiting):
                return
            await asyncio.sleep(0.005)


@run_async
async def test_more_waiting_requests_than_there_may_be_are_refused(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with door(tmp_path, saying(gate), max_waiting=1) as one:
        first = asyncio.ensure_future(ask(one))
        async with asyncio.timeout(10):
            while not one.server.waiting:  # noqa: ASYNC110 (the server tells nobody)
                await asyncio.sleep(0.001)
        with pytest.raises(openai.RateLimitError, match="waiting requests"):
            await ask(one)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@run_async
async def test_a_key_that_is_revoked_is_answered_no_more(tmp_path: Path) -> None:
    runner = saying(asyncio.Event())
    async with door(tmp_path, runner, head_timeout=0.4) as one:
        token = await one.key("gone", KeyRole.SUBMIT)
        waiting = asyncio.ensure_future(ask(one, token))
        async with asyncio.timeout(10):
            while not runner.running:  # noqa: ASYNC110 (the runner tells nobody)
                await asyncio.sleep(0.001)
        keys = await one.engine.api.keys.list()
        await one.engine.api.keys.revoke(next(key.key_id for key in keys if key.name == "gone"))
        with pytest.raises(openai.AuthenticationError):
            await waiting
        (job,) = await one.engine.api.find(JobQuery())
        assert (await one.engine.api.wait(job.job_id, 10)).state is JobState.CANCELLED
        assert not runner.running


@run_async
async def test_a_page_may_ask_where_its_origin_is_allowed(tmp_path: Path) -> None:
    page, elsewhere = {"Origin": "http://chat.example"}, {"Origin": "http://evil.example"}
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    body = {"model": "fake", "messages": HELLO}
    async with door(tmp_path / "a", cors=("http://chat.example",)) as one:
        asked = await one.call("OPTIONS", CHAT, headers={**page, **preflight}, token="")
        assert asked.status == 204
        assert asked.headers["Access-Control-Allow-Origin"] == "http://chat.example"
        assert "POST" in asked.headers["Access-Control-Allow-Methods"]
        assert asked.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        for stream in (False, True):
            answer = await one.call("POST", CHAT, {**body, "stream": stream}, headers=page)
            assert answer.status == 200
            assert answer.headers["Access-Control-Allow-Origin"] == "http://chat.example"
            assert "X-Penstock-Job" in answer.headers["Access-Control-Expose-Headers"]
        refused = await one.call("POST", CHAT, body, headers=page, token="")
        assert (refused.status, "Access-Control-Allow-Origin" in refused.headers) == (401, True)
        other = await one.call("OPTIONS", CHAT, headers={**elsewhere, **preflight}, token="")
        assert "Access-Control-Allow-Origin" not in other.headers
    async with door(tmp_path / "b") as one:
        asked = await one.call("OPTIONS", CHAT, headers={**page, **preflight}, token="")
        assert "Access-Control-Allow-Origin" not in asked.headers
