"""What one caller may do and see: roles, tenants, blobs, and the audit log of it all."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_containers import FakeEngine, Script

from penstock import App, Pipeline
from penstock.app.application import make_executors
from penstock.app.engine import Engine
from penstock.config import load
from penstock.control.engine_api import LocalEngineApi
from penstock.core.errors import NotFound, NotPermitted, PenstockError, UnreadablePointer
from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import OWNER, Caller, KeyRole, Limit, Schedule, journal
from penstock.ports.store import AuditQuery, JobQuery, StepQuery
from penstock.testing.aio import run_async
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.executor import ContainerExecutor
from penstock.workloads.container.job import TOPIC as CONTAINERS
from penstock.workloads.llm.batches import FileUpload, PageQuery
from penstock.workloads.pipeline.interface import RunQuery

_R = KeyRole
_BIG = b'{"text": "' + b"x" * 20_000 + b'"}'

ALICE = Caller("alice", frozenset({_R.SUBMIT, _R.OPERATE}), "acme", "k1")
BOB = Caller("bob", frozenset({_R.SUBMIT, _R.OPERATE, _R.APPROVE}), "beta", "k2")
READER = Caller("reader", frozenset({_R.APPROVE}), None, "k3")
OPS = Caller("ops", frozenset({_R.OPERATE}), None, "k4")


@asynccontextmanager
async def engine_at(folder: Path) -> AsyncIterator[Engine]:
    app = App()

    @app.job("job.text.shout")
    def shout(text: str) -> str:
        return text.upper()

    @app.job("job.text.fail")
    def fail(text: str) -> None:
        raise ValueError("no")

    steps = Pipeline("steps")

    @steps.step()
    async def only(ctx: Any) -> str:
        raise ValueError("no")

    large = Pipeline("large")

    @large.map(over=lambda config, ctx: [1])
    async def make(n: int, ctx: Any) -> str:
        return "x" * 50_000

    app.add(steps, large)
    settings = load(flags={"data_dir": str(folder), "durability": "memory"})
    async with Engine(settings, make_executors(app, settings), listen=False) as engine:
        yield engine


def a_job(**fields: Any) -> JobRequest:
    given: dict[str, Any] = {
        "job_id": "",
        "topic": "job.text.shout",
        "context_ptr": encode_data(b'{"text": "hi"}'),
    }
    return JobRequest(**{**given, **fields})


@run_async
async def test_what_a_tenants_key_submits_is_the_tenants_and_the_keys(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        api = engine.api.serving(ALICE)
        (job,) = await api.submit([a_job(principal="bob")])
        assert (job.request.tenant, job.request.principal) == ("acme", "alice")
        with pytest.raises(NotPermitted, match="tenant: alice may not submit for 'beta'"):
            await api.submit([a_job(tenant="beta")])


Ask = Callable[[LocalEngineApi, str], Awaitable[Any]]


async def _follow(api: LocalEngineApi, job_id: str) -> list[Any]:
    return [update async for update in api.follow(job_id)]


_QUESTIONS: dict[str, Ask] = {
    "get": lambda api, job_id: api.get(job_id),
    "history": lambda api, job_id: api.history(job_id),
    "why": lambda api, job_id: api.why(job_id),
    "wait": lambda api, job_id: api.wait(job_id, 0.1),
    "wait_many": lambda api, job_id: api.wait_many([job_id], timeout=0.1),
    "read_log": lambda api, job_id: api.read_log(job_id),
    "read_steps": lambda api, job_id: api.read_steps(job_id, StepQuery()),
    "count_steps": lambda api, job_id: api.count_steps(job_id),
    "follow": _follow,
    "cancel": lambda api, job_id: api.cancel(job_id),
    "retry": lambda api, job_id: api.retry(job_id),
    "approve": lambda api, job_id: api.approvals.approve(job_id),
    "reject": lambda api, job_id: api.approvals.reject(job_id),
    "explain": lambda api, job_id: api.policy.explain(job_id),
}


@pytest.mark.parametrize("question", list(_QUESTIONS))
@run_async
async def test_another_tenants_job_is_answered_as_one_that_does_not_exist(
    tmp_path: Path, question: str
) -> None:
    async with engine_at(tmp_path) as engine:
        (job,) = await engine.api.serving(ALICE).submit([a_job(topic="job.text.fail")])
        await engine.api.wait(job.job_id)
        said = []
        for job_id in (job.job_id, "nobody"):
            with pytest.raises(NotFound) as refused:
                await _QUESTIONS[question](engine.api.serving(BOB), job_id)
            said.append(str(refused.value).replace(job_id, "ID"))
        assert said[0] == said[1]
        assert (await engine.api.get(job.job_id)).version == job.version + 4


@run_async
async def test_lists_counts_and_bulk_operations_stay_within_the_tenant(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        theirs = await engine.api.serving(ALICE).submit([a_job(topic="job.text.fail")] * 3)
        for job in theirs:
            await engine.api.wait(job.job_id)
        bob = engine.api.serving(BOB)
        assert await bob.find(JobQuery()) == []
        assert await bob.find(JobQuery(tenant="acme")) == []
        assert (await bob.retry_many(JobQuery())).matched == 0
        assert (await bob.cancel_many(JobQuery(tenant="acme"))).matched == 0
        assert (await bob.status()).tally == {}
        assert (await engine.api.serving(ALICE).status()).tally == {JobState.FAILED: 3}
        assert (await engine.api.serving(ALICE).status()).data_dir == ""


@pytest.mark.seed("001", "6.12")
@run_async
async def test_events_of_another_tenant_are_not_heard(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        (theirs,) = await engine.api.serving(ALICE).submit([a_job()])
        await engine.api.wait(theirs.job_id)
        (own,) = await engine.api.serving(BOB).submit([a_job()])
        await engine.api.wait(own.job_id)
        heard: set[str] = set()
        events = journal(engine.api.serving(BOB), after=0)
        async for batch in events:
            heard.update(event.transition.job_id for event in batch.events)
            if any(event.transition.after is JobState.SUCCEEDED for event in batch.events):
                break
        assert heard == {own.job_id}


@run_async
async def test_a_blob_is_there_for_who_brought_it_and_whose_jobs_have_it(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        alice, bob = engine.api.serving(ALICE), engine.api.serving(BOB)
        uri = await alice.put_blob(_BIG)
        assert await alice.get_blob(uri) == _BIG
        for ask in (bob.get_blob, bob.stat_blob, lambda uri: bob.read_blob(uri, 0, 5)):
            with pytest.raises(UnreadablePointer):
                await ask(uri)
        with pytest.raises(UnreadablePointer):
            await bob.submit([a_job(context_ptr=uri)])
        with pytest.raises(UnreadablePointer):
            schedule = Schedule(name="s", cron="@daily", request=a_job(context_ptr=uri))
            await bob.schedules.put(schedule)
        (job,) = await alice.submit([a_job(context_ptr=uri)])
        final = await alice.wait(job.job_id)
        assert final.result is not None
        assert final.result.result_ptr is not None
        assert b"XXX" in await alice.get_blob(final.result.result_ptr)
        with pytest.raises(UnreadablePointer):
            await bob.get_blob(final.result.result_ptr)


@run_async
async def test_a_container_job_is_not_given_another_tenants_blob(tmp_path: Path) -> None:
    containers = FakeEngine(SystemClock(), {"quick:1": Script()})
    config = WorkerConfig(jobs_dir=tmp_path / "containers", disk_low_mb=0)
    settings = load(flags={"data_dir": str(tmp_path), "durability": "memory"})
    executor = ContainerExecutor(config, containers)
    async with Engine(settings, [executor], listen=False) as engine:
        uri = await engine.api.serving(ALICE).put_blob(_BIG)
        payload = {"runtime": {"image": "quick:1"}, "inputs": [{"path": "f", "pointer": uri}]}
        pointer = encode_data(json.dumps(payload).encode())

        async def ends(api: LocalEngineApi) -> tuple[JobState, str | None]:
            (job,) = await api.submit([a_job(topic=CONTAINERS, context_ptr=pointer)])
            job = await api.wait(job.job_id, 20)
            assert job.result is not None
            return job.state, job.result.error_code

        bob = engine.api.serving(BOB)
        assert await ends(bob) == (JobState.FAILED, "INPUT_UNAVAILABLE")
        assert "create" not in containers.calls
        for api in (engine.api.serving(ALICE), engine.api):
            assert await ends(api) == (JobState.SUCCEEDED, None)
        await engine.api.keys.create("bob", [_R.SUBMIT])  # he may be bound to no tenant
        assert await ends(bob) == (JobState.SUCCEEDED, None)


@run_async
async def test_what_an_open_container_jobs_inputs_name_is_not_pruned(tmp_path: Path) -> None:
    containers = FakeEngine(SystemClock(), {"quick:1": Script()})
    config = WorkerConfig(jobs_dir=tmp_path / "containers", disk_low_mb=0)
    flags = {"data_dir": str(tmp_path), "inline_limit": "200", "unknown_topics": "hold"}
    settings = load(flags=flags)

    async def grow_old(engine: Engine, uri: str) -> None:
        for path in (settings.data_dir / "blobs").rglob("*"):
            os.utime(path, (0, 0))
        await engine.store.remember(f"blob/{ALICE.tenant}/{uri}", b"0.0")
        await engine.api.prune(3600)

    def naming(uri: str, **more: Any) -> bytes:
        inputs = [{"path": "f", "pointer": uri}]
        return json.dumps({"runtime": {"image": "quick:1"}, "inputs": inputs, **more}).encode()

    jobs = []
    async with Engine(settings, [], listen=False) as engine:  # they wait for a worker
        alice = engine.api.serving(ALICE)
        uri, scheduled, unnamed = [await alice.put_blob(_BIG + bytes([n])) for n in (32, 10, 13)]
        for more in ({}, {"task": {"payload": "x" * 200}}):  # one inline, and one in a blob
            pointer = await alice.put_blob(naming(uri, **more))
            jobs += await alice.submit([a_job(topic=CONTAINERS, context_ptr=pointer)])
        request = a_job(topic=CONTAINERS, context_ptr=await alice.put_blob(naming(scheduled)))
        await alice.schedules.put(Schedule(name="s", cron="@yearly", request=request))
        await grow_old(engine, uri)
        assert await engine.api.get_blob(scheduled)
        with pytest.raises(UnreadablePointer):
            await engine.api.get_blob(unnamed)
    executor = ContainerExecutor(config, containers)
    async with Engine(settings, [executor], listen=False) as engine:
        for job in jobs:
            assert (await engine.api.wait(job.job_id, 20)).state is JobState.SUCCEEDED
        await grow_old(engine, uri)
        with pytest.raises(UnreadablePointer):  # nobody needs it any more
            await engine.api.get_blob(uri)


@run_async
async def test_files_and_foreign_places_are_not_read_for_a_tenant(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        folder = engine.settings.files
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "secret.json").write_text("{}")
        uri = (folder / "secret.json").as_uri()
        assert await engine.api.get_blob(uri) == b"{}"
        with pytest.raises(UnreadablePointer):
            await engine.api.serving(ALICE).get_blob(uri)


_BEYOND: dict[str, tuple[Caller, Callable[[LocalEngineApi], Awaitable[Any]]]] = {
    "submit without the role": (READER, lambda d: d.submit([a_job()])),
    "bulk cancel without the role": (READER, lambda d: d.cancel_many(JobQuery())),
    "workers without the role": (READER, lambda d: d.workers()),
    "keys without the role": (OPS, lambda d: d.keys.create("eve", (_R.ADMIN,))),
    "list keys without the role": (OPS, lambda d: d.keys.list()),
    "audit without the role": (OPS, lambda d: d.audit.read(AuditQuery())),
    "prune without the role": (OPS, lambda d: d.prune(0)),
    "pause a pool from one tenant": (ALICE, lambda d: d.pause_pool("default")),
    "set a limit from one tenant": (
        ALICE,
        lambda d: d.limits.put(Limit(name="x", concurrency=1)),
    ),
    "look at the rules from one tenant": (ALICE, lambda d: d.policy.current()),
    "schedule without the role to submit": (
        OPS,
        lambda d: d.schedules.put(Schedule(name="s", cron="@daily", request=a_job())),
    ),
    "schedule for another tenant": (
        ALICE,
        lambda d: d.schedules.put(
            Schedule(name="s", cron="@daily", request=a_job(), tenant="beta")
        ),
    ),
}


@pytest.mark.parametrize("what", list(_BEYOND))
@run_async
async def test_what_a_key_is_not_for_is_refused(tmp_path: Path, what: str) -> None:
    caller, ask = _BEYOND[what]
    async with engine_at(tmp_path) as engine:
        with pytest.raises(NotPermitted):
            await ask(engine.api.serving(caller))


@run_async
async def test_a_schedule_of_another_tenant_is_not_there(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        alice, bob = engine.api.serving(ALICE), engine.api.serving(BOB)
        view = await alice.schedules.put(Schedule(name="s", cron="@daily", request=a_job()))
        assert view.schedule.tenant == view.schedule.request.tenant == "acme"
        assert await bob.schedules.list() == []
        for tenant in ("default", "acme", "beta"):
            with pytest.raises(NotFound):
                await bob.schedules.get("s", tenant)
            with pytest.raises(NotFound):
                await bob.schedules.delete("s", tenant)
        assert len(await alice.schedules.list()) == 1


@run_async
async def test_a_run_of_another_tenant_is_not_there(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        alice, bob = engine.api.serving(ALICE), engine.api.serving(BOB)
        run = await alice.pipelines.start("steps")
        assert run.tenant == "acme"
        await engine.api.wait(run.id)
        assert await bob.pipelines.runs(RunQuery()) == []
        assert await bob.pipelines.runs(RunQuery(tenant="acme")) == []
        questions: list[Callable[[str], Awaitable[Any]]] = [
            bob.pipelines.get,
            bob.pipelines.cancel,
            bob.pipelines.retry_failed,
            lambda job_id: bob.pipelines.items(job_id, "only"),
            lambda job_id: anext(bob.pipelines.stream(job_id)),
            lambda job_id: bob.pipelines.start("steps", retry_of=job_id),
        ]
        for ask in questions:
            with pytest.raises(NotFound, match="no job"):
                await ask(run.id)
        with pytest.raises(NotPermitted, match="acme"):
            await bob.pipelines.start("steps", tenant="acme")
        with pytest.raises(NotPermitted):
            await bob.pipelines.reset_breaker("feeds")
        with pytest.raises(NotPermitted):
            await engine.api.serving(READER).pipelines.start("steps")
        assert len(await alice.pipelines.runs(RunQuery())) == 1


@run_async
async def test_what_a_tenant_s_items_gave_only_that_tenant_can_read(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        alice, bob = engine.api.serving(ALICE), engine.api.serving(BOB)
        run = await alice.pipelines.start("large")
        await engine.api.wait(run.id)
        (item,) = await alice.pipelines.items(run.id, "make")
        assert item.output.startswith("blob:")
        assert len(await alice.get_blob(item.output)) > 50_000
        with pytest.raises(UnreadablePointer):
            await bob.get_blob(item.output)


@run_async
async def test_a_tenant_sees_its_own_use_of_a_limit_only(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        await engine.api.limits.put(Limit(name="each", key=("tenant",), concurrency=1))
        await engine.api.limits.put(Limit(name="acme", tenants=("acme",), concurrency=1))
        await engine.api.pause_pool("default")
        await engine.api.serving(ALICE).submit([a_job()])
        (each,) = await engine.api.serving(BOB).limits.list()
        assert (each.limit.name, each.uses) == ("each", ())
        views = {view.limit.name: view for view in await engine.api.serving(ALICE).limits.list()}
        assert set(views) == {"each", "acme"}


@run_async
async def test_what_people_did_and_were_refused_is_in_the_audit_log(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        ops = engine.api.serving(OPS)
        await ops.pause_pool("default")
        (job,) = await engine.api.serving(ALICE).submit([a_job()])
        await engine.api.serving(ALICE).cancel(job.job_id, reason="not needed")
        with pytest.raises(NotPermitted):
            await ops.keys.create("eve", (_R.ADMIN,))
        new = await engine.api.keys.create("dora", (_R.SUBMIT,), tenant="acme")
        entries = await engine.api.audit.read(AuditQuery())
        told = [(e.principal, e.action, e.subject, e.outcome) for e in reversed(entries)]
        assert told == [
            ("ops", "pool.pause", "default", "done"),
            ("alice", "job.cancel", job.job_id, "done"),
            ("ops", "key.create", "eve", "refused"),
            ("owner", "key.create", "dora", "done"),
        ]
        assert new.token not in repr(entries)
        assert entries[2].detail == "not needed"


@run_async
async def test_a_child_belongs_to_its_parents_tenant_and_submitter(tmp_path: Path) -> None:
    app = App()

    @app.job("job.child")
    async def child() -> str:
        return "ok"

    @app.job("job.parent")
    async def parent() -> str:
        job = await child.asubmit()
        await job
        return str(job.job_id)

    settings = load(flags={"data_dir": str(tmp_path), "durability": "memory"})
    async with app.run(settings=settings) as client:
        api = client.api
        assert isinstance(api, LocalEngineApi)
        (job,) = await api.serving(ALICE).submit([JobRequest(job_id="", topic="job.parent")])
        await api.wait(job.job_id)
        (found,) = await api.find(JobQuery(parent_job_id=job.job_id))
        assert (found.request.tenant, found.request.principal) == ("acme", "alice")


@run_async
async def test_a_token_that_is_pasted_where_a_name_belongs_is_not_written_down(
    tmp_path: Path,
) -> None:
    async with engine_at(tmp_path) as engine:
        new = await engine.api.keys.create("dora", (_R.SUBMIT,))
        for caller in (OPS, OWNER):
            with pytest.raises(PenstockError):
                await engine.api.serving(caller).keys.revoke(new.token)
        entries = await engine.api.audit.read(AuditQuery())
        assert entries[0].action == "key.revoke"
        assert new.token not in repr(entries)


@run_async
async def test_files_and_batches_of_another_tenant_are_not_there(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        alice, bob = engine.api.serving(ALICE).batches, engine.api.serving(BOB).batches
        file = await FileUpload(alice).keep("prompts.jsonl")
        batch = await alice.create(file.id, "/v1/chat/completions")
        assert file.tenant == batch.tenant == "acme"
        said = []
        for file_id, batch_id in ((file.id, batch.id), ("nothing", "nothing")):
            for asked in (bob.file(file_id), bob.delete_file(file_id), bob.cancel(batch_id)):
                with pytest.raises(NotFound) as refused:
                    await asked
                message = str(refused.value).replace(file_id, "ID").replace(batch_id, "ID")
                said.append(message)
        assert said[:3] == said[3:]
        assert await bob.files(PageQuery()) == []
        assert await bob.list(PageQuery()) == []
        with pytest.raises(NotPermitted):
            await engine.api.serving(OPS).batches.write_upload("0" * 32, 0, b"x")


@run_async
async def test_topics_are_described_to_whoever_may_submit_to_them(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        views = await engine.api.serving(ALICE).describe_topics()
        assert [view.topic for view in views] == await engine.api.topics()
        assert await engine.api.serving(READER).describe_topics() == []
        assert await engine.api.serving(OPS).describe_topics() == []
