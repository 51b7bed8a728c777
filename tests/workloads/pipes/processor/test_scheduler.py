"""The thread: it blocks when there is nothing, survives what is told to others, and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.support.pipes.sums import Ring, Stand, answer, config_of

from penstock.lifecycles.processor import ProcessorEvent
from penstock.workloads.llm.values import LlmCode
from penstock.workloads.pipes.job import Hop, Job, JobTime
from penstock.workloads.pipes.scheduler import PassScheduler

LAYERS = 4
WAY = (Hop("A", 0, 2), Hop("B", 2, LAYERS))
WAIT = 20


class Threads(Ring):
    """Each node computes in a thread of its own; what they send arrives at once."""

    def __init__(self, layers: int, held: dict[str, Sequence[tuple[int, int]]], **options: Any):
        super().__init__(layers, held, **options)
        self.over = threading.Semaphore(0)
        for node in self.nodes.values():
            node.done = self.done_at(node.done)  # type: ignore[method-assign]
            node.compute.start()

    def carry(self, sender: str, to: str, act: Callable[[Stand], None]) -> None:
        act(self.nodes[to])

    def done_at(self, done: Callable[..., None]) -> Callable[..., None]:
        def told(job: Job, event: ProcessorEvent, reason: str) -> None:
            done(job, event, reason)
            if event is not ProcessorEvent.HANDOFF_COMPLETE:
                self.over.release()

        return told

    def stop(self) -> None:
        for node in self.nodes.values():
            assert node.compute.stop(WAIT)


def test_jobs_over_two_threads_say_what_the_unsplit_model_says() -> None:
    ring = Threads(LAYERS, {"A": [(0, 2)], "B": [(2, LAYERS)]}, prefill_chunk_size=3)
    prompts = [[n, n + 1, n + 2, 9, 8, 7, 6] for n in range(12)]
    asked = [ring.begin(WAY, prompt, 20)[1] for prompt in prompts]
    try:
        for _ in asked:
            assert ring.over.acquire(timeout=WAIT)
        assert asked == [answer(prompt, 20, LAYERS) for prompt in prompts]
    finally:
        ring.stop()
    assert all(node.compute.is_idle for node in ring.nodes.values())


class Silent:
    """Notes nothing, and raises whatever it is told."""

    def send(self, *_: object) -> None: ...
    def acked(self, *_: object) -> None: ...
    def done(self, *_: object) -> None: ...
    def failed(self, *_: object) -> None: ...


@pytest.fixture
def compute() -> Any:
    made = PassScheduler(Silent(), config_of(), threads=1)
    made.start()
    yield made
    assert made.stop(WAIT)


def settled(compute: PassScheduler) -> bool:
    """All that was asked for before is done."""
    reached = threading.Event()
    compute.submit(reached.set)
    return reached.wait(WAIT)


def test_acts_are_done_in_the_order_of_the_calls(compute: PassScheduler) -> None:
    done: list[int] = []
    for number in range(50):
        compute.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert settled(compute)
    assert done == list(range(50))


def test_act_that_raises_does_not_end_the_thread(
    compute: PassScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    compute.submit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert settled(compute)
    assert "something went wrong beside the computation" in caplog.text


@pytest.mark.seed("000", "17.3")
def test_thread_blocks_while_there_is_nothing_to_do() -> None:
    compute = PassScheduler(Silent(), config_of())
    waits, wait = threading.Semaphore(0), compute._news.wait

    def waiting(timeout: float | None = None) -> bool:
        assert timeout is None
        waits.release()
        return wait()

    compute._news.wait = waiting  # type: ignore[method-assign]
    compute.start()
    assert waits.acquire(timeout=WAIT)
    assert settled(compute)
    assert waits.acquire(timeout=WAIT)
    assert compute.timing.passes == 1  # one round for the one thing that was asked
    assert compute.stop(WAIT)


def test_thread_says_since_when_it_is_at_its_round(compute: PassScheduler) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def block() -> None:
        reached.set()
        go_on.wait(WAIT)

    compute.submit(block)
    assert reached.wait(WAIT)
    since = compute.busy_since
    go_on.set()
    assert since is not None


def test_thread_computes_without_gradients_and_with_the_threads_it_was_given(
    compute: PassScheduler,
) -> None:
    found: list[object] = []
    compute.submit(
        lambda: found.extend([torch.is_inference_mode_enabled(), torch.get_num_threads()])
    )
    assert settled(compute)
    assert found == [True, 1]


def test_what_is_asked_for_after_the_end_is_done_at_once() -> None:
    compute = PassScheduler(Silent(), config_of())
    compute.start()
    assert compute.stop(WAIT)
    done: list[int] = []
    compute.submit(lambda: done.append(1))
    assert done == [1]


def test_what_was_asked_for_before_the_end_is_done_too() -> None:
    compute = PassScheduler(Silent(), config_of())
    reached, go_on = threading.Event(), threading.Event()

    def block() -> None:
        reached.set()
        go_on.wait(WAIT)

    done: list[int] = []
    compute.start()
    compute.submit(block)
    assert reached.wait(WAIT)
    compute.submit(lambda: done.append(1))
    assert not compute.stop(0)
    go_on.set()
    assert compute.stop(WAIT)
    assert done == [1]


def test_thread_that_never_began_can_be_stopped() -> None:
    compute = PassScheduler(Silent(), config_of())
    done: list[int] = []
    compute.submit(lambda: done.append(1))
    assert compute.stop(WAIT)
    assert done == [1]


def test_node_that_raises_when_told_does_not_disturb_the_computation() -> None:
    ring = Ring(LAYERS, {"A": [(0, LAYERS)]})
    origin = ring.nodes["A"]

    def raises(*_: object) -> None:
        raise OSError("nobody there")

    origin.done = raises  # type: ignore[assignment, method-assign]
    _, told = ring.begin((Hop("A", 0, LAYERS),), [1, 2, 3], 2)
    ring.run()
    assert told == answer([1, 2, 3], 2, LAYERS)


def test_step_that_can_not_be_sent_is_told_to_its_origin() -> None:
    ring = Ring(LAYERS, {"A": [(0, 2)], "B": [(2, LAYERS)]})
    origin = ring.nodes["A"]

    def raises(*_: object) -> None:
        raise ValueError("too large for a frame")

    origin.send = raises  # type: ignore[assignment, method-assign]
    job, _ = ring.begin(WAY, [1, 2, 3], 2)
    ring.run()
    [(job_id, node, sequence, failure)] = origin.failures
    assert (job_id, node, sequence) == (job.job_id, "A", 1)
    assert (failure.code, failure.message) == (
        LlmCode.ENGINE_ERROR,
        "ValueError: too large for a frame",
    )


def test_error_in_the_books_themselves_ends_the_jobs_and_new_ones_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    route = (Hop("A", 0, LAYERS),)
    ring = Threads(LAYERS, {"A": [(0, LAYERS)]})
    origin = ring.nodes["A"]
    failed = threading.Event()
    tell = origin.failed

    def told_failed(*what: Any) -> None:
        tell(*what)
        failed.set()

    origin.failed = told_failed  # type: ignore[assignment, method-assign]
    origin.compute._listener = origin
    choose = origin.compute._choose
    broken = iter([True])

    def chooses() -> Any:
        if next(broken, False):
            raise AssertionError("lost count")
        return choose()

    monkeypatch.setattr(origin.compute, "_choose", chooses)
    try:
        ring.begin(route, [1, 2, 3], 2)
        assert failed.wait(WAIT)
        assert [failure.code for *_, failure in origin.failures] == [LlmCode.ENGINE_ERROR]
        _, told = ring.begin(route, [4, 5, 6], 2)
        assert ring.over.acquire(timeout=WAIT)
        assert told == answer([4, 5, 6], 2, LAYERS)
    finally:
        ring.stop()


def test_landing_of_a_job_that_has_ended_or_was_never_ours_is_passed_over() -> None:
    ring = Ring(LAYERS, {"A": [(0, 2)], "B": [(2, LAYERS)]})
    origin = ring.nodes["A"]
    times = (JobTime("B", 2, 4, 1, 1),)
    origin.compute.acked(origin.receiver.context(b"?" * 16), 1, times)
    job, _ = ring.begin(WAY, [1, 2, 3], 1)
    ring.run()
    job.cancelled = "over"
    origin.compute.acked(origin.receiver.context(job.job_id), 1, times)
    ring.run()
    assert origin.compute.is_idle
