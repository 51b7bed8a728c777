"""Prompts go through the pipe in chunks, several of them at once."""

from __future__ import annotations

import pytest
from tests.support.pipes.sums import Likeliest, Ring, answer

from penstock.lifecycles.processor import ProcessorEvent
from penstock.workloads.llm.values import LlmCode
from penstock.workloads.pipes.job import ChunkState, ComputeStep, Hop, OriginText

LAYERS = 6
WAY = (Hop("A", 0, 2), Hop("B", 2, 4), Hop("C", 4, 6))
HELD = {"A": [(0, 2)], "B": [(2, 4)], "C": [(4, 6)]}
PROMPT = list(range(1, 41))


def chunks_of(ring: Ring, node: str) -> list[int]:
    [segment] = ring.nodes[node].segments
    return [count for *_, counts in segment.passes for count in counts]


@pytest.mark.seed("000", "3.2", "3.5")
def test_prompt_is_cut_into_chunks_and_only_the_last_comes_back() -> None:
    ring = Ring(LAYERS, HELD, prefill_chunk_size=16)
    job, told = ring.begin(WAY, PROMPT, 1)
    ring.run()
    assert chunks_of(ring, "C") == [16, 16, 8]
    assert ring.landings == 2
    assert told == answer(PROMPT, 1, LAYERS)
    assert job.text is not None
    assert job.text.chunking == ChunkState(total=40, sent=40, acked=40)


@pytest.mark.seed("000", "3.8")
def test_progress_is_told_of_every_chunk() -> None:
    told: list[tuple[int, int]] = []
    ring = Ring(LAYERS, HELD, prefill_chunk_size=16)
    ring.begin(WAY, PROMPT, 1, on_progress=lambda job, sent, of: told.append((sent, of)) or True)  # type: ignore[func-returns-value]
    ring.run()
    assert told == [(16, 40), (32, 40), (40, 40)]


@pytest.mark.seed("000", "15.7", "18.7")
def test_as_many_chunks_are_under_way_as_there_are_nodes_elsewhere_and_one_more() -> None:
    ring = Ring(LAYERS, HELD, prefill_chunk_size=4)
    job, _ = ring.begin(WAY, PROMPT, 1)
    origin = ring.nodes["A"]
    while not origin.compute.is_idle:
        origin.compute.round()
    assert job.text is not None
    assert list(job.text.under_way) == [1, 2, 3]
    assert job.text.chunking.sent == 12


@pytest.mark.seed("000", "3.6")
def test_chunk_that_landed_lets_the_next_one_go() -> None:
    ring = Ring(LAYERS, HELD, prefill_chunk_size=4)
    job, _ = ring.begin(WAY, PROMPT, 1)
    origin = ring.nodes["A"]
    while not origin.compute.is_idle:
        origin.compute.round()
    context = origin.receiver.context(job.job_id)
    origin.compute.acked(context, 1, ())
    origin.compute.acked(context, 1, ())  # told twice, counted once
    while not origin.compute.is_idle:
        origin.compute.round()
    assert job.text is not None
    assert list(job.text.under_way) == [2, 3, 4]
    assert job.text.chunking.acked == 4


@pytest.mark.seed("000", "17.8", "18.7")
def test_nodes_have_different_chunks_of_one_prompt_at_the_same_time() -> None:
    ring = Ring(LAYERS, HELD, prefill_chunk_size=4)
    ring.begin(WAY, PROMPT, 1)
    overlapped = False
    while could := ring.choices():
        could[0]()
        lying = [to for (_, to), frames in ring.route.items() if frames]
        overlapped = overlapped or {"B", "C"} <= set(lying)
    assert overlapped


@pytest.mark.seed("000", "18.4")
def test_replay_computes_prompt_and_answer_so_far_and_repeats_no_token() -> None:
    first = Ring(LAYERS, HELD, prefill_chunk_size=16)
    _, told = first.begin(WAY, PROMPT, 5)
    first.run()
    again = Ring(LAYERS, HELD, prefill_chunk_size=16)
    ids = PROMPT + told
    _, more = again.begin(WAY, ids, 8, chunking=ChunkState(total=len(ids)))
    job = again.nodes["A"].jobs.all()[0]
    assert job.text is not None
    job.text.prompt_tokens = len(PROMPT)
    again.run()
    assert told + more == answer(PROMPT, 8, LAYERS)
    assert chunks_of(again, "B")[:3] == [16, 16, 13]


