"""Language models as canonical jobs."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.support.fake_llm import FakeRunner
from tests.support.rows import every
from tests.support.waiting import soon

from penstock.app.llm import make_executor
from penstock.core.errors import InvalidRequest
from penstock.core.job import JobRequest
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Outcome, Task, TopicPaused
from penstock.testing.aio import run_async
from penstock.testing.context import RecordingContext
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.runner import TOGETHER, answer
from penstock.workloads.llm.values import (
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    EmbeddingResult,
    EngineUnavailable,
    LlmCode,
    LlmFailure,
    LlmResult,
    Usage,
    is_model_name,
)

CHAT = {"kind": "chat", "messages": [{"role": "user", "content": "one two three"}]}


def task(value: Any, model: str = "fake", constraints: Constraints | None = None) -> Task:
    request = JobRequest(job_id="j", topic=f"job.llm.{model}")
    return Task(request, 1, msgspec.json.encode(value), 1e12, constraints)


def a_context(job_id: str = "j") -> RecordingContext:
    return RecordingContext(JobRequest(job_id=job_id, topic="job.llm.fake", idempotent=True))


async def ran(runner: FakeRunner, value: Any, **more: Any) -> tuple[Outcome, RecordingContext]:
    ctx = RecordingContext()
    executor = LlmExecutor(runner, ["fake"])
    try:
        return await executor.run(task(value, **more), ctx), ctx
    finally:
        await executor.close()


@run_async
async def test_a_chat_ends_with_its_answer_what_it_took_and_who_answered() -> None:
    outcome, ctx = await ran(FakeRunner(), CHAT)
    assert outcome.status is JobState.SUCCEEDED
    result = msgspec.json.decode(outcome.payload or b"", type=LlmResult)
    assert result.choices == (Choice(index=0, text="ONE TWO THREE"),)
    assert (result.model, result.engine) == ("fake", "fake 1")
    assert result.usage == Usage(3, 3, 0)
    assert ctx.streamed == []


@run_async
async def test_the_log_of_a_job_says_what_of_its_schema_is_not_enforced() -> None:
    _, ctx = await ran(FakeRunner(), {**CHAT, "schema": {"type": "array", "uniqueItems": True}})
    assert ctx.logged("warning") == ["not enforced by the schema's grammar: uniqueItems"]


@run_async
async def test_pieces_are_streamed_only_where_the_job_asks_for_it() -> None:
    _, ctx = await ran(FakeRunner(), {**CHAT, "stream": True})
    pieces = [msgspec.json.decode(text, type=Delta) for text in ctx.streamed]
    assert "".join(piece.text for piece in pieces) == "ONE TWO THREE"


@run_async
async def test_every_prompt_gets_its_answers_and_is_counted_once() -> None:
    value = {"kind": "completion", "prompts": ["a b", "c"], "n": 2, "stream": True}
    outcome, ctx = await ran(FakeRunner(), value)
    result = msgspec.json.decode(outcome.payload or b"", type=LlmResult)
    assert [(one.index, one.text) for one in result.choices] == [
        (0, "A B"),
        (1, "A B"),
        (2, "C"),
        (3, "C"),
    ]
    assert result.usage == Usage(3, 6, 0)
    told = [msgspec.json.decode(text, type=Delta).choice for text in ctx.streamed]
    assert sorted(told) == [0, 0, 1, 1, 2, 3]


@run_async
async def test_embeddings_are_vectors_of_length_one() -> None:
    outcome, _ = await ran(FakeRunner(), {"kind": "embedding", "inputs": ["a", "e"]})
    result = msgspec.json.decode(outcome.payload or b"", type=EmbeddingResult)
    assert [round(sum(x * x for x in vector), 6) for vector in result.vectors] == [1.0, 1.0]


@run_async
async def test_a_failure_of_the_model_is_the_job_s_with_its_code() -> None:
    runner = FakeRunner(fail_with={"two": LlmCode.INVALID_PROMPT})
    outcome, _ = await ran(runner, CHAT)
    assert outcome.status is JobState.FAILED
    assert outcome.error_code == "INVALID_PROMPT"


@run_async
async def test_a_prompt_over_the_context_names_both_counts() -> None:
    outcome, _ = await ran(FakeRunner(context=2), CHAT)
    assert outcome.error_code == "CONTEXT_EXCEEDED"
    assert "3 tokens" in (outcome.error_message or "")
    assert "room for 2" in (outcome.error_message or "")


@run_async
async def test_a_job_that_kills_the_engine_each_time_fails_after_three() -> None:
    runner = FakeRunner(crash_on=["two"])
    outcome, ctx = await ran(runner, CHAT)
    assert outcome.error_code == "ENGINE_CRASHED"
    assert "3 times" in (outcome.error_message or "")
    assert len(runner.asked) == 3
    assert len(ctx.logged("warning")) == 2


class Fragile(FakeRunner):
    """Its engine dies once, after so many words."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after
        self._is_well = False

    async def generate(self, model: str, ask: Any, choice: int = 0, watch: Any = None) -> Any:
        said = 0
        async for piece in super().generate(model, ask, choice):
            if said == self._after and not self._is_well:
                self._is_well = True
                raise LlmFailure(LlmCode.ENGINE_CRASHED, "the engine died")
            yield piece
            said += 1


