"""Seed 001, sentence by sentence, as a user of a running engine meets it.

tests/seeds/001.md numbers the sentences; marks say which test holds which.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.nats import working

import penstock
from penstock import JobState
from penstock.app.application import make_executors
from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.job import Job, JobRequest, JobResult, Priority
from penstock.core.journal import Transition
from penstock.core.ledger import ChangeOutcome, Move
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.bus import HANDSHAKE, RESULT, Dispatch, Finished, Handshake, Started, jobs_of
from penstock.ports.engine_api import Moved, journal
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async

app = penstock.App()
gates: dict[str, asyncio.Event] = {}
order: list[str] = []


@app.job("job.seed.shout")
async def shout(text: str) -> str:
    order.append(text)
    return text.upper()


@app.job("job.seed.fail")
async def fail() -> None:
    raise ValueError("it went wrong")


@app.job("job.seed.wait")
async def wait(gate: str) -> str:
    await gates[gate].wait()
    return "waited"


@app.job("job.seed.tell")
async def tell(ctx: penstock.Context) -> dict[str, Any]:
    request = ctx.request
    return {"env": dict(request.env), "adapter": request.adapter_id, "job_id": ctx.job_id}


@app.job("job.seed.stall")
async def stall() -> None:
    await asyncio.Event().wait()


HELLO = encode_data(b'{"text": "hi"}')
RULES = """
default = "allow"

[[rules]]
id = "no"
decision = "deny"
labels = { ask = "never" }
reason = "not here"
"""


@asynccontextmanager
async def engine_at(folder: Path, *, worker: bool = True, **flags: Any) -> AsyncIterator[Engine]:
    order.clear()
    gates.clear()
    settings = load(flags={"data_dir": str(folder), **flags})
    behind_nats = bool(worker and settings.bus.url)
    executors = make_executors(app, settings) if worker and not behind_nats else []
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(settings, executors, listen=behind_nats))
        await asyncio.sleep(0)  # its services have begun to listen then
        if behind_nats:
            worker_process = await stack.enter_async_context(working(app, settings))
            engine.worker_id = worker_process.options.worker_id
        yield engine


def request(topic: str = "job.seed.shout", **fields: Any) -> JobRequest:
    if topic == "job.seed.shout":
        fields.setdefault("context_ptr", HELLO)
    return JobRequest(**{"job_id": "", "topic": topic, **fields})


async def submitted(engine: Engine, *args: Any, **fields: Any) -> Job:
    (job,) = await engine.api.submit([request(*args, **fields)])
    return job


async def ended(engine: Engine, *args: Any, **fields: Any) -> Job:
    job = await submitted(engine, *args, **fields)
    return await engine.api.wait(job.job_id, 20)


async def reached(engine: Engine, job_id: str, state: JobState) -> Job:
    """The record, once the job is in this state; the engine's events tell."""
    async with asyncio.timeout(20):
        async for batch in journal(engine.api, after=0):
            for event in batch.events:
                if (event.transition.job_id, event.transition.after) == (job_id, state):
                    return await engine.api.get(job_id)
    raise AssertionError("the engine closed")


def moves(log: list[Transition]) -> list[tuple[str, str, str]]:
    return [(entry.before or "[*]", entry.after, entry.actor.partition(":")[0]) for entry in log]


# -- JobRequest ------------------------------------------------------------------------------


