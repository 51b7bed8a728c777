"""What a network is given that is not right: refused with a reason, counted, and whatever else
runs goes on as the whole model would."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import Struct
from msgspec.structs import replace
from tests.support.pipes.networks import (
    LAYERS,
    MODEL,
    PROMPT,
    TOKENS,
    Heard,
    Network,
    SmallModel,
    ask,
    asked,
    ranges,
    until,
    whole,
)
from tests.support.pipes.strangers import Beside, Stranger, beside, rehashed, slow, stranger

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import (
    ChatRequest,
    CompletionRequest,
    LlmCode,
    LlmFailure,
    Message,
)
from penstock.workloads.pipes.job import ComputeStep, Hop
from penstock.workloads.pipes.network_job import NetworkJob, pack_steps
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.routes import Route
from penstock.workloads.pipes.wire.connection import NotConnected, connect
from penstock.workloads.pipes.wire.identity import Identity, new_key
from penstock.workloads.pipes.wire.messages import (
    Acked,
    Assign,
    End,
    Failed,
    Hello,
    Kind,
    Open,
    Opened,
)

FIRST, REST = ranges(0, 2, LAYERS)
HIDDEN = 32
DTYPE, WIDTH = 61, 52
"""Where they are in the header of a step."""


# -- a node of the way lies ---------------------------------------------------------------


class Lie(Struct):
    """What a node answers to a step, under which name that is counted, and what is said of it."""

    tell: Callable[[Stranger, str, NetworkJob], None]
    counted: str
    words: str


def back(job: NetworkJob, **changes: Any) -> NetworkJob:
    """As the last node would answer, but for some changes."""
    right = {
        "current_layer": LAYERS,
        "compute_step": ComputeStep.HEAD,
        "data": torch.ones(job.returns, job.data.shape[1]) if job.data is not None else None,
    }
    return replace(job, **{**right, **changes})


def answers(counted: str, words: str, **changes: Any) -> Lie:
    return Lie(lambda m, to, job: m.step(to, back(job, **changes)), counted, words)


def sends(counted: str, words: str, make: Callable[[NetworkJob], bytes]) -> Lie:
    return Lie(lambda m, to, job: m.say(to, Kind.STEPS, make(back(job))), counted, words)


def damaged(job: NetworkJob) -> bytes:
    data = bytearray(b"".join(pack_steps([job])))
    data[-1] ^= 1
    return bytes(data)


def wide(job: NetworkJob) -> NetworkJob:
    assert job.data is not None
    return replace(job, data=torch.ones(job.returns, job.data.shape[1] + 1))


def half_a_frame(m: Stranger, to: str, job: NetworkJob) -> None:
    m.say(to, Kind.STEPS, bytes(100), 4000)
    m.hang_up(to)


STALLED = "no step came back"
LIES = {
    "a wrong hash": sends("bad_hash", "the job's hash is wrong", damaged),
    "a dtype that there is not": sends(
        "bad_dtype", "dtype 9 is not known", lambda job: rehashed(job, DTYPE, 9)
    ),
    "another dtype than its numbers have": sends(
        "bad_shape", "are not 1 rows of", lambda job: rehashed(job, DTYPE, 2)
    ),
    "another width": sends("bad_shape", "wide, not", lambda job: b"".join(pack_steps([wide(job)]))),
    "what is no number": Lie(
        lambda m, to, job: m.step(to, back(job, data=torch.full_like(back(job).data, torch.nan))),
        "not_finite",
        "m sent NaN or infinity",
    ),
    "other positions": answers("not_what_was_sent", "positions from 3", start=3),
    "another origin": answers("origin_mismatch", STALLED, origin_node_id="m"),
    "another pipe": answers("wrong_pipe", STALLED, pipe_id="other"),
    "a pass that was never sent": answers("not_under_way", STALLED, sequence=99),
    "a layer instead of the head": answers(
        "wrong_layer", STALLED, compute_step=ComputeStep.LAYER, data=torch.ones(len(PROMPT), HIDDEN)
    ),
    "that it arrived, and it was to come back": Lie(
        lambda m, to, job: m.tell(to, Acked(job.job_id, job.sequence)),
        "foreign_ack",
        STALLED,
    ),
    "steps that are cut off": sends(
        "truncated", STALLED, lambda job: b"".join(pack_steps([job]))[:-40]
    ),
    "half a frame": Lie(half_a_frame, "truncated", "m was lost"),
    "a frame that is too large": Lie(
        lambda m, to, job: m.say(to, Kind.FAILED, b"", 70_000), "oversized", "m was lost"
    ),
    "a frame of no kind": Lie(lambda m, to, job: m.say(to, 99, b""), "unknown_kind", "m was lost"),
    "a message that is none": Lie(
        lambda m, to, job: m.say(to, Kind.ACKED, b"\xc1"), "bad_frame", "m was lost"
    ),
}


def leads_over(node: Node, name: str) -> bool:
    """Whether a new job would go there."""
    route = node.find(frozenset())
    return isinstance(route, Route) and name in {hop.node_id for hop in route.hops}


def expire(node: Node, name: str) -> None:
    """Have the deadline of a step pass for jobs that go over a node."""
    assert node.origin is not None
    for generation in node.origin._generations.values():
        if name in generation.nodes:
            generation.sign = float("-inf")


@pytest.mark.seed("000", "11.2", "16.6", "18.3")
@pytest.mark.parametrize("what", LIES)
@run_async
async def test_a_node_of_the_way_that_says_this_is_refused_and_its_copy_answers(
    small: SmallModel, what: str
) -> None:
    lie = LIES[what]
    async with Network(small) as network:
        a = await network.origin(FIRST)
        slow(await network.add("b", REST))
        await whole(a)
        async with beside(a, small), stranger(network, REST) as m:
            m.on_step = partial(lie.tell, m)
            await until(lambda: leads_over(a, "m"), a)
            heard = Heard()
            asking = asyncio.ensure_future(ask(a, asked(), watch=heard))
            await until(lambda: a.record.refused, a)
            if lie.words == STALLED:
                expire(a, "m")
            result = await asking
            assert result.choices[0].text == small.text(PROMPT, 12)
            assert {hop.node for hop in result.hops} == {"a", "b"}
            [said] = heard.logs
            assert lie.words in said
            assert a.record.refused == {lie.counted: 1}


# -- somebody else's job -------------------------------------------------------------------


class Meddling(Struct):
    """What a stranger says of a job that is not its own, to whom, and how that is counted."""

    to: str
    tell: Callable[[Stranger, Beside], None]
    counted: str
    told: str = ""
    """The code of what it hears of it."""


def packet(other: Beside, **changes: Any) -> NetworkJob:
    """As the job's own next step to `b`, but for some changes."""
    job_id, generation = other.generation
    assert generation.job is not None
    right = NetworkJob(
        job_id=job_id,
        pipe_id=generation.job.pipe_id,
        origin_node_id="a",
        current_layer=FIRST.end,
        compute_step=ComputeStep.LAYER,
        sequence=1_000_000,
        start=5,
        count=1,
        returns=1,
        data=torch.full((1, HIDDEN), 0.5),
    )
    return replace(right, **changes)


