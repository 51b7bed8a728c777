"""Split models as canonical jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.fake_llm import FakeRunner
from tests.support.fake_pipes import HOPS, FakeHost, a_node

from penstock.core.errors import InvalidRequest, Misconfigured, NotRunning, Unavailable
from penstock.core.job import JobRequest, TopicDefaults
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import WorkerView
from penstock.ports.executor import (
    MODELS,
    PAUSED,
    Environment,
    Outcome,
    Task,
    TopicPaused,
    is_needed,
)
from penstock.testing.aio import run_async
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.testing.context import RecordingContext
from penstock.workloads.llm.runner import Loading
from penstock.workloads.llm.values import Choice, Delta, HopTime, LlmCode, LlmFailure, LlmResult
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.executor import PipesExecutor, make
from penstock.workloads.pipes.status import told_in

CONFIG = LpConfig(model="fake", source=Path("model.gguf"), node_id="a", end_model=True)
CHAT = {"kind": "chat", "messages": [{"role": "user", "content": "one two three"}]}


class FakeEngineApi:
    """The workers of an engine."""

    def __init__(self, **labels: str) -> None:
        self.labels = dict(labels)
        self.away = False

    async def workers(self) -> list[WorkerView]:
        if self.away:
            raise NotRunning("the connection was lost")
        return [_worker(name, label) for name, label in self.labels.items()]


def _worker(name: str, label: str, status: str = "ready") -> WorkerView:
    return WorkerView(
        worker_id=name,
        pool="default",
        topics=(),
        slots=1,
        limit=1,
        held=0,
        labels={"pipe": label} if label else {},
        host="h",
        pid=1,
        local=False,
        status=status,
        silent_for=0.0,
    )


def environment(api: FakeEngineApi | None = None) -> Environment:
    clock = LoopClock(asyncio.get_running_loop())
    return Environment("w", clock, None, api or FakeEngineApi(), None)  # type: ignore[arg-type]


def task(value: Any, model: str = "fake", constraints: Constraints | None = None) -> Task:
    request = JobRequest(job_id="j", topic=f"job.chat.{model}")
    return Task(request, 1, msgspec.json.encode(value), 1e12, constraints)


async def ran(
    value: Any, runner: FakeRunner | None = None, **more: Any
) -> tuple[Outcome, RecordingContext]:
    ctx = RecordingContext()
    executor = PipesExecutor(CONFIG, lambda config: FakeHost(config, runner))
    await executor.open(environment())
    try:
        return await executor.run(task(value, **more), ctx), ctx
    finally:
        await executor.close()


def result_of(outcome: Outcome) -> LlmResult:
    assert outcome.status is JobState.SUCCEEDED
    return msgspec.json.decode(outcome.payload or b"", type=LlmResult)


# -- what it serves -----------------------------------------------------------------------


def test_without_a_config_it_serves_nothing_and_is_not_needed() -> None:
    executor = make(None, {})
    assert executor.topics == ()
    assert not is_needed(executor)
    assert executor.facts() == {}
    assert executor.labels == {}


def test_an_origin_serves_its_model_and_a_layer_node_serves_no_topic_but_is_needed() -> None:
    origin = make(None, {"pipes": CONFIG})
    assert origin.topics == ("job.chat.fake",)
    assert origin.topic_defaults == {"job.chat.fake": TopicDefaults(idempotent=True)}
    layers = make(None, {"pipes": replace(CONFIG, end_model=False)})
    assert layers.topics == ()
    assert is_needed(layers)


# -- answers ------------------------------------------------------------------------------


@run_async
async def test_a_chat_ends_with_its_answer_and_the_way_it_went() -> None:
    outcome, ctx = await ran(CHAT)
    result = result_of(outcome)
    assert result.choices == (Choice(index=0, text="ONE TWO THREE"),)
    assert (result.model, result.engine) == ("fake", "fake pipes 1")
    assert result.hops == HOPS
    assert ctx.streamed == []


@run_async
async def test_what_it_waits_for_how_far_it_is_and_who_took_over_is_told() -> None:
    _, ctx = await ran(CHAT)
    assert ctx.progressed == [(None, "waits for room on node b"), (0.5, "read 1 of 2 tokens")]
    assert ctx.logged("warning") == ["node c was lost; going on over node b"]


@run_async
async def test_pieces_are_streamed_where_the_job_asks_for_it() -> None:
    _, ctx = await ran({**CHAT, "stream": True})
    pieces = [msgspec.json.decode(text, type=Delta) for text in ctx.streamed]
    assert "".join(piece.text for piece in pieces) == "ONE TWO THREE"


@run_async
async def test_hops_of_several_answers_are_added_and_their_progress_has_no_share() -> None:
    outcome, ctx = await ran({**CHAT, "n": 3})
    result = result_of(outcome)
    assert len(result.choices) == 3
    assert result.hops[0] == HopTime(
        node="a", layers="0-1", compute_ms=6.0, queue_ms=1.5, passes=9, tokens=15
    )
    assert [hop.node for hop in result.hops] == ["a", "b"]
    assert {share for share, _ in ctx.progressed} == {None}


@run_async
async def test_embeddings_are_not_made() -> None:
    outcome, _ = await ran({"kind": "embedding", "inputs": ["a"]})
    assert (outcome.status, outcome.error_code) == (JobState.FAILED, "NOT_SUPPORTED")


@pytest.mark.seed("000", "12.3")
@pytest.mark.parametrize(
    "code", [LlmCode.PIPE_UNAVAILABLE, LlmCode.NODE_LOST, LlmCode.NO_ROOM, LlmCode.JOB_MISSING]
)
@run_async
async def test_a_failure_is_the_job_s_with_its_code_and_is_not_tried_again(code: LlmCode) -> None:
    runner = FakeRunner(fail_with={"two": code})
    outcome, _ = await ran(CHAT, runner)
    assert (outcome.status, outcome.error_code) == (JobState.FAILED, code)
    assert "'two' is in the prompt" in (outcome.error_message or "")
    assert len(runner.asked) == 1


@run_async
async def test_jobs_wait_for_a_split_model_that_is_out_of_memory_as_for_a_whole_one() -> None:
    runner = FakeRunner(fail_with={"two": LlmCode.OUT_OF_MEMORY})
    executor = PipesExecutor(CONFIG, lambda config: FakeHost(config, runner))
    await executor.open(environment())
    request = JobRequest(job_id="j", topic="job.chat.fake", idempotent=True)
    with pytest.raises(TopicPaused, match="'two' is in the prompt"):
        await executor.run(task(CHAT), RecordingContext(request))
    assert "OUT_OF_MEMORY" in executor.facts()[PAUSED]["job.chat.fake"]
    assert executor.facts()[MODELS]["job.chat.fake"]["state"] == "ill"
    await executor.close()


@run_async
async def test_what_is_no_request_is_bad_input() -> None:
    wrong: Any
    for wrong in ({"kind": "chat"}, {"kind": "chat", "messages": []}, [], {"kind": "dance"}):
        with pytest.raises(InvalidRequest):
            make(None, {"pipes": CONFIG}).check("job.chat.fake", msgspec.json.encode(wrong))
        outcome, _ = await ran(wrong)
        assert outcome.error_code == "BAD_INPUT"


@run_async
async def test_another_model_is_not_known_here() -> None:
    outcome, _ = await ran(CHAT, model="other")
    assert outcome.error_code == "UNKNOWN_TOPIC"
    executor = PipesExecutor(CONFIG, FakeHost)
    unopened = await executor.run(task(CHAT), RecordingContext())
    assert unopened.error_code == "UNKNOWN_TOPIC"


@run_async
async def test_a_limit_on_memory_can_not_be_kept_and_is_a_reason_not_to_run() -> None:
    outcome, _ = await ran(CHAT, constraints=Constraints(max_memory=1 << 30))
    assert outcome.error_code == "CONSTRAINT_NOT_ENFORCED"


# -- ends ---------------------------------------------------------------------------------


@run_async
async def test_a_cancelled_job_ends_its_computation() -> None:
    runner = FakeRunner(delay=0.01)
    ctx = RecordingContext(JobRequest(job_id="j", topic="job.chat.fake"))
    executor = PipesExecutor(CONFIG, lambda config: FakeHost(config, runner))
    await executor.open(environment())
    words = {**CHAT, "messages": [{"role": "user", "content": "word " * 1000}], "stream": True}
    run = asyncio.ensure_future(executor.run(task(words), ctx))
    while not ctx.streamed:  # noqa: ASYNC110 nothing tells
        await asyncio.sleep(0.01)
    assert runner.running == 1
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert runner.running == 0
    await executor.close()


# -- the node -----------------------------------------------------------------------------


class Hosts:
    """Makes hosts, and remembers them."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.made: list[FakeHost] = []

    def __call__(self, config: LpConfig) -> FakeHost:
        self.made.append(FakeHost(config, **self._options))
        return self.made[-1]