@run_async
async def test_an_answer_that_was_told_in_part_begins_again_as_another_attempt() -> None:
    runner = Fragile(after=1)
    executor = LlmExecutor(runner, ["fake"])
    first, second = a_context(), a_context()
    with pytest.raises(TopicPaused, match="the engine died"):
        await executor.run(task({**CHAT, "stream": True}), first)
    assert len(first.streamed) == 1
    outcome = await executor.run(task({**CHAT, "stream": True}), second)
    assert outcome.status is JobState.SUCCEEDED
    assert len(second.streamed) == 3


@run_async
async def test_an_answer_of_which_nothing_was_told_yet_is_begun_again() -> None:
    runner = Fragile(after=0)
    outcome, ctx = await ran(runner, {**CHAT, "stream": True})
    assert outcome.status is JobState.SUCCEEDED
    assert len(ctx.streamed) == 3


@run_async
async def test_a_job_that_kills_the_engine_takes_no_other_job_with_it() -> None:
    """However many of them come while one that is innocent runs."""
    runner = FakeRunner(crash_on=["poison"], delay=0.001)
    executor = LlmExecutor(runner, ["fake"])

    async def ask(text: str, name: str) -> Outcome:
        value = {"kind": "completion", "prompts": [text]}
        return await executor.run(task(value), a_context(name))

    innocent = asyncio.ensure_future(ask("word " * 40, "innocent"))
    culprits = []
    for number in range(20):
        await asyncio.sleep(0.01)
        culprits.append(asyncio.ensure_future(ask("poison", f"culprit-{number}")))
    assert (await innocent).status is JobState.SUCCEEDED
    for culprit in culprits:
        culprit.cancel()
    await asyncio.gather(*culprits, return_exceptions=True)
    await executor.close()


@run_async
async def test_of_two_jobs_that_kill_the_engine_each_is_blamed_and_the_others_are_answered() -> (
    None
):
    runner = FakeRunner(crash_on=["poison"])
    executor = LlmExecutor(runner, ["fake"])

    async def ask(text: str, name: str) -> Outcome:
        """Handed back until it ends, as an engine would give it out again."""
        while True:
            try:
                value = {"kind": "completion", "prompts": [text]}
                return await executor.run(task(value), a_context(name))
            except TopicPaused:
                await asyncio.sleep(0.05)

    jobs = {"a poison": "ENGINE_CRASHED", "b poison": "ENGINE_CRASHED", "a word": None, "b": None}
    done = await asyncio.gather(*(ask(text, text) for text in jobs))
    assert [outcome.error_code for outcome in done] == list(jobs.values())
    await executor.close()


class Ill(FakeRunner):
    """Its engine can't be loaded, until it is well."""

    code = LlmCode.OUT_OF_MEMORY

    def __init__(self) -> None:
        super().__init__()
        self.is_well = False

    async def load(self, model: str = "", on_progress: Any = None) -> Any:
        if not self.is_well:
            raise EngineUnavailable(self.code, "there is not enough memory")
        return await super().load(model, on_progress)