def step(to: str, counted: str, told: str = "", **changes: Any) -> Meddling:
    return Meddling(to, lambda m, other: m.step(to, packet(other, **changes)), counted, told)


def word(to: str, counted: str, make: Callable[[bytes], Any], told: str = "") -> Meddling:
    return Meddling(to, lambda m, other: m.tell(to, make(other.generation[0])), counted, told)


def opening(job_id: bytes, **changes: Any) -> Open:
    hops = (Hop("m", 0, FIRST.end), Hop("b", REST.start, REST.end))
    return Open(
        **{"job_id": job_id, "pipe_id": "p", "model": MODEL, "hops": hops, "tokens": 64, **changes}
    )


HEAD = {"compute_step": ComputeStep.HEAD, "current_layer": LAYERS}
MEDDLING = {
    "its next step": step("b", "wrong_sender"),
    "its first step again": step("b", "wrong_sender", sequence=1, start=0),
    "a step of it as its own": step("b", "origin_mismatch", origin_node_id="m"),
    "a step over another pipe": step("b", "wrong_pipe", pipe_id="other"),
    "a step at a layer in the middle": step("b", "wrong_layer", current_layer=FIRST.end + 1),
    "a damaged step": Meddling(
        "b", lambda m, other: m.say("b", Kind.STEPS, damaged(packet(other))), "bad_hash"
    ),
    "its head at a layer node": step("b", "origin_mismatch", **HEAD),
    "its head at its origin": step("a", "wrong_sender", **HEAD),
    "a step of a job that there is not": step(
        "b", "unknown_job", "JOB_MISSING", job_id=b"?" * 16, origin_node_id="m"
    ),
    "its end at a layer node": word("b", "foreign_end", lambda job_id: End(job_id)),
    "its end at its origin": word("a", "foreign_end", lambda job_id: End(job_id)),
    "that it arrived": word("a", "foreign_ack", lambda job_id: Acked(job_id, 2)),
    "that it failed": word(
        "a", "foreign_failure", lambda job_id: Failed(job_id, 2, "ENGINE_ERROR", "no", "b")
    ),
    "a failure of a job that there is not": word(
        "a", "unknown_job", lambda _: Failed(b"?" * 16, 2, "ENGINE_ERROR", "no", "b")
    ),
    "an opening of it": word("b", "open_engine_error", opening, "ENGINE_ERROR"),
    "layers to hold": word("b", "foreign_assign", lambda _: Assign(MODEL, 0, 2, "m", 99)),
    # Ways of its own that are none.
    "a way with a hole": word(
        "b",
        "open_pipe_unavailable",
        lambda _: opening(os.urandom(16), hops=(Hop("m", 0, 2), Hop("b", 3, 6))),
        "PIPE_UNAVAILABLE",
    ),
    "a way that computes a layer twice": word(
        "b",
        "open_pipe_unavailable",
        lambda _: opening(os.urandom(16), hops=(Hop("m", 0, 3), Hop("b", 2, 6))),
        "PIPE_UNAVAILABLE",
    ),
    "a way over layers that are not held": word(
        "b",
        "open_no_local_model",
        lambda _: opening(os.urandom(16), hops=(Hop("b", 0, 6),)),
        "NO_LOCAL_MODEL",
    ),
    "another model": word(
        "b",
        "open_model_not_found",
        lambda _: opening(os.urandom(16), model="other"),
        "MODEL_NOT_FOUND",
    ),
    "more tokens than there may be": word(
        "b",
        "open_context_exceeded",
        lambda _: opening(os.urandom(16), tokens=1 << 20),
        "CONTEXT_EXCEEDED",
    ),
}