@run_async
async def test_the_node_starts_once_and_drains_when_the_worker_goes() -> None:
    hosts = Hosts()
    executor = PipesExecutor(CONFIG, hosts)
    await executor.open(environment())
    await executor.open(environment())
    (host,) = hosts.made
    assert host.running
    assert executor.labels == {"pipe": "a.example:7000"}
    await executor.close()
    await executor.close()
    assert (host.running, host.stopped) == (False, 1)
    assert executor.labels == {}


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (LlmFailure(LlmCode.NOT_SUPPORTED, "mamba is not supported"), Misconfigured),
        (LlmFailure(LlmCode.MODEL_INVALID, "it is cut off"), Misconfigured),
        (LlmFailure(LlmCode.ENGINE_MISSING, "torch is missing"), Unavailable),
        (LlmFailure(LlmCode.OUT_OF_MEMORY, "too little"), Unavailable),
        (Misconfigured("not a network key"), Misconfigured),
    ],
)
@run_async
async def test_a_node_that_can_not_start_says_why_and_leaves_nothing_running(
    failure: Exception, kind: type[Exception]
) -> None:
    hosts = Hosts(failure=failure)
    executor = PipesExecutor(CONFIG, hosts)
    with pytest.raises(kind, match=str(getattr(failure, "message", failure))):
        await executor.open(environment())
    assert hosts.made[0].stopped == 1
    await executor.close()


