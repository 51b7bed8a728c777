"""A way over nodes, as one of them sees it; and the jobs that a node has open."""

from __future__ import annotations

import pytest
from tests.support.pipes.sums import SumModel
from tests.workloads.pipes.processor.test_transitions import Out

from penstock.workloads.pipes.job import ComputeStep, Hop, Job, JobTable
from penstock.workloads.pipes.pipe import Pipe

LAYERS = 6
WAY = (Hop("A", 0, 2), Hop("B", 2, 4), Hop("A", 4, 6))


def pipe_of(*hops: Hop, node_id: str = "A", held: tuple[tuple[int, int], ...] = ()) -> Pipe:
    segments = [SumModel(start, end, LAYERS) for start, end in held]
    return Pipe("pipe", "sums", hops or WAY, LAYERS, node_id, segments, Out())  # type: ignore[arg-type]


@pytest.mark.seed("000", "2.3")
@pytest.mark.parametrize(
    ("hops", "is_complete"),
    [
        (WAY, True),
        ((Hop("A", 0, 6),), True),
        ((Hop("A", 0, 2), Hop("B", 3, 6)), False),
        ((Hop("A", 1, 6),), False),
        ((Hop("A", 0, 4),), False),
        ((Hop("A", 0, 4), Hop("B", 2, 6)), False),
        ((Hop("A", 0, 4), Hop("B", 4, 4), Hop("B", 4, 6)), False),
        ((Hop("A", 0, 9),), False),
        ((Hop("B", 2, 6), Hop("A", 0, 2)), False),
        ((), False),
    ],
)
def test_pipe_is_complete_if_its_hops_are_a_way_over_all_layers(
    hops: tuple[Hop, ...], is_complete: bool
) -> None:
    pipe = Pipe("pipe", "sums", hops, LAYERS, "A", [], Out())
    assert pipe.is_complete == is_complete
    assert bool(pipe.unavailable) != is_complete


@pytest.mark.seed("000", "1.4", "4.4")
def test_local_is_what_the_way_has_here_and_a_segment_holds() -> None:
    pipe = pipe_of(held=((0, 1), (1, 4)))
    found = [pipe.local(layer) for layer in range(LAYERS)]
    assert [str(one[0].layers) if one else None for one in found] == [
        "0-0",
        "1-3",
        None,  # on B, though held here, too
        None,
        None,  # here, and not loaded
        None,
    ]


@pytest.mark.seed("000", "4.3")
def test_segment_goes_no_further_than_the_hop() -> None:
    pipe = pipe_of(held=((0, 1), (1, 6)))
    found = pipe.local(0), pipe.local(1)
    assert [one and one[1] for one in found] == [1, 2]


@pytest.mark.seed("000", "6.1", "6.4")
def test_job_goes_to_who_has_the_next_layer_and_for_the_head_to_its_origin() -> None:
    pipe = pipe_of(node_id="B")
    job = Job(b"j" * 16, "pipe", "sums", "O", WAY, ComputeStep.LAYER, current_layer=4)
    assert pipe.destination(job) == "A"
    job.compute_step, job.current_layer = ComputeStep.HEAD, LAYERS
    assert pipe.destination(job) == "O"


def test_who_hands_over_is_who_has_the_layer_before_and_at_first_the_origin() -> None:
    pipe = pipe_of()
    assert [pipe.before(layer, "O") for layer in (0, 2, 4, LAYERS)] == ["O", "A", "B", "A"]


@pytest.mark.parametrize(
    ("hops", "window"),
    [
        ((Hop("A", 0, 6),), 1),
        (WAY, 2),
        ((Hop("B", 0, 3), Hop("C", 3, 6)), 3),
    ],
)
def test_window_is_the_hops_elsewhere_and_one_more(hops: tuple[Hop, ...], window: int) -> None:
    assert pipe_of(*hops).window == window


class TestJobTable:
    def job(self, number: int, origin: str = "A") -> Job:
        return Job(bytes([number]) * 16, "pipe", "sums", origin)

    @pytest.mark.seed("000", "17.13")
    def test_job_is_found_with_its_pipe_until_it_is_removed(self) -> None:
        table, job, pipe = JobTable(), self.job(1), pipe_of()
        table.add(job, pipe)
        assert table.get(job.job_id) is job
        assert table.find(job.job_id) == (job, pipe)
        assert job.job_id in table
        assert table.remove(job.job_id) is job
        assert table.remove(job.job_id) is None
        assert table.find(job.job_id) == (None, None)
        assert len(table) == 0

    def test_id_is_given_once(self) -> None:
        table = JobTable()
        table.add(self.job(1), pipe_of())
        with pytest.raises(KeyError):
            table.add(self.job(1), pipe_of())

    def test_jobs_of_an_origin(self) -> None:
        table = JobTable()
        for number, origin in enumerate("ABA"):
            table.add(self.job(number, origin), pipe_of())
        assert [job.job_id[0] for job in table.of_origin("A")] == [0, 2]
        assert len(table.all()) == 3