@pytest.mark.seed("000", "14.2", "14.3", "17.14")
@pytest.mark.parametrize("what", MEDDLING)
@run_async
async def test_a_member_that_says_this_of_a_foreign_job_is_refused_and_the_job_goes_on(
    small: SmallModel, what: str
) -> None:
    meddling = MEDDLING[what]
    async with Network(small) as network:
        a = await network.split(0, FIRST.end, LAYERS)
        node = network.nodes[meddling.to]
        async with beside(a, small) as other, stranger(network) as m:
            meddling.tell(m, other)
            await until(lambda: node.record.refused, node)
            assert node.record.refused == {meddling.counted: 1}
            if meddling.told:
                told: Any = await m.hear(Failed if "step" in what else Opened, meddling.to)
                assert told.code == meddling.told
                assert told.reason


# -- jobs of a member's own ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "counted", "code", "words"),
    [
        ({"start": 7}, "gap", "ENGINE_ERROR", "a gap"),
        ({"start": 0, "count": 200}, "no_room", "CONTEXT_EXCEEDED", "room for 64"),
        ({"start": 0, "data": torch.nan}, "not_finite", "WRONG_COMPUTATION", "NaN or infinity"),
        ({"start": 0, "data": torch.inf}, "not_finite", "WRONG_COMPUTATION", "NaN or infinity"),
    ],
)
@run_async
async def test_a_step_that_can_not_be_gone_on_from_ends_its_own_job_alone(
    small: SmallModel, changes: dict[str, Any], counted: str, code: str, words: str
) -> None:
    async with Network(small) as network:
        a = await network.split(0, FIRST.end, LAYERS)
        b = network.nodes["b"]
        async with beside(a, small) as other, stranger(network) as m:
            job_id = os.urandom(16)
            m.tell("b", opening(job_id))
            assert (await m.hear(Opened, "b")).ok
            value, count = changes.pop("data", 1.0), changes.get("count", 1)
            own = {"job_id": job_id, "pipe_id": "p", "origin_node_id": "m"}
            data = torch.full((count, HIDDEN), value)
            m.step("b", packet(other, **own, **changes, data=data))
            told = await m.hear(Failed, "b")
            assert (told.job_id, told.code) == (job_id, code)
            assert words in told.reason
            assert b.record.refused == {counted: 1}


