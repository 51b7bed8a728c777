"""What arrives and is not right: refused, counted, and nothing else disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from tests.support.pipes.sums import HIDDEN, Ring, Stand, answer, rows

from penstock.lifecycles.processor import ProcessorEvent
from penstock.workloads.llm.values import LlmCode
from penstock.workloads.pipes.job import ComputeStep, Hop, Job
from penstock.workloads.pipes.network_job import NetworkJob, pack_steps

LAYERS = 6
WAY = (Hop("A", 0, 2), Hop("B", 2, 4), Hop("C", 4, 6))
HELD = {"A": [(0, 2)], "B": [(2, 4)], "C": [(4, 6)], "D": [(0, 6)]}
PROMPT = [5, 6, 7]


class Stopped(Ring):
    """A job that was sent to B and has not got there: what comes instead is up to the test."""

    def __init__(self) -> None:
        super().__init__(LAYERS, HELD)
        self.job, self.told = self.begin(WAY, PROMPT, 3)
        self.nodes["A"].compute.round()
        [self.true] = self.route["A", "B"]
        self.route["A", "B"].clear()

    def packet(self, **changes: Any) -> NetworkJob:
        """The one that B expects, but for some changes."""
        right = NetworkJob(
            job_id=self.job.job_id,
            pipe_id="pipe",
            origin_node_id="A",
            current_layer=2,
            compute_step=ComputeStep.LAYER,
            sequence=1,
            start=0,
            count=3,
            returns=1,
            data=rows([1, 2, 3]),
        )
        return msgspec.structs.replace(right, **changes)

    def give(self, to: str, packet: NetworkJob, sender: str = "A") -> Stand:
        node = self.nodes[to]
        node.receiver.receive(memoryview(bytearray(b"".join(pack_steps([packet])))), sender)
        node.compute.round()
        return node

    def goes_on(self) -> bool:
        """The job comes to its right end when its own packet comes."""
        self.true(self.nodes["B"])
        self.run()
        return self.told == answer(PROMPT, 3, LAYERS)


@pytest.fixture
def ring() -> Stopped:
    return Stopped()


@pytest.mark.parametrize(
    ("changes", "sender", "reason"),
    [
        ({"origin_node_id": "D"}, "A", "origin_mismatch"),
        ({"origin_node_id": "D"}, "D", "origin_mismatch"),
        ({"compute_step": ComputeStep.HEAD, "data": rows([1])}, "A", "origin_mismatch"),
        ({"pipe_id": "other"}, "A", "wrong_pipe"),
        ({"current_layer": 3}, "A", "wrong_layer"),
        ({"current_layer": 4}, "A", "wrong_layer"),
        ({"current_layer": 60}, "A", "wrong_layer"),
        ({"current_layer": 0}, "A", "wrong_layer"),
        ({}, "C", "wrong_sender"),
        ({}, "D", "wrong_sender"),
        ({}, "B", "wrong_sender"),
        ({}, "", "wrong_sender"),
        ({"sequence": 0}, "A", "repeated"),
    ],
)
def test_packet_that_is_not_the_jobs_own_is_refused_and_the_job_undisturbed(
    ring: Stopped, changes: dict[str, Any], sender: str, reason: str
) -> None:
    node = ring.give("B", ring.packet(**changes), sender)
    assert node.refused == {reason: 1}
    assert node.failures == []
    assert node.segments[0].passes == []
    assert ring.goes_on()


@pytest.mark.seed("000", "2.2", "14.1")
def test_unknown_job_is_refused_and_its_origin_told(ring: Stopped) -> None:
    node = ring.give("B", ring.packet(job_id=b"?" * 16, sequence=9))
    assert node.refused == {"unknown_job": 1}
    [(job_id, origin, sequence, failure)] = node.failures
    assert (job_id, origin, sequence) == (b"?" * 16, "A", 9)
    assert failure.code is LlmCode.JOB_MISSING
    assert ring.goes_on()


def test_packet_of_a_job_that_has_ended_is_passed_over(ring: Stopped) -> None:
    job = ring.nodes["B"].jobs.get(ring.job.job_id)
    assert job is not None
    job.cancelled = "the client is gone"
    node = ring.give("B", ring.packet())
    assert node.refused == {"job_has_ended": 1}
    assert (node.failures, node.segments[0].passes) == ([], [])


class Twice(Ring):
    """Whatever is sent arrives twice."""

    def carry(self, sender: str, to: str, act: Callable[[Stand], None]) -> None:
        super().carry(sender, to, act)
        super().carry(sender, to, act)


@pytest.mark.seed("000", "17.10")
@pytest.mark.parametrize("chunk", [1, 16])
def test_what_arrives_twice_is_harmless_at_every_node(chunk: int) -> None:
    ring = Twice(LAYERS, HELD, prefill_chunk_size=chunk)
    _, told = ring.begin(WAY, PROMPT, 3)
    ring.run()
    assert told == answer(PROMPT, 3, LAYERS)
    assert all(node.failures == [] for node in ring.nodes.values())
    refused = [reason for node in ring.nodes.values() for reason in node.refused.elements()]
    assert refused == ["repeated"] * ring.frames


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_hidden_states_that_are_no_numbers_end_the_job_and_name_the_sender(
    ring: Stopped, value: float
) -> None:
    data = rows([1, 2, 3])
    data[1, 2] = value
    node = ring.give("B", ring.packet(data=data))
    assert node.refused == {"not_finite": 1}
    [(job_id, origin, _, failure)] = node.failures
    assert (job_id, origin, failure.code) == (ring.job.job_id, "A", LlmCode.WRONG_COMPUTATION)
    assert failure.facts == {"node": "A"}
    assert node.segments[0].passes == []


@pytest.mark.seed("000", "15.6")
def test_node_that_computes_no_numbers_is_named_by_the_next(ring: Stopped) -> None:
    [model] = ring.nodes["B"].segments
    process = model._process

    def spoils(job: Job, end: int) -> None:
        process(job, end)
        assert job.data is not None
        job.data[0, 0] = float("nan")

    model._process = spoils
    ring.route["A", "B"].append(ring.true)
    ring.run()
    [(_, origin, _, failure)] = ring.nodes["C"].failures
    assert (origin, failure.code) == ("A", LlmCode.WRONG_COMPUTATION)
    assert failure.message == "B sent NaN or infinity, for layer 4"
    assert failure.facts["node"] == "B"
    assert ring.nodes["C"].segments[0].passes == []


@pytest.mark.seed("000", "17.10")
def test_gap_ends_the_job_with_that_reason(ring: Stopped) -> None:
    node = ring.give("B", ring.packet(start=7))
    assert node.refused == {"gap": 1}
    [(*_, failure)] = node.failures
    assert failure.code is LlmCode.ENGINE_ERROR
    assert failure.message == "A sent positions from 7, and 0 are here: a gap"


def test_more_positions_than_the_job_has_room_for_end_it(ring: Stopped) -> None:
    job = ring.nodes["B"].jobs.get(ring.job.job_id)
    assert job is not None
    assert job.cache is not None
    job.cache.capacity = 2
    node = ring.give("B", ring.packet())
    assert node.refused == {"no_room": 1}
    assert node.failures[0][3].code is LlmCode.CONTEXT_EXCEEDED


@pytest.mark.seed("000", "17.10")
def test_positions_that_were_there_are_written_over() -> None:
    """A step may begin before the end of what is filled: rollback is free."""
    ring = Stopped()
    assert ring.goes_on()
    node = ring.give("B", ring.packet(sequence=9, start=1, count=2, data=rows([2, 3])))
    assert not node.refused
    job = node.jobs.get(ring.job.job_id)
    assert job is not None
    assert job.cache is not None
    assert job.cache.filled[2] == 3


@pytest.mark.seed("000", "11.2")
def test_damaged_job_ends_and_the_others_of_its_frame_go_on(ring: Stopped) -> None:
    other, _ = ring.begin(WAY, PROMPT, 1)
    packets = [ring.packet(), ring.packet(job_id=other.job_id, data=rows([9, 9, 9]))]
    payload = bytearray(b"".join(pack_steps(packets)))
    first = len(payload) - 2 * 3 * HIDDEN * 4
    payload[first] ^= 1
    node = ring.nodes["B"]
    node.receiver.receive(memoryview(payload), "A")
    node.compute.round()
    assert node.refused == {"bad_hash": 1}
    [(job_id, origin, _, failure)] = node.failures
    assert (job_id, origin, failure.code) == (
        ring.job.job_id,
        "A",
        LlmCode.WRONG_COMPUTATION,
    )
    assert failure.facts == {"node": "A"}
    assert [len(jobs) for _, _, jobs, _ in node.segments[0].passes] == [1]


def test_damaged_packet_from_a_stranger_disturbs_nothing(ring: Stopped) -> None:
    payload = bytearray(b"".join(pack_steps([ring.packet()])))
    payload[-1] ^= 1
    node = ring.nodes["B"]
    node.receiver.receive(memoryview(payload), "D")
    node.compute.round()
    assert node.refused == {"bad_hash": 1}
    assert node.failures == []
    assert ring.goes_on()


@pytest.mark.seed("000", "11.1")
@pytest.mark.parametrize("cut", [0, 3, 7, 40, 90, 120])
def test_frame_that_is_cut_off_is_refused_whole(ring: Stopped, cut: int) -> None:
    payload = bytearray(b"".join(pack_steps([ring.packet()])))[:cut]
    node = ring.nodes["B"]
    node.receiver.receive(memoryview(payload), "A")
    node.compute.round()
    assert node.refused.total() == 1
    assert ring.goes_on()


def test_hidden_states_of_another_width_are_refused(ring: Stopped) -> None:
    node = ring.give("B", ring.packet(data=torch.zeros(3, HIDDEN + 1)))
    assert node.refused == {"bad_shape": 1}
    assert node.segments[0].passes == []


class TestAtTheOrigin:
    """What comes back has to be what was sent."""

    def back(self, ring: Stopped, **changes: Any) -> Stand:
        packet = ring.packet(
            compute_step=ComputeStep.HEAD, current_layer=LAYERS, data=rows([3]), **changes
        )
        return ring.give("A", packet, "C")

    def test_pass_that_was_never_sent_is_passed_over(self, ring: Stopped) -> None:
        node = self.back(ring, sequence=2)
        assert node.refused == {"not_under_way": 1}
        assert node.failures == []
        assert ring.goes_on()

    def test_pass_that_is_over_is_passed_over(self, ring: Stopped) -> None:
        assert ring.goes_on()
        node = self.back(ring, sequence=1)
        assert node.refused == {"repeated": 1}
        assert len(ring.told) == 3

    @pytest.mark.parametrize("changes", [{"start": 1}, {"count": 2}])
    def test_other_positions_than_were_sent_end_the_job(
        self, ring: Stopped, changes: dict[str, int]
    ) -> None:
        node = self.back(ring, **changes)
        assert node.refused == {"not_what_was_sent": 1}
        assert node.failures[0][3].code is LlmCode.WRONG_COMPUTATION
        assert node.failures[0][3].facts == {"node": "C"}
        assert ring.told == []

    def test_head_from_another_node_than_the_last_is_refused(self, ring: Stopped) -> None:
        packet = ring.packet(compute_step=ComputeStep.HEAD, data=rows([3]))
        assert ring.give("A", packet, "B").refused == {"wrong_sender": 1}
        assert ring.goes_on()


def test_job_without_text_comes_back_to_its_origin_as_it_is() -> None:
    """Nothing of it can be computed at the origin: the processor says so."""
    ring = Ring(LAYERS, HELD)
    origin = ring.nodes["A"]
    origin.segments.clear()
    job = origin.open(b"s" * 16, [Hop("A", 0, 2), Hop("B", 2, 3), Hop("A", 3, 6)])
    packet = NetworkJob(
        job_id=job.job_id,
        pipe_id="pipe",
        origin_node_id="A",
        current_layer=3,
        compute_step=ComputeStep.LAYER,
        sequence=1,
        start=0,
        count=2,
        returns=2,
        data=rows([4, 5]),
    )
    origin.receiver.receive(memoryview(bytearray(b"".join(pack_steps([packet])))), "B")
    origin.compute.round()
    assert [event for event, _ in origin.ends_told] == [ProcessorEvent.NO_LOCAL_MODEL]
    assert job.data is not None
    assert job.data[:, 0].tolist() == [4.0, 5.0]
