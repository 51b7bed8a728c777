"""Seed 000, sentence by sentence, as jobs meet it on real nodes.

tests/seeds/000.md numbers the sentences; marks say which test holds which.
Nodes are real: connections,
threads that compute, a model of transformers; what walks through the states is watched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from tests.support.pipes.networks import (
    LAYERS,
    PROMPT,
    Heard,
    Network,
    SmallModel,
    ask,
    asked,
    ranges,
    until,
)
from tests.workloads.pipes.live.test_engine_nodes import answer_of, engine_of, settings, submitted

from penstock.app.engine import Engine
from penstock.core.job import Job as CanonicalJob
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.processor import (
    ORIGIN_ONLY,
    PROCESSOR,
    ProcessorEvent,
    ProcessorState,
)
from penstock.ports.engine_api import Streamed
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import ChatRequest, CompletionRequest, LlmFailure, Message
from penstock.workloads.pipes import receiver, scheduler
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.end_model import EndModel
from penstock.workloads.pipes.executor import PipesExecutor
from penstock.workloads.pipes.job import ComputeStep, Job, JobContext
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.pipe import Pipe
from penstock.workloads.pipes.processor import JobProcessor
from penstock.workloads.pipes.runner import NodeHost

S, E = ProcessorState, ProcessorEvent
FIRST, MIDDLE, LAST = ranges(0, 2, 4, LAYERS)


class Move(NamedTuple):
    node_id: str
    before: ProcessorState
    event: ProcessorEvent
    step: ComputeStep
    """Of the job, after the move."""
    start: int
    count: int  # type: ignore[assignment]


class Walks(list[Move]):
    """Every move of every processor of a network."""

    def of(self, node_id: str) -> list[Move]:
        return [move for move in self if move.node_id == node_id]

    def passes(self, node_id: str) -> list[list[str]]:
        """The states of each pass through a node."""
        found: list[list[str]] = []
        for move in self.of(node_id):
            if move.before is S.VALIDATING and (not found or found[-1][-1] == S.DONE):
                found.append([])
            found[-1] += [] if found[-1] else [move.before]
            found[-1].append(PROCESSOR.after(move.before, move.event))
        return found


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Walks:
    seen = Walks()

    class Walked(JobProcessor):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "state" and getattr(self, "event", None) is not None:
                job, node = self.context.job, self.context.config.node_id
                assert self.event is not None
                if job is None:
                    seen.append(Move(node, self.state, self.event, ComputeStep.LAYER, 0, 0))
                else:
                    step = job.compute_step
                    seen.append(Move(node, self.state, self.event, step, job.start, job.count))
            super().__setattr__(name, value)

    monkeypatch.setattr(scheduler, "JobProcessor", Walked)
    monkeypatch.setattr(receiver, "JobProcessor", Walked)
    return seen


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel.made(tmp_path_factory.mktemp("seed") / "tiny")


# -- the machine ----------------------------------------------------------------------------


@pytest.mark.seed(
    "000",
    "1.1",
    "1.2",
    "2.1",
    "2.9",
    "2.11",
    "3.12",
    "4.1",
    "4.8",
    "5.11",
    "6.1",
    "6.6",
    "7.3",
    "8.1",
    "10.4",
    "11.4",
)
@run_async
async def test_a_job_is_carried_over_its_nodes_by_processors_that_walk_the_table(
    small: SmallModel, walks: Walks
) -> None:
    async with Network(small) as network:
        node = await network.split(0, 2, 4, LAYERS)
        result = await ask(node, asked(count=3))
    assert result.choices[0].text == small.text(PROMPT, 3)
    onward = ["VALIDATING", "PROCESS_LAYERS", "SEND", "DONE"]
    assert walks.passes("b") == walks.passes("c") == [onward] * 3
    out = ["EMBED", "PROCESS_LAYERS", "SEND", "DONE"]
    assert walks.passes("a") == [
        ["VALIDATING", *out],
        ["VALIDATING", "HEAD", *out],
        ["VALIDATING", "HEAD", *out],
        ["VALIDATING", "HEAD", "DONE"],
    ]
    assert walks[-1].event is E.JOB_COMPLETED


@pytest.mark.seed("000", "3.7", "5.2", "10.3", "10.6")
@run_async
async def test_text_and_tokens_are_handled_on_the_origin_alone(
    small: SmallModel, walks: Walks
) -> None:
    async with Network(small, prefill_chunk_size=16) as network:
        node = await network.split(0, 2, 4, LAYERS)
        await asyncio.gather(*(ask(node, asked(range(60 + n, 90), 4)) for n in range(4)))
    ends = {S.EMBED, S.HEAD}
    assert ends == ORIGIN_ONLY
    assert {move.node_id for move in walks if move.before in ends} == {"a"}
    elsewhere = {move.step for move in walks if move.node_id != "a"}
    assert elsewhere == {ComputeStep.LAYER, ComputeStep.HEAD}


@pytest.mark.seed("000", "3.1", "3.3", "3.6", "3.8", "10.3", "13.2")
@run_async
async def test_a_prompt_goes_in_chunks_and_then_each_new_token_alone(
    small: SmallModel, walks: Walks
) -> None:
    async with Network(small, prefill_chunk_size=16) as network:
        node = await network.split(0, 3, LAYERS)
        heard = Heard()
        await ask(node, asked(count=4), watch=heard)
    embedded = [(move.start, move.count) for move in walks if move.before is S.EMBED]
    assert embedded == [(0, 16), (16, 16), (32, 8), (40, 1), (41, 1), (42, 1)]
    assert heard.notes == [f"read {sent} of 40 tokens" for sent in (16, 32, 40)]


@pytest.mark.seed("000", "2.10", "4.10")
@run_async
async def test_a_node_that_has_all_layers_hands_nothing_on(small: SmallModel, walks: Walks) -> None:
    async with Network(small, prefill_chunk_size=32) as network:
        node = await network.split(0, LAYERS)
        await ask(node, asked(count=2))
    layers = ["EMBED", "PROCESS_LAYERS", "VALIDATING"]
    assert walks.passes("a") == [["VALIDATING", *layers, *layers, "HEAD", *layers, "HEAD", "DONE"]]


@pytest.mark.seed("000", "5.13", "15.3")
@run_async
async def test_jobs_that_are_at_their_heads_together_go_on_without_a_state_between(
    small: SmallModel, walks: Walks
) -> None:
    """Their tokens are embedded in one go."""
    async with Network(small) as network:
        node = await network.split(0, 3, LAYERS)
        await asyncio.gather(*(ask(node, asked(range(60 + n, 90), 30)) for n in range(6)))
    after_head = {move.event for move in walks if move.before is S.HEAD}
    assert after_head >= {E.MORE_TOKENS_NEED_LAYERS, E.JOB_COMPLETED}
    assert {(move.before, move.event) for move in walks} <= {
        (before, event) for before, event, _ in PROCESSOR
    }


@pytest.mark.seed("000", "5.9", "12.1")
@run_async
async def test_an_answer_ends_where_the_model_ends_it(small: SmallModel) -> None:
    """The end of a text is a token like any other: here it is made the likeliest after three."""
    ids = small.generated(PROMPT, 4)
    async with Network(small) as network:
        node = await network.split(0, 3, LAYERS)
        assert node.origin is not None
        text = node.origin.text
        text.ends = text.ends | {ids[3]}
        result = await ask(node, asked(count=30))
    assert result.choices[0].text == small.text(PROMPT, 3)
    assert result.choices[0].finish_reason == "stop"
    assert result.usage.completion_tokens == 4


# -- context, configuration -----------------------------------------------------------------


@pytest.mark.seed("000", "9.1", "16.1")
def test_a_context_has_the_five_things_of_the_seed() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(JobContext)}
    assert fields == {
        "config": "LpConfig",
        "logger": "Any",
        "job": "Job | None",
        "pipe": "Pipe | None",
        "end_model": "EndModel | None",
    }


@pytest.mark.seed("000", "1.2", "9.1", "9.2", "9.3", "9.4", "9.5", "9.6", "11.3", "17.5")
@run_async
async def test_every_processor_has_the_context_of_its_node(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, JobContext] = {}

    class Seen(JobProcessor):
        def __init__(self, context: JobContext) -> None:
            super().__init__(context)
            seen[context.config.node_id] = context

    monkeypatch.setattr(scheduler, "JobProcessor", Seen)
    monkeypatch.setattr(receiver, "JobProcessor", Seen)
    async with Network(small) as network:
        node = await network.split(0, 3, LAYERS)
        await ask(node, asked(count=2))
        for node_id, context in seen.items():
            assert isinstance(context.config, LpConfig)
            assert context.config is network.nodes[node_id].config
            assert isinstance(context.logger, logging.Logger)
            assert isinstance(context.job, Job)
            assert isinstance(context.pipe, Pipe)
            assert [hop.node_id for hop in context.pipe.hops] == ["a", "b"]
            assert isinstance(context.end_model, EndModel) == (node_id == "a")
    assert set(seen) == {"a", "b"}


@pytest.mark.seed("000", "5.6", "13.3")
@run_async
async def test_print_times_logs_what_each_node_took(
    small: SmallModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with Network(small, print_times=True) as network:
        node = await network.split(0, 2, 4, LAYERS)
        with caplog.at_level(logging.INFO, logger="penstock"):
            await ask(node, asked(count=5))
    [table] = [record.message for record in caplog.records if "compute ms" in record.message]
    first, _, *hops = table.splitlines()
    assert first.startswith("prefill 40 tokens in ")
    assert ", then 5 tokens at " in first
    assert [hop.split()[:3] for hop in hops] == [
        ["a", "ends", "5"],
        ["a", "0-1", "5"],
        ["b", "2-3", "5"],
        ["c", "4-5", "5"],
    ]


@pytest.mark.seed("000", "3.4", "10.2")
@run_async
async def test_messages_become_tokens_on_the_origin(small: SmallModel) -> None:
    """The template writes `<|start|>ab<|done|><|start|>`, which are four tokens."""
    async with Network(small) as network:
        node = await network.split(0, 3, LAYERS)
        chat = ChatRequest(messages=(Message(role="user", content="a"),), max_tokens=5)
        talked = await ask(node, chat)  # type: ignore[arg-type]
        text = await ask(node, CompletionRequest(prompts=("abc",), max_tokens=5))
    assert (talked.usage.prompt_tokens, text.usage.prompt_tokens) == (4, 3)


# -- the three exits, on the canonical job --------------------------------------------------


class SplitModelSite(NamedTuple):
    engine: Engine
    a: Node
    b: Node


@asynccontextmanager
async def served(folder: Path, small: SmallModel) -> AsyncIterator[SplitModelSite]:
    """An engine with an origin `a`, and a node `b` with the other half."""
    async with Network(small, drain=0.0) as network:
        b = await network.add("b", *ranges(3, LAYERS))
        mine = settings(
            folder,
            small,
            node__key=network.key,
            node__join=b.address,
            node__end_model="true",
            node__layers="0-2",
            node__node_id="a",
            node__drain=0.0,
        )
        async with engine_of(mine) as engine:
            [host] = [one._host for one in engine._executors if isinstance(one, PipesExecutor)]
            assert isinstance(host, NodeHost)
            yield SplitModelSite(engine, host.runner.node, b)


async def begun(engine: Engine) -> CanonicalJob:
    """A job that has said something."""
    job = await submitted(engine.api, count=400, stream=True, logprobs=None)
    async with asyncio.timeout(20):
        async for update in engine.api.follow(job.job_id):
            if isinstance(update, Streamed):
                return job
    raise AssertionError("it ended without a word")


@pytest.mark.seed("000", "1.5", "5.7", "7.2", "12.1", "12.2")
@run_async
async def test_completion_is_a_success_with_the_answer_and_handoffs_are_its_hops(
    tmp_path: Path, small: SmallModel
) -> None:
    async with served(tmp_path, small) as site:
        job = await submitted(site.engine.api)
        result = await answer_of(site.engine.api, job)
        done = await site.engine.api.get(job.job_id)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 1)
    assert result.choices[0].text == small.text(PROMPT, 12)
    assert [(hop.node, hop.layers, hop.passes) for hop in result.hops] == [
        ("a", "ends", 12),
        ("a", "0-2", 12),
        ("b", "3-5", 12),
    ]
    assert all(hop.network_ms > 0 for hop in result.hops if hop.layers in ("ends", "3-5"))


async def leave(site: SplitModelSite) -> None:
    await site.b.stop()


def forget_jobs(node: Node) -> None:
    for job in node._jobs.all():
        node._admission._end(job.job_id, "a bit fell over")


async def forget_the_job(site: SplitModelSite) -> None:
    forget_jobs(site.b)


async def unload(site: SplitModelSite) -> None:
    """Its record says for ever that it has them."""
    site.b.mesh.publish = lambda record: None  # type: ignore[method-assign]
    await site.b._holding.hold(())


async def leave_for_good(site: SplitModelSite) -> None:
    site.a.config = replace(site.a.config, open_timeout=0.2)
    await site.b.stop()


EXITS: dict[str, tuple[Callable[[SplitModelSite], Coroutine[None, None, None]], bool, str]] = {
    "NODE_LOST": (leave, True, "the node b was lost"),
    "JOB_MISSING": (forget_the_job, True, "b: the job is not known here"),
    "NO_LOCAL_MODEL": (unload, False, "b does not hold layers 3-5"),
    "PIPE_UNAVAILABLE": (leave_for_good, False, "no node can compute layers 3-5"),
}
"""What happens, whether in mid-answer, and what is said of it."""


@pytest.mark.seed("000", "12.3", "14.1", "14.2", "14.5", "15.5")
@pytest.mark.parametrize("code", EXITS)
@run_async
async def test_an_error_ends_the_job_as_failed_with_its_code_and_reason(
    tmp_path: Path, small: SmallModel, code: str
) -> None:
    happen, midway, words = EXITS[code]
    async with served(tmp_path, small) as site:
        api = site.engine.api
        if midway:
            job = await begun(site.engine)
            await happen(site)
        else:
            await answer_of(api, await submitted(api, count=1))
            await happen(site)
            job = await submitted(api, prompt=PROMPT[:20])
        done = await api.wait(job.job_id, 30)
        assert done.result is not None
        assert (done.state, done.result.error_code) == (JobState.FAILED, code)
        assert words in (done.result.error_message or "")
        assert words in await api.why(job.job_id)
        if not site.b._stopping:
            await until(lambda: not site.b.record.jobs, site.b)


def pipes_of(node: Node) -> list[Pipe]:
    found = (node._jobs.find(job.job_id)[1] for job in node._jobs.all())
    return [pipe for pipe in found if pipe is not None]


async def lose_the_job(nodes: dict[str, Node]) -> None:
    forget_jobs(nodes["b"])


async def lose_the_next_node(nodes: dict[str, Node]) -> None:
    for pipe in pipes_of(nodes["b"]):
        pipe.unavailable = "c was lost by b"


async def send_the_head_elsewhere(nodes: dict[str, Node]) -> None:
    for pipe in pipes_of(nodes["c"]):
        pipe.destination = lambda job: "b"  # type: ignore[method-assign]


async def unload_the_end_model(nodes: dict[str, Node]) -> None:
    nodes["a"]._receiver.end_model = None


async def drop_layers_of(node: Node, layer: int) -> None:
    dropping = asyncio.ensure_future(node._release([layer]))
    await asyncio.sleep(0)
    dropping.cancel()


async def drop_the_first_layers(nodes: dict[str, Node]) -> None:
    await drop_layers_of(nodes["a"], 0)


async def drop_middle_layers(nodes: dict[str, Node]) -> None:
    await drop_layers_of(nodes["b"], 3)


ROWS: dict[
    ProcessorEvent,
    tuple[ProcessorState, str, Callable[[dict[str, Node]], Coroutine[None, None, None]]],
] = {
    E.JOB_MISSING: (S.VALIDATING, "b", lose_the_job),
    E.PIPE_UNAVAILABLE: (S.VALIDATING, "b", lose_the_next_node),
    E.ORIGIN_MISMATCH: (S.VALIDATING, "b", send_the_head_elsewhere),
    E.END_MODEL_UNAVAILABLE: (S.VALIDATING, "a", unload_the_end_model),
    E.NO_MODEL_FOR_NEXT_LAYER: (S.EMBED, "a", drop_the_first_layers),
    E.NO_LOCAL_MODEL: (S.PROCESS_LAYERS, "b", drop_middle_layers),
}
"""Where each error of the table is found, and what makes a running job fail there."""


@pytest.mark.seed("000", "2.5", "2.6", "2.7", "2.8", "3.10", "4.7", "14.1", "14.5")
@pytest.mark.parametrize("event", ROWS)
@run_async
async def test_a_job_that_fails_takes_the_row_of_its_error(
    small: SmallModel, walks: Walks, event: ProcessorEvent
) -> None:
    state, where, happen = ROWS[event]
    async with Network(small, drain=0.0, speculation=False) as network:
        node = await network.split(0, 2, 4, LAYERS)
        text, count, failure = "", 0, None
        try:
            async for piece in node.generate(asked(count=60)):
                text, count = text + getattr(piece, "text", ""), count + 1
                if count == 3:
                    await happen(network.nodes)
        except LlmFailure as error:
            failure = error
        # It ends with the error, or went another way and lost nothing.
        assert failure.code == event.name if failure else text == small.text(PROMPT, 60)
    assert (where, state, event) in {(move.node_id, move.before, move.event) for move in walks}