@run_async
async def test_an_opening_that_comes_twice_while_it_waits_is_refused_once(
    small: SmallModel,
) -> None:
    async with Network(small, keep=0) as network:
        a = await network.origin(FIRST)
        b = await network.add("b", REST, max_jobs=1)
        await whole(a)
        job_id = os.urandom(16)
        async with stranger(network) as m:
            async with beside(a, small):
                m.tell("b", opening(job_id))
                assert (await m.hear(Opened, "b")).waiting
                m.tell("b", opening(job_id))
                await until(lambda: b.record.refused, b)
            await until(lambda: job_id in b._jobs, b)
            assert b.record.refused["open_engine_error"] == 1
        result = await ask(a, asked())
        assert result.choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_nobody_but_its_origin_goes_on_from_a_kept_cache(small: SmallModel) -> None:
    async with Network(small) as network:
        a = await network.split(0, FIRST.end, LAYERS)
        b = network.nodes["b"]
        await ask(a, asked())
        await until(lambda: b.record.cache_kept, b)
        assert a.origin is not None
        [kept] = a.origin.prefixes._kept
        async with stranger(network) as m:
            m.tell("b", opening(os.urandom(16), reuse=kept.keys["b"]))
            told = await m.hear(Opened, "b")
            assert (told.ok, told.have) == (True, 0)
        again = await ask(a, asked())
        assert again.usage.cached_tokens == len(PROMPT) - 1
        assert again.choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_steps_that_are_sent_twice_change_nothing(small: SmallModel) -> None:
    async with Network(small, prefill_chunk_size=16) as network:
        a = await network.split(0, 2, 4, LAYERS)
        for node in network.nodes.values():
            node.mesh.send = partial(twice, node.mesh.send)  # type: ignore[method-assign]
        async with beside(a, small):
            result = await ask(a, asked())
            assert result.choices[0].text == small.text(PROMPT, 12)
        refused = [node.record.refused for node in network.nodes.values()]
        late = {"unknown_job", "job_has_ended"}
        assert all(set(one) - late == {"repeated"} for one in refused)
        assert all(one["repeated"] > 12 for one in refused)


def twice(send: Callable[..., bool], node_id: str, kind: Kind, *buffers: Any) -> bool:
    if kind is Kind.STEPS:
        send(node_id, kind, *buffers)
    return send(node_id, kind, *buffers)


# -- who should not be there ---------------------------------------------------------------


@pytest.mark.seed("000", "18.11")
@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ("wrong_key", "another network's key"),
        ("old_protocol", "protocol 0 is not 1"),
        ("node_id_mismatch", "its certificate says 'm'"),
        ("own_node_id", "the id of both nodes"),
        ("second_connection", "b. is connected already"),
    ],
)
@run_async
async def test_a_peer_that_should_not_come_in_is_told_why_and_jobs_go_on(
    small: SmallModel, counted: str, words: str
) -> None:
    async with Network(small) as network:
        a = await network.split(0, FIRST.end, LAYERS)
        name = {"own_node_id": "a", "second_connection": "b"}.get(counted, "m")
        key = new_key() if counted == "wrong_key" else network.key
        hello = Hello(
            protocol=0 if counted == "old_protocol" else 1,
            node_id="x" if counted == "node_id_mismatch" else name,
            boot="now",
        )
        async with beside(a, small):
            with pytest.raises(NotConnected, match=words):
                await connect(a.address, Identity.make(key, name), hello, Nobody())
            await until(lambda: a.record.refused, a)
            assert a.record.refused == {counted: 1}
        assert {one.node_id for one in a.records()} == {"a", "b"}


