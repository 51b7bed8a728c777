"""However a model is cut and whatever comes first, jobs say what the unsplit model says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.pipes.sums import Ring, answer
from tests.workloads.pipes.processor.test_transitions import LAYERS, Case

from penstock.lifecycles.processor import ENDS, ERRORS, PROCESSOR, ProcessorEvent, ProcessorState
from penstock.workloads.pipes.job import Hop
from penstock.workloads.pipes.processor import JobProcessor

EVERYTHING = {node: [(0, LAYERS)] for node in "ABCDE"}
PROMPT = list(range(3, 24))


@st.composite
def routes(draw: st.DrawFn) -> tuple[Hop, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1))))
    bounds = [0, *cuts, LAYERS]
    return tuple(Hop(draw(st.sampled_from("ABC")), start, end) for start, end in pairwise(bounds))


@pytest.mark.seed("000", "1.4", "4.2")
@pytest.mark.parametrize("nodes", ["A", "AB", "ABC", "BCDE", "BA", "ABA", "BAB"])
@pytest.mark.parametrize("chunk", [1, 4, 21, 256])
def test_answer_is_the_unsplit_models_over_any_nodes_in_any_chunks(nodes: str, chunk: int) -> None:
    step = LAYERS // len(nodes) if len(nodes) <= LAYERS else 1
    bounds = [*range(0, step * len(nodes), step), LAYERS]
    hops = [Hop(node, a, b) for node, (a, b) in zip(nodes, pairwise(bounds), strict=True)]
    ring = Ring(LAYERS, EVERYTHING, prefill_chunk_size=chunk)
    _, told = ring.begin(hops, PROMPT, 6)
    ring.run()
    assert told == answer(PROMPT, 6, LAYERS)
    assert ring.nodes["A"].ends_told[-1] == (ProcessorEvent.JOB_COMPLETED, "")
    assert all(not node.failures and not node.refused for node in ring.nodes.values())


@given(
    jobs=st.lists(
        st.tuples(routes(), st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=5
    ),
    chunk=st.integers(1, 16),
    pass_tokens=st.integers(1, 40),
    cut=st.integers(0, LAYERS),
    data=st.data(),
)
def test_jobs_of_all_ways_together_each_say_what_they_say_alone(
    jobs: list[tuple[tuple[Hop, ...], int, int]],
    chunk: int,
    pass_tokens: int,
    cut: int,
    data: st.DataObject,
) -> None:
    held = [(a, b) for a, b in ((0, cut), (cut, LAYERS)) if a < b]
    ring = Ring(
        LAYERS, dict.fromkeys("ABC", held), prefill_chunk_size=chunk, pass_tokens=pass_tokens
    )
    asked = []
    for number, (hops, length, count) in enumerate(jobs):
        prompt = [7 * number + at for at in range(length)]
        asked.append((*ring.begin(hops, prompt, count), prompt, count))
    # Which node is next, and what is on its way longest, is for chance to say.
    seed = data.draw(st.randoms(use_true_random=False))
    ring.run(lambda could: seed.randrange(could))
    for job, told, prompt, count in asked:
        assert told == answer(prompt, count, LAYERS)
        assert job.text is not None
        assert not job.text.under_way
        assert job.text.chunking.acked == len(prompt)
    for node in ring.nodes.values():
        assert not node.failures
        assert not node.refused
        assert node.compute.jobs == 0


@given(
    routes=st.lists(routes(), min_size=2, max_size=5),
    fate=st.lists(st.sampled_from(["well", "cancelled", "fails"]), min_size=5, max_size=5),
    chunk=st.integers(1, 8),
    data=st.data(),
)
def test_jobs_that_fail_or_are_cancelled_at_any_time_leave_the_others_as_they_are(
    routes: list[tuple[Hop, ...]], fate: list[str], chunk: int, data: st.DataObject
) -> None:
    ring = Ring(LAYERS, {key: [(0, LAYERS)] for key in "ABC"}, prefill_chunk_size=chunk)
    asked = [ring.begin(hops, [number, 5, 6, 7, 8], 4) for number, hops in enumerate(routes)]
    bad = {job.job_id for (job, _), end in zip(asked, fate, strict=False) if end == "fails"}
    for node in ring.nodes.values():
        node.segments[0].raises = lambda jobs: (
            ValueError("bad") if any(job.job_id in bad for job in jobs) else None
        )
    seed = data.draw(st.randoms(use_true_random=False))
    going = [job for (job, _), end in zip(asked, fate, strict=False) if end == "cancelled"]

    def pick(could: int) -> int:
        if going and seed.random() < 0.2:
            going.pop().cancelled = "not wanted any more"
        return seed.randrange(could)

    ring.run(pick)
    completed = [event for event, _ in ring.nodes["A"].ends_told].count(
        ProcessorEvent.JOB_COMPLETED
    )
    failed = [job_id for node in ring.nodes.values() for job_id, *_ in node.failures]
    assert sorted(failed) == sorted(bad)
    wanted = [
        end != "fails" and not job.cancelled for (job, _), end in zip(asked, fate, strict=False)
    ]
    assert completed >= sum(wanted)
    for number, ((_, told), is_wanted) in enumerate(zip(asked, wanted, strict=True)):
        right = answer([number, 5, 6, 7, 8], 4, LAYERS)
        assert told == (right if is_wanted else right[: len(told)])
    assert all(node.compute.jobs == 0 for node in ring.nodes.values())


@pytest.mark.seed("000", "7.1")
@given(
    step=st.integers(0, LAYERS),
    held=st.sets(st.sampled_from([(0, 1), (1, 3), (3, LAYERS), (0, LAYERS)])),
    hops=routes(),
    node_id=st.sampled_from("AB"),
    has_job=st.booleans(),
    has_end_model=st.booleans(),
    is_lost=st.booleans(),
    is_heard=st.booleans(),
)
def test_every_run_ends_in_done_with_an_event_that_says_what_became_of_the_job(
    step: int,
    held: set[tuple[int, int]],
    hops: tuple[Hop, ...],
    node_id: str,
    has_job: bool,
    has_end_model: bool,
    is_lost: bool,
    is_heard: bool,
) -> None:
    case = Case(held=sorted(held), hops=hops, node_id=node_id).arrive(step)
    if case.job.text is not None:
        case.prefilled()
        case.job.text.on_token = lambda *_: is_heard
        case.job.text.max_tokens = 3
    case.job.start = 2  # the last of its prompt, which has been in other layers already
    case.job.cache.filled.update(dict.fromkeys(range(LAYERS), 3))  # type: ignore[union-attr]
    if not has_job:
        case.context.job = None
    if not has_end_model:
        case.context.end_model = None
    if is_lost:
        assert case.context.pipe is not None
        case.context.pipe.unavailable = "a node is gone"
    processor = JobProcessor(case.context)
    event = processor.run()
    assert processor.state is ProcessorState.DONE
    assert event is not None
    assert event in ENDS or event is ProcessorEvent.HANDOFF_COMPLETE
    assert bool(processor.reason) == (event in ERRORS)
    assert PROCESSOR.is_final(processor.state)
    if event is ProcessorEvent.HANDOFF_COMPLETE:
        assert case.out.sent or case.out.landings


@pytest.mark.seed("000", "15.4")
@pytest.mark.parametrize("turn", range(4))
def test_pass_of_a_cancelled_job_is_abandoned_between_two_states(turn: int) -> None:
    case = Case(held=[(0, 1), (1, 2), (2, 3), (3, 4)])
    processor = JobProcessor(case.context)
    for number, need in enumerate(processor.steps()):
        need.model.process_jobs([case.job], need.end)  # type: ignore[union-attr]
        if number == turn:
            case.job.cancelled = "the client is gone"
    assert processor.state is not ProcessorState.DONE
    assert processor.reason == "the client is gone"
    assert sum(len(segment.passes) for segment in case.segments) == turn + 1
    assert case.told == []


def test_job_that_is_cancelled_before_it_begins_computes_nothing() -> None:
    case = Case()
    case.job.cancelled = "too late"
    assert JobProcessor(case.context).run() is None
    assert case.segments[0].passes == []
