"""Many jobs at once: who goes together, who goes first, and whom a failure reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.support.pipes.sums import Likeliest, Ring, SumModel, answer

from penstock.lifecycles.processor import ProcessorEvent
from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.job import Hop, Job

LAYERS = 6
ALONE = (Hop("A", 0, LAYERS),)
SHARED = (Hop("A", 0, 2), Hop("B", 2, LAYERS))


def prompt_of(number: int, length: int = 4) -> list[int]:
    return [number * 11 + at for at in range(1, length + 1)]


def widths(model: SumModel) -> list[int]:
    return [len(jobs) for _, _, jobs, _ in model.passes]


def rounds_until(ring: Ring, over: Callable[[], bool]) -> int:
    count = 0
    while not over():
        ring.nodes["A"].compute.round()
        count += 1
        assert count < 1000
    return count


@pytest.mark.seed("000", "4.5", "5.5", "17.7")
def test_steps_of_all_jobs_go_through_layers_and_head_together() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    asked = [(ring.begin(ALONE, prompt_of(n), 5)[1], prompt_of(n)) for n in range(8)]
    ring.run()
    assert all(told == answer(prompt, 5, LAYERS) for told, prompt in asked)
    [model] = ring.nodes["A"].segments
    assert widths(model) == [8] * 5
    assert ring.nodes["A"].ends.heads == [8] * 5


@pytest.mark.seed("000", "6.5")
def test_steps_that_leave_together_are_one_frame_for_each_destination() -> None:
    held = {"A": [(0, 2)], "B": [(2, LAYERS)], "C": [(2, LAYERS)]}
    ring = Ring(LAYERS, held)
    for n in range(6):
        node = "BC"[n % 2]
        ring.begin((Hop("A", 0, 2), Hop(node, 2, LAYERS)), prompt_of(n), 1)
    ring.nodes["A"].compute.round()
    assert ring.frames == 2
    ring.run()
    assert ring.frames == 4


def test_job_that_joins_later_goes_with_the_others_from_its_first_step() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    origin = ring.nodes["A"]
    _, told = ring.begin(ALONE, prompt_of(1), 8)
    rounds_until(ring, lambda: len(told) == 3)
    _, later = ring.begin(ALONE, prompt_of(2), 2)
    ring.run()
    [model] = origin.segments
    assert widths(model) == [1, 1, 1, 1, 2, 2, 1, 1]
    assert later == answer(prompt_of(2), 2, LAYERS)


@pytest.mark.seed("000", "18.6")
def test_steps_and_chunks_of_prompts_share_a_pass() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]}, prefill_chunk_size=8, pass_tokens=16)
    _, told = ring.begin(ALONE, prompt_of(1), 20)
    rounds_until(ring, lambda: len(told) == 1)
    ring.begin(ALONE, prompt_of(2, 20), 1)
    ring.run()
    [model] = ring.nodes["A"].segments
    assert [counts for *_, counts in model.passes[2:5]] == [[1, 8], [1, 8], [1, 4]]


def test_long_prompt_delays_a_running_answer_by_one_chunk_at_most() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]}, prefill_chunk_size=8, pass_tokens=16)
    _, told = ring.begin(ALONE, prompt_of(1), 40)
    rounds_until(ring, lambda: len(told) == 1)
    for n in (2, 3, 4):
        ring.begin(ALONE, prompt_of(n, 64), 1)
    ring.run()
    [model] = ring.nodes["A"].segments
    # A token in each pass, and beside it never more than one chunk.
    assert all(counts[0] == 1 and sum(counts) <= 9 for *_, counts in model.passes[1 : len(told)])
    assert sum(map(len, (counts for *_, counts in model.passes))) == 40 + 3 * 8


@pytest.mark.seed("000", "17.6")
def test_running_answers_starve_no_prompt() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]}, prefill_chunk_size=8, pass_tokens=4)
    running = [ring.begin(ALONE, prompt_of(n), 50)[1] for n in range(8)]
    rounds_until(ring, lambda: all(running))
    _, told = ring.begin(ALONE, prompt_of(9, 24), 1)
    # Three chunks, a pass each, beside more steps than a pass has room for; then its own turn.
    assert rounds_until(ring, lambda: bool(told)) <= 3 + 8 // 4 + 1


@pytest.mark.seed("000", "17.6")
def test_prompts_take_turns() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]}, prefill_chunk_size=8, pass_tokens=8)
    ring.begin(ALONE, prompt_of(1, 80), 1)
    _, told = ring.begin(ALONE, prompt_of(2, 16), 1)
    rounds_until(ring, lambda: bool(told))
    [model] = ring.nodes["A"].segments
    assert sum(counts == [8] for *_, counts in model.passes) <= 5


def test_step_that_is_larger_than_a_pass_is_computed_all_the_same() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]}, prefill_chunk_size=64, pass_tokens=4)
    _, told = ring.begin(ALONE, prompt_of(1, 50), 2)
    ring.run()
    assert told == answer(prompt_of(1, 50), 2, LAYERS)


def test_steps_that_are_behind_catch_up_and_then_go_together() -> None:
    held = {"A": [(0, 1), (1, 3)], "B": [(1, LAYERS)]}
    ring = Ring(LAYERS, held)
    for n in range(2):
        ring.begin((Hop("A", 0, 1), Hop("B", 1, LAYERS)), prompt_of(n), 1)
    ring.begin((Hop("A", 0, 3), Hop("B", 3, LAYERS)), prompt_of(3), 1)
    ring.nodes["A"].compute.round()
    for lying in (ring.route["A", "B"],):
        while lying:
            lying.popleft()(ring.nodes["B"])
    ring.nodes["B"].compute.round()
    [model] = ring.nodes["B"].segments
    assert [(first, end, len(jobs)) for first, end, jobs, _ in model.passes] == [
        (1, 3, 2),
        (3, LAYERS, 3),
    ]


def raising(bad: Sequence[Job], error: Exception) -> Callable[[Sequence[Job]], Exception | None]:
    return lambda jobs: error if any(job is one for job in jobs for one in bad) else None


@pytest.mark.seed("000", "15.6")
def test_job_that_fails_alone_ends_with_the_reason_and_the_others_go_on() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    asked = [ring.begin(ALONE, prompt_of(n), 4) for n in range(4)]
    origin = ring.nodes["A"]
    [model] = origin.segments
    model.raises = raising([asked[2][0]], ValueError("what is this"))
    ring.run()
    [(job_id, node, _, failure)] = origin.failures
    assert (job_id, node) == (asked[2][0].job_id, "A")
    assert (failure.code, failure.message) == (LlmCode.ENGINE_ERROR, "ValueError: what is this")
    for n in (0, 1, 3):
        assert asked[n][1] == answer(prompt_of(n), 4, LAYERS)
    assert asked[2][1] == []
    assert origin.compute.jobs == 0


@pytest.mark.seed("000", "15.6")
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no more"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
        ),
    ],
)
def test_want_of_memory_is_told_as_such(error: Exception) -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    job, _ = ring.begin(ALONE, prompt_of(1), 4)
    ring.nodes["A"].segments[0].raises = raising([job], error)
    ring.run()
    assert ring.nodes["A"].failures[0][3].code is LlmCode.OUT_OF_MEMORY


def test_pass_that_is_too_large_for_all_is_computed_one_by_one() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    asked = [(ring.begin(ALONE, prompt_of(n), 3)[1], prompt_of(n)) for n in range(3)]
    ring.nodes["A"].segments[0].raises = lambda jobs: MemoryError() if len(jobs) > 1 else None
    ring.nodes["A"].ends.raises = lambda rows: MemoryError() if rows > 1 else None
    ring.run()
    assert all(told == answer(prompt, 3, LAYERS) for told, prompt in asked)
    assert ring.nodes["A"].failures == []


def test_failure_of_its_own_kind_is_told_as_it_is() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    job, _ = ring.begin(ALONE, prompt_of(1), 4)
    said = LlmFailure(LlmCode.CONTEXT_EXCEEDED, "too long")
    ring.nodes["A"].segments[0].raises = raising([job], said)
    ring.run()
    assert ring.nodes["A"].failures[0][3] is said


def test_head_that_fails_for_one_spares_the_others() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    asked = [(ring.begin(ALONE, prompt_of(n), 3)[1], prompt_of(n)) for n in range(3)]
    calls: list[int] = []

    def raises(rows: int) -> Exception | None:
        calls.append(rows)
        return ValueError("no head") if len(calls) in (1, 2) else None

    ring.nodes["A"].ends.raises = raises
    ring.run()
    assert asked[0][0] == []
    assert all(told == answer(prompt, 3, LAYERS) for told, prompt in asked[1:])
    assert calls[:4] == [3, 1, 1, 1]


def test_sampler_that_fails_ends_its_own_job_only() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    broken = Likeliest()
    broken.raises = lambda: LlmFailure(LlmCode.INVALID_SCHEMA, "nothing is allowed")
    ring.begin(ALONE, prompt_of(0), 3, sampler=broken)
    _, told = ring.begin(ALONE, prompt_of(1), 3)
    ring.run()
    assert [failure.code for *_, failure in ring.nodes["A"].failures] == [LlmCode.INVALID_SCHEMA]
    assert told == answer(prompt_of(1), 3, LAYERS)


def test_listener_that_raises_ends_its_own_job_only() -> None:
    def on_token(job: Job, token: int, logprobs: object) -> bool:
        raise OSError("the pipe is closed")

    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    ring.begin(ALONE, prompt_of(0), 3, on_token=on_token)
    _, told = ring.begin(ALONE, prompt_of(1), 3)
    ring.run()
    assert [failure.code for *_, failure in ring.nodes["A"].failures] == [LlmCode.ENGINE_ERROR]
    assert told == answer(prompt_of(1), 3, LAYERS)


def test_embedding_of_several_that_fails_is_left_to_each() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    ends = ring.nodes["A"].ends
    embed = ends.embed

    def fails(ids: Sequence[int], positions: Sequence[int]) -> object:
        if len(ids) == 2:
            raise MemoryError
        return embed(ids, positions)

    ends.embed = fails  # type: ignore[assignment, method-assign]
    asked = [(ring.begin(ALONE, prompt_of(n), 3)[1], prompt_of(n)) for n in range(2)]
    ring.run()
    assert all(told == answer(prompt, 3, LAYERS) for told, prompt in asked)


@pytest.mark.parametrize("rounds", range(5))
def test_cancelled_job_is_left_where_it_is_and_the_others_go_on(rounds: int) -> None:
    ring = Ring(LAYERS, {"A": [(0, 2)], "B": [(2, LAYERS)]}, prefill_chunk_size=2)
    job, told = ring.begin(SHARED, prompt_of(1, 9), 50)
    _, other = ring.begin(SHARED, prompt_of(2, 9), 3)
    for _ in range(rounds):
        for could in ring.choices():
            could()
    job.cancelled = "the client is gone"
    before = len(told)
    ring.run()
    assert len(told) == before
    assert other == answer(prompt_of(2, 9), 3, LAYERS)
    assert all(not node.failures for node in ring.nodes.values())
    assert all(node.compute.jobs == 0 for node in ring.nodes.values())
    completed = [event for event, _ in ring.nodes["A"].ends_told]
    assert completed.count(ProcessorEvent.JOB_COMPLETED) == 1


@pytest.mark.seed("000", "4.7")
def test_segment_that_is_unloaded_ends_the_job_with_that_reason() -> None:
    ring = Ring(LAYERS, {"A": [(0, 2)], "B": [(2, LAYERS)]})
    job, told = ring.begin(SHARED, prompt_of(1), 50)
    while len(told) < 2:
        ring.choices()[0]()
    _, pipe = ring.nodes["B"].jobs.find(job.job_id)
    assert pipe is not None
    pipe.release([5], "B no longer holds layers 5")
    ring.run()
    assert ring.nodes["B"].ends_told[-1] == (
        ProcessorEvent.NO_LOCAL_MODEL,
        "B no longer holds layers 5",
    )
    assert ring.nodes["B"].compute.jobs == 0
    assert not job.cancelled  # what the origin makes of it is its own affair
