"""What is measured of a job and of a node."""

from __future__ import annotations

import logging

import pytest
from tests.support.pipes.sums import Ring

from penstock.workloads.pipes.job import WINDOW, Hop, JobTime, JobTiming, NodeTiming, PassTime

LAYERS = 6
WAY = (Hop("A", 0, 2), Hop("B", 2, 4), Hop("C", 4, 6))
HELD = {"A": [(0, 2)], "B": [(2, 4)], "C": [(4, 6)]}


@pytest.mark.seed("000", "17.16")
def test_network_is_what_is_left_of_a_round_shared_by_its_legs() -> None:
    timing = JobTiming()
    times = (
        JobTime("A", 0, 2, 1000, 500, embed_us=70),
        JobTime("B", 2, 4, 2000, 300),
        JobTime("C", 4, 6, 3000, 700),
    )
    timing.passed(times, away=0.009, origin="A", tokens=5)
    ends, first, second, third = timing.hops()
    # Nine milliseconds away, six of them at B and C: three legs of one each.
    assert [hop.network_ms for hop in (ends, first, second, third)] == [1.0, 0.0, 1.0, 1.0]
    assert (second.node, second.layers) == ("B", "2-3")
    assert (second.compute_ms, second.queue_ms) == (2.0, 0.3)
    assert (second.passes, second.tokens) == (1, 5)
    assert (ends.node, ends.layers, ends.compute_ms) == ("A", "ends", 0.07)


def test_round_that_is_shorter_than_what_nodes_say_has_no_network_in_it() -> None:
    timing = JobTiming()
    timing.passed((JobTime("B", 0, 6, 9000, 0),), away=0.001, origin="A", tokens=1)
    assert [hop.network_ms for hop in timing.hops()] == [0.0, 0.0]


def test_job_that_never_leaves_has_no_network() -> None:
    timing = JobTiming()
    timing.passed((JobTime("A", 0, 6, 9000, 100),), away=0.0, origin="A", tokens=1)
    [hop] = timing.hops()
    assert (hop.compute_ms, hop.queue_ms, hop.network_ms) == (9.0, 0.1, 0.0)


def test_passes_of_a_hop_add_up() -> None:
    timing = JobTiming()
    for tokens in (16, 1, 1):
        timing.passed((JobTime("A", 0, 6, 1000, 10),), 0.0, "A", tokens)
    [hop] = timing.hops()
    assert (hop.compute_ms, hop.passes, hop.tokens) == (3.0, 3, 18)


def test_decoding_is_counted_from_the_first_token_on() -> None:
    timing = JobTiming(began=10.0, first=12.0, last=14.0, tokens=9)
    assert timing.prefill_ms == 2000
    assert timing.tokens_per_s == 4.0


def test_job_without_a_second_token_has_no_rate() -> None:
    assert JobTiming().tokens_per_s == 0.0
    assert JobTiming().prefill_ms == 0.0
    assert JobTiming(began=1.0, first=2.0, last=2.0, tokens=1).tokens_per_s == 0.0


def test_pass_waits_until_it_is_computed_and_after_that_again() -> None:
    took = PassTime(ready=1.0)
    took.computed(began=1.5, ended=2.0, together=3)
    took.computed(began=2.25, ended=2.5, together=1)
    assert (took.queue, took.compute, took.together) == (0.75, 0.75, 3)


@pytest.mark.seed("000", "5.6")
def test_each_node_of_the_way_is_in_a_jobs_times() -> None:
    ring = Ring(LAYERS, HELD, prefill_chunk_size=2)
    job, _ = ring.begin(WAY, [1, 2, 3, 4, 5], 4)
    ring.run()
    assert job.text is not None
    timing = job.text.timing
    assert [(hop.node, hop.layers) for hop in timing.hops()] == [
        ("A", "ends"),
        ("A", "0-1"),
        ("B", "2-3"),
        ("C", "4-5"),
    ]
    # Three chunks of the prompt, then three tokens more; the head once for each token.
    assert [hop.passes for hop in timing.hops()] == [4, 6, 6, 6]
    assert [hop.tokens for hop in timing.hops()] == [4, 8, 8, 8]
    assert (timing.prefill_tokens, timing.tokens) == (5, 4)
    assert timing.prefill_ms > 0
    assert timing.tokens_per_s > 0


def test_jobs_that_are_computed_together_say_so() -> None:
    ring = Ring(LAYERS, HELD)
    for _ in range(3):
        ring.begin(WAY, [1, 2], 1)
    ring.run()
    ends = [job.times for job in ring.nodes["C"].jobs.all()]
    assert [[time.together for time in times] for times in ends] == [[3, 3, 3]] * 3


@pytest.mark.seed("000", "13.3")
@pytest.mark.parametrize("is_on", [True, False])
def test_times_are_logged_if_that_is_set(is_on: bool, caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring(LAYERS, HELD, print_times=is_on)
    with caplog.at_level(logging.INFO, logger="penstock"):
        ring.begin(WAY, [1, 2, 3], 2)
        ring.run()
    assert ("prefill 3 tokens in" in caplog.text) == is_on
    assert ("compute ms" in caplog.text) == is_on


@pytest.mark.seed("000", "5.3", "9.3")
def test_end_of_prefill_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring(LAYERS, HELD, prefill_chunk_size=1)
    with caplog.at_level(logging.DEBUG, logger="penstock"):
        ring.begin(WAY, [1, 2, 3], 4)
        ring.run()
    assert caplog.text.count("prefill is over after") == 1


@pytest.mark.seed("000", "4.6")
def test_job_was_updated_when_it_was_last_computed() -> None:
    ring = Ring(LAYERS, HELD)
    job, _ = ring.begin(WAY, [1, 2, 3], 2)
    jobs = [job, *(ring.nodes[node].jobs.all()[0] for node in "BC")]
    for one in jobs:
        one.last_update = 0.0
    ring.run()
    assert all(one.last_update > 0 for one in jobs)


class TestNodeTiming:
    def test_rates_are_of_the_last_seconds(self) -> None:
        timing = NodeTiming(now=0.0)
        for second in range(30):
            timing.add(tokens=50, busy=0.25, now=second + 0.5)
        tokens, busy = timing.rates(30.0)
        assert tokens == 50.0
        assert busy == 0.25
        assert (timing.tokens, timing.passes) == (1500, 30)

    def test_rates_fall_to_nothing_when_nothing_is_done(self) -> None:
        timing = NodeTiming(now=0.0)
        timing.add(100, 1.0, 1.0)
        assert timing.rates(5.0)[0] == 20.0
        assert timing.rates(2.0 + WINDOW + 1) == (0.0, 0.0)

    def test_young_node_is_measured_over_its_own_life(self) -> None:
        timing = NodeTiming(now=100.0)
        timing.add(10, 0.5, 100.9)
        assert timing.rates(101.0) == (10.0, 0.5)

    def test_nobody_is_busy_for_more_than_all_of_the_time(self) -> None:
        timing = NodeTiming(now=0.0)
        timing.add(1, 60.0, 60.0)
        assert timing.rates(60.5)[1] == 1.0