class Nobody:
    """Who is never told anything."""

    def connected(self, connection: Any) -> None:
        raise AssertionError("it came in")

    received = lost = connected


@pytest.mark.seed("000", "17.15")
@run_async
async def test_a_node_with_other_weights_is_named_and_no_job_goes_over_it(
    small: SmallModel, tmp_path: Path
) -> None:
    other = SmallModel.made(tmp_path / "other")
    with torch.no_grad():
        other.model.model.layers[LAYERS - 1].mlp.down_proj.weight.mul_(1.01)
    other.model.save_pretrained(other.folder)
    async with Network(small) as network:
        a = await network.split(0, FIRST.end, LAYERS)
        slow(network.nodes["b"])
        async with beside(a, small):
            await network.add("c", REST, source=other.folder)
            await until(lambda: len(a.records()) == 3, a)
            route = await whole(a)
            assert route.disagree == (f"layers {LAYERS - 1} of c have other weights",)
            assert a.record.refused == {"other_weights": 1}
            result = await ask(a, asked())
            assert result.choices[0].text == small.text(PROMPT, 12)
            assert {hop.node for hop in result.hops} == {"a", "b"}


# -- what is asked -------------------------------------------------------------------------


def chat(**more: Any) -> ChatRequest:
    return ChatRequest(messages=(Message(role="user", content="ab"),), **more)


@pytest.mark.parametrize(
    ("question", "code", "words"),
    [
        (CompletionRequest(prompts=("",)), LlmCode.INVALID_PROMPT, "is empty"),
        (CompletionRequest(prompts=((),)), LlmCode.INVALID_PROMPT, "is empty"),
        (CompletionRequest(prompts=((5, 430),)), LlmCode.INVALID_PROMPT, "430"),
        (CompletionRequest(prompts=((-1,),)), LlmCode.INVALID_PROMPT, "-1"),
        (CompletionRequest(prompts=("\ud800",)), LlmCode.INVALID_PROMPT, "not valid Unicode"),
        (asked([40] * 512), LlmCode.CONTEXT_EXCEEDED, "512 tokens, and 512 are all"),
        (chat(tools=({"type": "function"},)), LlmCode.INVALID_SCHEMA, "tool"),
        (chat(schema={"type": "nonsense"}), LlmCode.INVALID_SCHEMA, "nonsense"),
    ],
)
@run_async
async def test_what_can_not_be_asked_is_refused_before_any_node_hears_of_it(
    small: SmallModel, question: Any, code: LlmCode, words: str
) -> None:
    async with Network(small) as network:
        a = await network.split(0, FIRST.end, LAYERS)
        async with beside(a, small):
            with pytest.raises(LlmFailure) as failed:
                await ask(a, question)
            assert failed.value.code is code
            assert words in failed.value.message
            assert [node.record.jobs for node in network.nodes.values()] == [1, 1]


@pytest.mark.seed("000", "15.9")
@run_async
async def test_an_answer_that_stops_at_once_is_whole_and_gives_its_room_back(
    small: SmallModel,
) -> None:
    first = TOKENS[small.generated(PROMPT, 1)[0]]
    async with Network(small, keep=0) as network:
        a = await network.split(0, 2, 4, LAYERS)
        stopped, short = await asyncio.gather(ask(a, asked(stop=(first,))), ask(a, asked(count=1)))
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
        assert (short.choices[0].text, short.choices[0].finish_reason) == (first, "length")
        assert stopped.usage.completion_tokens == short.usage.completion_tokens == 1
        for node in network.nodes.values():
            await until(lambda node=node: not node.record.jobs | node.record.cache_used, node)
