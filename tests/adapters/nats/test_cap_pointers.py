"""Inputs, results and artifacts of CAP jobs, by pointers that the unmodified SDK can follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from cap.pb.cordum.agent.v1 import job_pb2
from tests.support.cap import Plane, echo, plane
from tests.support.nats import NatsServer
from tests.support.waiting import soon

from penstock import App, Context
from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.testing.aio import run_async

# The SDK's own use of its Redis client.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")

SMALL = b'{"a": 1}'
LARGE = json.dumps({"a": "\N{LATIN SMALL LETTER E WITH ACUTE}" * 20_000}).encode()


async def _by_cap(cap: Plane, job_id: str, data: bytes) -> None:
    await cap.submit(job_id, "job.cap.same", context_ptr=encode_data(data))


async def _by_api(cap: Plane, job_id: str, data: bytes) -> None:
    """As over HTTP and in Python, where an empty input is no pointer at all."""
    pointer = await cap.engine.api.put_blob(data) if data else ""
    await cap.engine.api.submit(
        [JobRequest(job_id=job_id, topic="job.cap.same", context_ptr=pointer)]
    )


@run_async
async def test_an_input_reaches_an_agent_wherever_it_was_submitted(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server) as cap, cap.agent(max_parallel=3) as agent:

        async def same(context: Any, value: Any) -> Any:
            return value

        agent.job("job.cap.same")(same)
        await agent.start()
        await cap.knows("agent-1")
        await cap.watch("worker.agent-1.jobs")
        for number, (submit, data) in enumerate(
            (
                (_by_cap, SMALL),
                (_by_cap, LARGE),
                (_by_api, SMALL),
                (_by_api, LARGE),
                (_by_api, b""),
            )
        ):
            job_id = f"same-{number}"
            await submit(cap, job_id, data)
            job = await cap.done(job_id)
            assert job.state is JobState.SUCCEEDED, job.result
            assert json.loads(await cap.result(job)) == json.loads(data or b"{}")
            given = cap.of("worker.agent-1.jobs")[-1].job_request
            assert (given.job_id, given.context_ptr) == (job_id, f"redis://ctx:{job_id}")


@run_async
async def test_without_a_pointer_store_a_data_pointer_stays_as_it_is(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server, **{"cap.pointers": ""}) as cap, cap.worker(echo):
        await cap.watch("job.cap.echo")
        pointer = encode_data(SMALL)
        await cap.submit("j1", context_ptr=pointer)
        job = await cap.done("j1")
        assert cap.of("job.cap.echo")[-1].job_request.context_ptr == pointer
        assert await cap.engine.blobs.get(job.request.context_ptr) == SMALL


@run_async
async def test_a_key_that_looks_like_a_pointer_is_only_a_key(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server) as cap:
        client = redis.asyncio.from_url(cap.redis_url)
        assert await client.get("data:nonsense") is None
        assert await client.get("data:application/json,1") is None
        await client.aclose()


@run_async
async def test_a_pointer_leads_to_no_job_of_another_tenant(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server) as cap, cap.worker(echo):
        await cap.submit("secret", tenant_id="acme", context_ptr=encode_data(SMALL))
        await cap.done("secret")
        await cap.submit("same", tenant_id="acme", context_ptr="redis://ctx:secret")
        assert (await cap.done("same")).request.context_ptr == encode_data(SMALL)
        await cap.submit("other", tenant_id="rival", context_ptr="redis://ctx:secret")
        await soon(lambda: cap.alerts() == [204])
        assert await cap.bridge._engine.find("other") is None


# -- artifacts ------------------------------------------------------------------------


@run_async
async def test_artifacts_of_a_cap_worker_are_those_of_the_job(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server) as cap:
        client = redis.asyncio.from_url(cap.redis_url)

        async def leave(request: Any) -> Any:
            await client.set("art:plots/loss.png", b"\x89PNG")
            await client.set("art:../notes", b"notes")
            progress = job_pb2.JobProgress(
                job_id=request.job_id, percent=50, artifact_ptrs=["redis://art:plots/loss.png"]
            )
            await cap.send("sys.job.progress", "low", job_progress=progress)
            await soon(lambda: cap.bridge._held[request.job_id].artifacts)
            named = ["redis://art:plots/loss.png", "redis://art:../notes", "data:text/plain,hi"]
            return job_pb2.JobResult(
                job_id=request.job_id,
                status=job_pb2.JOB_STATUS_SUCCEEDED,
                artifact_ptrs=[*named, "redis://art:nothing", "https://elsewhere/x"],
            )

        async with cap.worker(leave):
            await cap.submit("j1")
            job = await cap.done("j1")
        assert job.result is not None
        left = {one.name: one for one in job.result.artifacts}
        assert [*left] == ["plots/loss.png", "artifact-2", "artifact-3"]
        assert left["plots/loss.png"].media_type == "image/png"
        contents = [await cap.engine.blobs.get(one.pointer) for one in left.values()]
        assert contents == [b"\x89PNG", b"notes", b"hi"]
        assert await client.get("art:j1/artifact-3") == b"hi"
        assert await client.get("art:j1/nothing") is None
        await client.aclose()


@run_async
async def test_artifacts_of_our_own_worker_are_named_to_a_cap_client(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    app = App()

    @app.job("job.cap.own")
    async def own(ctx: Context) -> str:
        await ctx.artifact("plots/loss.png", b"\x89PNG")
        return "done"

    async with plane(tmp_path, nats_server, app=app) as cap:
        await cap.submit("j1", "job.cap.own")
        await cap.done("j1")
        [packet] = await soon(lambda: cap.of("sys.job.result"))
        assert [*packet.job_result.artifact_ptrs] == ["redis://art:j1/plots/loss.png"]
        client = redis.asyncio.from_url(cap.redis_url)
        assert await client.get("art:j1/plots/loss.png") == b"\x89PNG"
        await client.aclose()