@pytest.mark.parametrize(
    "code", [LlmCode.OUT_OF_MEMORY, LlmCode.ENGINE_MISSING, LlmCode.MODEL_NOT_FOUND], ids=str
)
@run_async
async def test_an_engine_that_is_unavailable_hands_its_jobs_back_and_says_why(
    code: LlmCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workloads.llm.health._FIRST_DELAY", 0.01)
    runner = Ill()
    runner.code = code
    executor = LlmExecutor(runner, ["fake"])
    for number in range(10):
        with pytest.raises(TopicPaused, match="not enough memory"):
            await executor.run(task(CHAT), a_context(f"j{number}"))
    [(topic, why)] = executor.facts()["paused"].items()
    assert topic == "job.llm.fake"
    assert f"{code}: there is not enough memory" in why
    assert executor.facts()["models"] == {"job.llm.fake": {"state": "ill", "cause": why}}
    runner.is_well = True
    await soon(lambda: "paused" not in executor.facts(), "it answers again")
    assert executor.facts()["models"] == {"job.llm.fake": {"state": "ready"}}
    assert (await executor.run(task(CHAT), a_context())).status is JobState.SUCCEEDED
    await executor.close()


@run_async
async def test_a_job_that_may_begin_only_once_waits_for_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.workloads.llm.health._FIRST_DELAY", 0.01)
    runner = Ill()
    executor = LlmExecutor(runner, ["fake"])
    ctx = RecordingContext(JobRequest(job_id="j", topic="job.llm.fake", idempotent=False))
    running = asyncio.ensure_future(executor.run(task(CHAT), ctx))
    assert await asyncio.to_thread(
        ctx.wait_for_progress,
        "waits for the engine: OUT_OF_MEMORY: there is not enough memory"
        " (tried again every 0.01 s)",
    )
    runner.is_well = True
    assert (await running).status is JobState.SUCCEEDED
    await executor.close()


@run_async
async def test_a_large_job_is_not_asked_all_at_once() -> None:
    most = 0

    class Counting(FakeRunner):
        async def generate(self, model: str, ask: Any, choice: int = 0, watch: Any = None) -> Any:
            nonlocal most
            async for piece in super().generate(model, ask, choice):
                most = max(most, self.running)
                yield piece

    prompts = [f"a{number}" for number in range(300)]
    outcome, _ = await ran(Counting(), {"kind": "completion", "prompts": prompts, "n": 2})
    result = msgspec.json.decode(outcome.payload or b"", type=LlmResult)
    assert [one.text for one in result.choices] == [f"A{n // 2}" for n in range(600)]
    assert most == TOGETHER


@run_async
async def test_a_cancel_ends_the_computation_before_the_job() -> None:
    runner = FakeRunner(delay=3600)
    executor = LlmExecutor(runner, ["fake"])
    ctx = RecordingContext()
    running = asyncio.ensure_future(executor.run(task({**CHAT, "n": 3}), ctx))
    for _ in range(100):
        await asyncio.sleep(0)
    assert runner.running == 3
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert runner.running == 0


@run_async
async def test_when_one_answer_fails_the_others_are_ended() -> None:
    class Halting(FakeRunner):
        async def generate(self, model: str, ask: Any, choice: int = 0, watch: Any = None) -> Any:
            if choice == 1:
                raise LlmFailure(LlmCode.ENGINE_ERROR, "no")
            self.running += 1
            try:
                await asyncio.sleep(3600)
                yield Completion(choice=Choice())
            finally:
                self.running -= 1

    runner = Halting()
    with pytest.raises(LlmFailure, match="no"):
        await answer(runner, "fake", CompletionRequest(prompts=("a",), n=3))
    assert runner.running == 0


@every(
    "payload, problem",
    [
        (b"", "not a request"),
        (b"{", "not a request"),
        (b"\xff", "not a request"),
        (b'{"kind":"song"}', "song"),
        (b'{"kind":"chat","messages":[]}', "messages"),
        (b'{"kind":"chat","messages":[{"role":"king","content":"x"}]}', "king"),
        (b'{"kind":"chat","messages":[{"role":"user","content":"x"}],"n":0}', "n"),
        (
            b'{"kind":"chat","messages":[{"role":"user","content":"x"}],"temperature":1}',
            "temperature",
        ),
        (
            b'{"kind":"chat","messages":[{"role":"user","content":"x"}],"sampling":{"top_p":2}}',
            "top_p",
        ),
        (b'{"kind":"completion","prompts":[]}', "prompts"),
        (b'{"kind":"embedding","inputs":[3]}', "inputs"),
        (b'{"kind":"chat","schema":' + b'{"a":' * 100_000, "nested too deeply"),
    ],
)
@run_async
async def test_bad_input_is_refused_when_it_is_submitted_and_when_it_is_run(
    payload: bytes, problem: str
) -> None:
    executor = LlmExecutor(FakeRunner(), ["fake"])
    with pytest.raises(InvalidRequest, match=problem):
        executor.check("job.llm.fake", payload)
    request = JobRequest(job_id="j", topic="job.llm.fake")
    outcome = await executor.run(Task(request, 1, payload, 1e12), RecordingContext())
    assert outcome.error_code == "BAD_INPUT"
    assert problem in (outcome.error_message or "")


@run_async
async def test_a_model_that_is_not_served_is_an_unknown_topic() -> None:
    outcome, _ = await ran(FakeRunner(), CHAT, model="other")
    assert outcome.error_code == "UNKNOWN_TOPIC"


@run_async
async def test_a_limit_of_memory_is_not_ignored() -> None:
    outcome, _ = await ran(FakeRunner(), CHAT, constraints=Constraints(max_memory=1 << 20))
    assert outcome.error_code == "CONSTRAINT_NOT_ENFORCED"
    outcome, _ = await ran(FakeRunner(), CHAT, constraints=Constraints(network=(), read_only=True))
    assert outcome.status is JobState.SUCCEEDED


@run_async
async def test_without_models_it_serves_nothing() -> None:
    executor = make_executor(None, {})
    assert executor.topics == ()
    await executor.close()


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", True),
        ("a", True),
        ("", False),
        (".a", False),
        ("a.", False),
        ("a..b", False),
        ("a/b", False),
        ("a b", False),
        ("é", False),
        ("a" * 121, False),
    ],
)
def test_a_model_s_name_is_a_part_of_a_topic(name: str, fits: bool) -> None:
    assert is_model_name(name) is fits