@run_async
async def test_how_far_a_model_is_loaded_is_logged_in_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Slow(FakeHost):
        async def start(self, on_progress: Loading) -> None:
            on_progress(0.0, "measuring")
            for layer in range(1, 101):
                on_progress(layer / 100, f"reading layer {layer} of 100")
            on_progress(1.0, "ready")

    executor = PipesExecutor(CONFIG, Slow)
    with caplog.at_level("INFO", "penstock.workloads.pipes.executor"):
        await executor.open(environment())
    assert [record.getMessage() for record in caplog.records] == [
        "fake: measuring (0%)",
        "fake: reading layer 1 of 100 (1%)",
        "fake: reading layer 25 of 100 (25%)",
        "fake: reading layer 50 of 100 (50%)",
        "fake: reading layer 75 of 100 (75%)",
        "fake: reading layer 100 of 100 (100%)",
        "fake: ready (100%)",
    ]
    await executor.close()


@run_async
async def test_a_node_joins_whom_it_is_told_and_the_nodes_among_the_workers() -> None:
    hosts = Hosts()
    config = replace(CONFIG, join=("seed:1", "b:2"))
    executor = PipesExecutor(config, hosts)
    await executor.open(environment(FakeEngineApi(w="a:1", other="b:2", third="c:3", plain="")))
    assert hosts.made[0].config.join == ("seed:1", "b:2", "c:3")
    await executor.close()


def test_nodes_that_come_later_are_found_even_after_the_engine_was_away() -> None:
    async def watch() -> None:
        hosts, api = Hosts(), FakeEngineApi()
        executor = PipesExecutor(CONFIG, hosts)
        await executor.open(environment(api))
        (host,) = hosts.made
        api.away = True
        await asyncio.sleep(12)
        assert host.joined == []
        api.away = False
        api.labels = {"w": "a:1", "other": "b:2"}
        await asyncio.sleep(6)
        assert host.joined[-1] == ("b:2",)
        await executor.close()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(watch())
    finally:
        loop.close()


@run_async
async def test_facts_are_the_whole_network_with_the_worker_at_its_own_node() -> None:
    records = [a_node("a", (0, 2), end_model=True), a_node("b", (2, 4), jobs=2)]
    executor = PipesExecutor(CONFIG, Hosts(records=records))
    await executor.open(environment())
    view = told_in(executor.facts())
    assert view is not None
    assert [(node.node_id, node.worker_id, node.jobs) for node in view.nodes] == [
        ("a", "w", 0),
        ("b", "", 2),
    ]
    assert view.pipes[0].complete
    msgspec.msgpack.encode(executor.facts())  # it goes over the bus
    await executor.close()