def test_what_is_in_every_cache_already_is_not_computed_again() -> None:
    ring = Ring(LAYERS, HELD, prefill_chunk_size=16)
    job, told = ring.begin(WAY, PROMPT, 1)
    ring.run()
    caches = {node: ring.nodes[node].jobs.all()[0].cache for node in "ABC"}
    ring.nodes["A"].jobs.remove(job.job_id)
    for node in "BC":
        ring.nodes[node].jobs.remove(job.job_id)
    longer = [*PROMPT, *told, 77, 78]
    _, more = ring.begin(WAY, longer, 3, chunking=ChunkState(len(longer), 40, 40))
    for node, cache in caches.items():
        ring.nodes[node].jobs.all()[0].cache = cache
    before = len(chunks_of(ring, "B"))
    ring.run()
    assert more == answer(longer, 3, LAYERS)
    assert chunks_of(ring, "B")[before:] == [3, 1, 1]


@pytest.mark.seed("000", "3.5")
def test_last_token_is_computed_even_if_all_are_in_the_caches() -> None:
    ring = Ring(LAYERS, HELD)
    job, told = ring.begin(WAY, PROMPT, 1)
    ring.run()
    job.compute_step = ComputeStep.TOKENIZE
    assert job.text is not None
    job.text.chunking = ChunkState(total=0, sent=99)
    del job.text.input_ids[40:]
    ring.nodes["A"].compute.begin(ring.nodes["A"].receiver.context(job.job_id))
    ring.run()
    assert told == answer(PROMPT, 1, LAYERS) * 2
    assert chunks_of(ring, "B") == [40, 1]


@pytest.mark.seed("000", "3.2", "3.4", "10.2")
def test_prompt_that_is_text_is_tokenized_by_the_origin() -> None:
    ring = Ring(LAYERS, HELD)
    told: list[int] = []
    text = OriginText(
        "5 6 7",
        max_tokens=2,
        sampler=Likeliest(),
        on_token=lambda j, t, p: not told.append(t),  # type: ignore[arg-type, func-returns-value]
    )
    for node in "BC":
        ring.nodes[node].open(b"t" * 16, WAY)
    ring.nodes["A"].open(b"t" * 16, WAY, text=text)
    ring.nodes["A"].compute.begin(ring.nodes["A"].receiver.context(b"t" * 16))
    ring.run()
    assert told == answer([5, 6, 7], 2, LAYERS)
    assert text.prompt_tokens == 3


@pytest.mark.seed("000", "3.4")
@pytest.mark.parametrize("prompt", ["", None])
def test_empty_prompt_is_refused_before_anything_is_sent(prompt: str | None) -> None:
    ring = Ring(LAYERS, HELD)
    origin = ring.nodes["A"]
    origin.open(b"t" * 16, WAY, text=OriginText(prompt, max_tokens=2))
    origin.compute.begin(origin.receiver.context(b"t" * 16))
    ring.run()
    [(job_id, node, _, failure)] = origin.failures
    assert (job_id, node, failure.code) == (b"t" * 16, "A", LlmCode.INVALID_PROMPT)
    assert ring.frames == 0


@pytest.mark.seed("000", "3.9")
def test_client_that_went_away_while_the_prompt_was_read_ends_the_job() -> None:
    ring = Ring(LAYERS, HELD, prefill_chunk_size=4)
    job, told = ring.begin(WAY, PROMPT, 1, on_progress=lambda job, sent, of: sent < 8)
    ring.run()
    event, reason = ring.nodes["A"].ends_told[-1]
    assert event is ProcessorEvent.PREFILL_UPDATE_FAILED
    assert job.cancelled == reason == "the client disconnected"
    assert told == []
    assert ring.frames < 10


def test_origin_that_has_the_last_layers_too_waits_for_its_last_chunk() -> None:
    route = (Hop("A", 0, 2), Hop("B", 2, 4), Hop("A", 4, 6))
    ring = Ring(LAYERS, {"A": [(0, 2), (4, 6)], "B": [(2, 4)]}, prefill_chunk_size=16)
    job, told = ring.begin(route, PROMPT, 2)
    ring.run()
    assert told == answer(PROMPT, 2, LAYERS)
    assert ring.landings == 0
    assert job.text is not None
    assert job.text.chunking.acked == 40