@pytest.mark.seed("001", "1.1")
@run_async
async def test_a_job_id_names_one_job_over_all_tenants_and_restarts(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        await ended(engine, job_id="mine")
        assert (await submitted(engine, job_id="mine")).state is JobState.SUCCEEDED
        for other in ({"tenant": "acme"}, {"labels": {"a": "b"}}):
            with pytest.raises(penstock.Conflict):
                await submitted(engine, job_id="mine", **other)
    async with engine_at(tmp_path) as engine:
        with pytest.raises(penstock.Conflict):
            await submitted(engine, job_id="mine", priority=Priority.CRITICAL)
        assert (await engine.api.get("mine")).job_id == "mine"
        fresh = await asyncio.gather(*[submitted(engine) for _ in range(100)])
        assert len({job.job_id for job in fresh}) == 100


@pytest.mark.seed("001", "1.2", "3.7")
@run_async
async def test_a_topic_says_which_pool_a_job_goes_to(tmp_path: Path) -> None:
    async with engine_at(tmp_path, worker=False, unknown_topics="hold") as engine:
        taken: dict[str, list[str]] = {"chat": [], "code": []}
        for pool, topic in (("chat", "job.chat.simple"), ("code", "job.code.llm")):
            join(engine, f"w-{pool}", topic, taken[pool], pool=pool)
        jobs = {topic: await submitted(engine, topic) for topic in _TOPICS}
        for topic, job in jobs.items():
            held = await reached(engine, job.job_id, JobState.DISPATCHED)
            assert (held.pool, held.worker_id) == (_TOPICS[topic], f"w-{_TOPICS[topic]}")


_TOPICS = {"job.chat.simple": "chat", "job.code.llm": "code"}


def join(
    engine: Engine, worker_id: str, topic: str, taken: list[str], *, pool: str = "default"
) -> None:
    """A worker that takes jobs and does nothing with them."""

    async def take(messages: list[Any]) -> None:
        taken.extend(m.request.job_id for m in messages if isinstance(m, Dispatch))

    engine.bus.subscribe(jobs_of(worker_id), take)
    hello = Handshake(worker_id, pool, (topic,), 5, {}, local=True, session="s")
    engine.bus.publish(HANDSHAKE, [hello])


@pytest.mark.seed("001", "1.3")
@run_async
async def test_a_priority_decides_who_of_those_that_wait_goes_first(tmp_path: Path) -> None:
    async with engine_at(tmp_path, concurrency=1) as engine:
        await engine.api.pause_pool("default")
        requests = [
            request(
                priority=Priority(word),
                context_ptr=encode_data(b'{"text": "%s"}' % word.encode()),
            )
            for word in ("batch", "interactive", "critical")
        ]
        jobs = await engine.api.submit(requests)
        await engine.api.resume_pool("default")
        for job in jobs:
            await engine.api.wait(job.job_id, 20)
        assert order == ["critical", "interactive", "batch"]


@pytest.mark.seed("001", "1.4")
@run_async
async def test_a_context_ptr_is_kept_as_it_came_and_read_where_it_points(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        text = "x" * 20_000
        blob = await engine.api.put_blob(b'{"text": "%s"}' % text.encode())
        folder = engine.settings.files
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "input.json").write_text('{"text": "from a file"}')
        for pointer in (HELLO, blob, (folder / "input.json").as_uri()):
            job = await ended(engine, context_ptr=pointer)
            assert (job.state, job.request.context_ptr) == (JobState.SUCCEEDED, pointer)
        assert order == ["hi", text, "from a file"]


@pytest.mark.seed("001", "1.5", "1.6")
@run_async
async def test_an_adapter_id_and_env_reach_the_job_that_runs(tmp_path: Path) -> None:
    env = {"tenant": "acme", "locale": "de", "sandbox": "1"}
    async with engine_at(tmp_path) as engine:
        job = await ended(engine, "job.seed.tell", adapter_id="llama-7b", env=env)
        assert job.request.env == env
        told = await result_of(engine, job)
        assert told == {"env": env, "adapter": "llama-7b", "job_id": job.job_id}
        assert (await result_of(engine, await ended(engine, "job.seed.tell")))["adapter"] is None


async def result_of(engine: Engine, job: Job) -> Any:
    assert job.result is not None
    assert job.result.result_ptr is not None
    return msgspec.json.decode(await engine.api.get_blob(job.result.result_ptr))


@pytest.mark.seed("001", "1.7")
@run_async
async def test_parent_workflow_and_step_express_children_and_their_order(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        parent = await ended(engine)
        for step in (2, 0, 1):
            await ended(engine, parent_job_id=parent.job_id, workflow_id="nightly", step_index=step)
        found = await engine.api.find(JobQuery(workflow_id="nightly"))
        assert [job.request.step_index for job in found] == [0, 1, 2]
        assert {job.request.parent_job_id for job in found} == {parent.job_id}
        assert len(await engine.api.find(JobQuery(parent_job_id=parent.job_id))) == 3


# -- JobResult -------------------------------------------------------------------------------


@pytest.mark.seed("001", "2.1", "2.4", "2.5", "2.6")
@run_async
async def test_a_result_names_its_job_its_worker_its_time_and_where_the_output_is(
    tmp_path: Path,
) -> None:
    async with engine_at(tmp_path) as engine:
        job = await ended(engine)
        result = job.result
        assert result is not None
        assert result.job_id == job.job_id
        assert (result.status, job.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
        assert result.worker_id == job.worker_id == engine.worker_id
        assert result.execution_ms is not None
        assert result.execution_ms >= 0
        assert await result_of(engine, job) == "HI"
        assert (result.error_code, result.error_message) == (None, None)


@pytest.mark.seed("001", "2.7")
@run_async
async def test_a_failure_says_its_code_and_its_message(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        result = (await ended(engine, "job.seed.fail")).result
        assert result is not None
        assert (result.status, result.result_ptr) == (JobState.FAILED, None)
        assert (result.error_code, result.error_message) == ("ValueError", "it went wrong")


@pytest.mark.seed("001", "2.1", "2.2", "6.4")
@run_async
async def test_every_end_is_a_result_with_that_status(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    async with engine_at(tmp_path / "data", rules=str(tmp_path / "rules.toml")) as engine:
        later = await submitted(engine, run_at=engine._clock.now() + 1000)
        await engine.api.cancel(later.job_id)
        ends = [
            await ended(engine),
            await ended(engine, "job.seed.fail"),
            await ended(engine, "job.seed.stall", timeout=0.05),
            await ended(engine, labels={"ask": "never"}),
            await engine.api.get(later.job_id),
        ]
        words = ["SUCCEEDED", "FAILED", "TIMEOUT", "DENIED", "CANCELLED"]
        assert [job.state for job in ends] == words
        assert [job.result and job.result.status for job in ends] == words
        assert [job.result and job.result.job_id for job in ends] == [job.job_id for job in ends]


@pytest.mark.seed("001", "2.3")
@run_async
async def test_what_is_between_accepted_and_ended_is_told_as_it_happens(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        gates["g"] = asyncio.Event()
        job = await submitted(engine, "job.seed.wait", context_ptr=encode_data(b'{"gate": "g"}'))
        running = await reached(engine, job.job_id, JobState.RUNNING)
        assert running.result is None
        updates = engine.api.follow(job.job_id)
        gates["g"].set()
        seen = [update.transition.after async for update in updates if isinstance(update, Moved)]
        assert seen == [JobState.SUCCEEDED]


# -- the state machine -----------------------------------------------------------------------

_WAY = [
    ("[*]", "PENDING", "gateway"),
    ("PENDING", "SCHEDULED", "scheduler"),
    ("SCHEDULED", "DISPATCHED", "scheduler"),
    ("DISPATCHED", "RUNNING", "worker"),
]


@pytest.mark.seed("001", "3.5", "3.6", "3.7", "3.9", "3.10", "4.1", "4.2", "4.4")
@pytest.mark.parametrize(
    ("topic", "end"), [("job.seed.shout", "SUCCEEDED"), ("job.seed.fail", "FAILED")]
)
@run_async
async def test_a_job_goes_the_way_of_the_diagram_and_each_step_is_its_roles(
    tmp_path: Path, topic: str, end: str
) -> None:
    async with engine_at(tmp_path) as engine:
        job = await ended(engine, topic)
        log = await engine.api.history(job.job_id)
        assert moves(log) == [*_WAY, ("RUNNING", end, "worker")]
        assert [entry.n for entry in log] == [1, 2, 3, 4, 5]
        assert log[-1].actor == f"worker:{engine.worker_id}"


@pytest.mark.seed("001", "3.11", "4.7")
@run_async
async def test_the_reconciler_ends_what_runs_too_long(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        job = await ended(engine, "job.seed.stall", timeout=0.05)
        log = await engine.api.history(job.job_id)
        assert moves(log) == [*_WAY, ("RUNNING", "TIMEOUT", "reconciler")]


@pytest.mark.seed("001", "3.12", "4.7")
@run_async
async def test_the_reconciler_ends_what_a_worker_took_and_did_not_start(tmp_path: Path) -> None:
    async with engine_at(tmp_path, worker=False, unknown_topics="hold") as engine:
        taken: list[str] = []
        join(engine, "idle", "job.*", taken)
        job = await ended(engine, dispatch_timeout=0.05)
        log = await engine.api.history(job.job_id)
        assert moves(log) == [*_WAY[:3], ("DISPATCHED", "TIMEOUT", "reconciler")]
        assert taken == [job.job_id]


@pytest.mark.seed("001", "3.13", "4.3")
@run_async
async def test_the_scheduler_denies_what_safety_rejects_and_no_worker_sees_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    async with engine_at(tmp_path / "data", rules=str(tmp_path / "rules.toml")) as engine:
        job = await ended(engine, labels={"ask": "never"})
        log = await engine.api.history(job.job_id)
        assert moves(log) == [*_WAY[:2], ("SCHEDULED", "DENIED", "scheduler")]
        assert order == []
        assert job.attempt == 0


@pytest.mark.seed("001", "3.15", "4.9")
@run_async
async def test_a_job_can_be_cancelled_wherever_it_is(tmp_path: Path) -> None:
    """Scheduled, dispatched and running; the pending one is in the table's own tests."""
    async with engine_at(tmp_path, concurrency=1, unknown_topics="hold") as engine:
        delayed = await submitted(engine, run_at=engine._clock.now() + 1000)
        gates["g"] = asyncio.Event()
        running = await submitted(
            engine, "job.seed.wait", context_ptr=encode_data(b'{"gate": "g"}')
        )
        await reached(engine, running.job_id, JobState.RUNNING)
        join(engine, "idle", "job.other", [])
        given = await submitted(engine, "job.other")
        await reached(engine, given.job_id, JobState.DISPATCHED)
        before = {}
        for job in (delayed, running):
            answer = await engine.api.cancel(job.job_id, reason="not needed")
            assert answer.ended
            assert answer.job.state is JobState.CANCELLED
            before[job.job_id] = (await engine.api.history(job.job_id))[-1].before
        assert list(before.values()) == [JobState.SCHEDULED, JobState.RUNNING]
        await engine.api.cancel(given.job_id, timeout=0)
        engine.bus.publish(RESULT, [Finished(_cancelled(given.job_id, "idle"))])
        final = await engine.api.wait(given.job_id, 20)
        assert final.state is JobState.CANCELLED
        assert (await engine.api.history(given.job_id))[-1].before is JobState.DISPATCHED


def _cancelled(job_id: str, worker_id: str) -> JobResult:
    return JobResult(job_id=job_id, status=JobState.CANCELLED, worker_id=worker_id, attempt=1)


@pytest.mark.seed("001", "3.14")
@run_async
async def test_a_pending_job_can_be_cancelled_too(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        engine.parts.scheduler.kernel.decide = _broken  # type: ignore[method-assign]
        job = await submitted(engine)
        assert (await engine.api.cancel(job.job_id)).job.state is JobState.CANCELLED
        assert (await engine.api.history(job.job_id))[-1].before is JobState.PENDING


def _broken(request: JobRequest) -> Any:
    raise RuntimeError("the kernel is out")


# -- append-only, and idempotent ---------------------------------------------------------------


def _move(job: Job, event: JobEvent, actor: str, **fields: Any) -> Move:
    return Move(job.job_id, (event,), actor, job.updated_at, **fields)


@pytest.mark.seed("001", "3.2", "3.3", "3.4", "5.1", "5.2")
@run_async
async def test_a_state_that_is_set_twice_is_a_repeat_and_a_step_back_is_refused(
    tmp_path: Path,
) -> None:
    async with engine_at(tmp_path) as engine:
        gates["g"] = asyncio.Event()
        job = await submitted(engine, "job.seed.wait", context_ptr=encode_data(b'{"gate": "g"}'))
        running = await reached(engine, job.job_id, JobState.RUNNING)
        log = await engine.api.history(job.job_id)
        worker = f"worker:{running.worker_id}"
        again = _move(running, JobEvent.START, worker, attempt=1)
        back = _move(running, JobEvent.SCHEDULE, "scheduler")
        repeated, refused = await engine.store.apply([again, back])
        assert (repeated.verdict, refused.verdict) == (
            ChangeOutcome.REPEATED,
            ChangeOutcome.REFUSED,
        )
        assert await engine.api.get(job.job_id) == running
        assert await engine.api.history(job.job_id) == log
        gates["g"].set()
        await engine.api.wait(job.job_id, 20)
        assert (await engine.api.history(job.job_id))[: len(log)] == log


@pytest.mark.seed("001", "5.3", "5.4")
@run_async
async def test_a_result_for_what_has_ended_is_logged_and_overwrites_nothing(
    tmp_path: Path,
) -> None:
    async with engine_at(tmp_path) as engine:
        done = await ended(engine)
        late = JobResult(
            job_id=done.job_id,
            status=JobState.FAILED,
            worker_id=engine.worker_id,
            attempt=done.attempt,
            error_code="LATE",
        )
        engine.bus.publish(RESULT, [Finished(late)])
        log = await noted(engine, done)
        assert (log[-1].event, log[-1].after) == (JobEvent.NOTE, JobState.SUCCEEDED)
        assert "FAILED of attempt 1 ignored" in log[-1].reason
        now = await engine.api.get(done.job_id)
        assert (now.state, now.result) == (JobState.SUCCEEDED, done.result)
        assert (await engine.api.verify()).mismatches == ()


async def noted(engine: Engine, job: Job) -> list[Transition]:
    """The log, once there is more in it than there was; told by the engine's events."""
    async for batch in journal(engine.api, after=0):
        for event in batch.events:
            entry = event.transition
            if entry.job_id == job.job_id and entry.n > job.version:
                return await engine.api.history(job.job_id)
    raise AssertionError("the engine closed")


@pytest.mark.seed("001", "2.6", "4.5", "4.6")
@run_async
async def test_a_worker_may_end_what_it_never_said_it_started(tmp_path: Path) -> None:
    """DISPATCHED -> SUCCEEDED: the start is implied, and both steps are in the log."""
    async with engine_at(tmp_path, worker=False, unknown_topics="hold") as engine:
        join(engine, "quiet", "job.*", [])
        job = await submitted(engine, "job.other")
        await reached(engine, job.job_id, JobState.DISPATCHED)
        result = JobResult(
            job_id=job.job_id,
            status=JobState.SUCCEEDED,
            worker_id="quiet",
            attempt=1,
            execution_ms=12.5,
        )
        engine.bus.publish(RESULT, [Finished(result)])
        final = await engine.api.wait(job.job_id, 20)
        log = moves(await engine.api.history(job.job_id))
        assert log == [*_WAY, ("RUNNING", "SUCCEEDED", "worker")]
        assert final.result is not None
        assert final.result.execution_ms == 12.5


@pytest.mark.seed("001", "3.8", "6.1")
@run_async
async def test_running_means_that_a_worker_said_so(tmp_path: Path) -> None:
    async with engine_at(tmp_path, worker=False, unknown_topics="hold") as engine:
        join(engine, "slow", "job.*", [])
        job = await submitted(engine, "job.other")
        given = await reached(engine, job.job_id, JobState.DISPATCHED)
        assert (given.worker_id, given.started_at) == ("slow", None)
        engine.bus.publish(RESULT, [Started(job.job_id, 1, "slow")])
        running = await reached(engine, job.job_id, JobState.RUNNING)
        assert running.started_at is not None
        assert (await engine.api.history(job.job_id))[-1].actor == "worker:slow"


@pytest.mark.seed("001", "5.6")
@run_async
async def test_a_retry_is_a_new_job_linked_to_the_old(tmp_path: Path) -> None:
    async with engine_at(tmp_path) as engine:
        policy = penstock.RetryPolicy(retries=1, delay=0.0)
        first = await submitted(engine, "job.seed.fail", retry=policy)
        last = await engine.api.wait(first.job_id, 20)
        old = await engine.api.get(first.job_id)
        assert (old.state, old.successor) == (JobState.FAILED, last.job_id)
        assert last.job_id != first.job_id
        assert last.request.parent_job_id == first.job_id


@pytest.mark.seed("001", "5.5")
@run_async
async def test_only_an_idempotent_job_goes_on_under_its_own_id(tmp_path: Path) -> None:
    async with engine_at(tmp_path, worker=False, unknown_topics="hold") as engine:
        join(engine, "first", "job.*", [])
        harmless = await submitted(engine, "job.other", idempotent=True)
        delicate = await submitted(engine, "job.other")
        for job in (harmless, delicate):
            await reached(engine, job.job_id, JobState.DISPATCHED)
            engine.bus.publish(RESULT, [Started(job.job_id, 1, "first")])
            await reached(engine, job.job_id, JobState.RUNNING)
        engine.open_jobs.roster.set_missing(engine.open_jobs.roster.workers["first"], float("-inf"))
        join(engine, "second", "job.*", [])
        ended = await engine.api.wait(delicate.job_id, 20)
        assert ended.state is JobState.TIMEOUT
        async for batch in journal(engine.api, after=0):
            if any(e.transition.event is JobEvent.REDISPATCH for e in batch.events):
                break
        again = await engine.api.get(harmless.job_id)
        assert (again.attempt, again.worker_id) == (2, "second")
