"""Every row of seed 000's transition tables, in the seed's order, through the real JobProcessor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from tests.support.pipes.sums import SumCache, SumEnds, SumModel, config_of, rows, text_of

from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.processor import ENDS, ERRORS, PROCESSOR, ProcessorEvent, ProcessorState
from penstock.workloads.pipes.end_model import EndModel
from penstock.workloads.pipes.job import ComputeStep, Hop, Job, JobContext, OriginText
from penstock.workloads.pipes.network_job import NetworkJob
from penstock.workloads.pipes.pipe import Pipe
from penstock.workloads.pipes.processor import Head, JobProcessor, Layers

S, E = ProcessorState, ProcessorEvent
LAYERS = 4
TESTED: set[tuple[ProcessorState, ProcessorEvent]] = set()

T = TypeVar("T", bound=Callable[..., None])


def row(before: ProcessorState, event: ProcessorEvent) -> Callable[[T], T]:
    """Says which row of the table a test is about."""
    TESTED.add((before, event))
    return lambda test: test


class Walk(JobProcessor):
    """Notes each move that the table was asked for."""

    def __init__(self, context: JobContext) -> None:
        self.moves: list[tuple[ProcessorState, ProcessorEvent]] = []
        super().__init__(context)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" and hasattr(self, "event"):
            self.moves.append((self.state, self.event))
        super().__setattr__(name, value)


class Out:
    """An outbox that keeps what leaves."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, NetworkJob]] = []
        self.landings: list[Job] = []

    def put(self, node_id: str, job: NetworkJob) -> None:
        self.sent.append((node_id, job))

    def land(self, job: Job) -> None:
        self.landings.append(job)


class Case:
    """A node with layers, by default all, and a job that begins or arrives at it."""

    def __init__(
        self,
        held: Sequence[tuple[int, int]] = ((0, LAYERS),),
        hops: Sequence[Hop] = (Hop("A", 0, LAYERS),),
        node_id: str = "A",
        text: OriginText | None = None,
        **options: Any,
    ) -> None:
        self.out, self.ends = Out(), SumEnds()
        self.segments = [SumModel(start, end, LAYERS) for start, end in held]
        self.told: list[int] = []
        if text is None and node_id == "A":
            text, self.told = text_of([1, 2, 3], 2)
        cache: Any = SumCache(LAYERS)
        self.job = Job(b"j" * 16, "pipe", "sums", "A", tuple(hops), cache=cache, text=text)
        pipe = Pipe("pipe", "sums", hops, LAYERS, node_id, self.segments, self.out)
        end = EndModel(self.ends, lambda words: [len(words)]) if node_id == "A" else None
        self.context = JobContext(config_of(node_id, **options), None, self.job, pipe, end)

    def arrive(self, layer: int, tokens: int = 1, returns: int = 1) -> Case:
        """At this layer (after the last: at the head), as from another node."""
        job = self.job
        is_head = layer == LAYERS
        job.compute_step = ComputeStep.HEAD if is_head else ComputeStep.LAYER
        job.current_layer, job.sequence, job.start = layer, 1, 0
        job.count, job.returns = tokens, returns
        job.data = rows(range(5, 5 + (returns if is_head else tokens)))
        return self

    def prefilled(self) -> Case:
        """All of its prompt was sent."""
        assert self.job.text is not None
        chunking = self.job.text.chunking
        chunking.total = chunking.sent = len(self.job.text.input_ids)
        return self

    def run(self) -> Walk:
        walk = Walk(self.context)
        walk.run()
        return walk


def moved(walk: Walk, before: ProcessorState, event: ProcessorEvent, after: ProcessorState) -> bool:
    """The row was taken, and is in the table."""
    return (before, event) in walk.moves and PROCESSOR.after(before, event) is after


def ended(walk: Walk, before: ProcessorState, event: ProcessorEvent) -> bool:
    return walk.state is S.DONE and walk.moves[-1] == (before, event)


TO_B = (Hop("A", 0, 2), Hop("B", 2, LAYERS))
FROM_B = (Hop("B", 0, LAYERS),)


class TestValidating:
    @pytest.mark.seed("000", "1.3", "2.2", "2.5", "8.2", "9.4")
    @row(S.VALIDATING, E.JOB_MISSING)
    def test_job_is_missing_then_done(self) -> None:
        case = Case()
        case.context.job = None
        walk = case.run()
        assert ended(walk, S.VALIDATING, E.JOB_MISSING)
        assert walk.reason == "the job is not known here"

    @pytest.mark.seed("000", "2.3", "2.6", "8.2", "9.5")
    @row(S.VALIDATING, E.PIPE_UNAVAILABLE)
    def test_pipe_is_unavailable_then_done(self) -> None:
        case = Case()
        case.context.pipe = None
        walk = case.run()
        assert ended(walk, S.VALIDATING, E.PIPE_UNAVAILABLE)
        assert walk.reason == "the job has no pipe"

    @pytest.mark.seed("000", "1.3", "2.3", "2.6", "16.2")
    def test_pipe_is_incomplete_then_done(self) -> None:
        walk = Case(hops=(Hop("A", 0, 2), Hop("B", 3, LAYERS))).run()
        assert ended(walk, S.VALIDATING, E.PIPE_UNAVAILABLE)
        assert walk.reason == "no node has layers 2-2: a hole before B"

    @pytest.mark.seed("000", "2.6")
    def test_pipe_that_lost_a_node_then_done(self) -> None:
        case = Case(hops=TO_B)
        assert case.context.pipe is not None
        case.context.pipe.unavailable = "B is gone"
        walk = case.run()
        assert ended(walk, S.VALIDATING, E.PIPE_UNAVAILABLE)
        assert walk.reason == "B is gone"

    @pytest.mark.seed("000", "2.4", "2.7", "5.2")
    @row(S.VALIDATING, E.ORIGIN_MISMATCH)
    def test_origin_node_mismatch_for_head_then_done(self) -> None:
        walk = Case(hops=FROM_B, node_id="B").arrive(LAYERS).run()
        assert ended(walk, S.VALIDATING, E.ORIGIN_MISMATCH)
        assert walk.reason == "B is not the job's origin"

    @pytest.mark.seed("000", "2.4", "2.8", "8.2", "9.6")
    @row(S.VALIDATING, E.END_MODEL_UNAVAILABLE)
    def test_end_model_unavailable_for_head_then_done(self) -> None:
        case = Case(hops=FROM_B).arrive(LAYERS)
        case.context.end_model = None
        walk = case.run()
        assert ended(walk, S.VALIDATING, E.END_MODEL_UNAVAILABLE)
        assert walk.reason == "A has no end model of sums"

    @pytest.mark.seed("000", "2.9", "8.3")
    @row(S.VALIDATING, E.PREFILL_COMPLETE)
    def test_at_head_and_prefill_is_complete_then_head(self) -> None:
        walk = Case(hops=FROM_B).prefilled().arrive(LAYERS).run()
        assert moved(walk, S.VALIDATING, E.PREFILL_COMPLETE, S.HEAD)

    @pytest.mark.seed("000", "2.10", "8.4")
    @row(S.VALIDATING, E.MORE_PREFILL_CHUNKS)
    def test_at_head_with_more_prefill_chunks_then_embed(self) -> None:
        walk = Case(prefill_chunk_size=2).run()
        again = (S.PROCESS_LAYERS, E.LAYERS_COMPLETE), (S.VALIDATING, E.MORE_PREFILL_CHUNKS)
        assert tuple(walk.moves[2:4]) == again
        assert PROCESSOR.after(*again[1]) is S.EMBED

    @pytest.mark.seed("000", "3.2", "15.2")
    def test_new_job_has_all_of_its_chunks_before_it_then_embed(self) -> None:
        walk = Case().run()
        assert walk.moves[0] == (S.VALIDATING, E.MORE_PREFILL_CHUNKS)
        assert walk.moves[1][0] is S.EMBED

    @pytest.mark.seed("000", "2.11", "8.5", "10.1")
    @row(S.VALIDATING, E.NEEDS_LAYERS)
    def test_needs_layer_processing_then_process_layers(self) -> None:
        walk = Case(held=[(2, 4)], hops=TO_B, node_id="B").arrive(2).run()
        assert moved(walk, S.VALIDATING, E.NEEDS_LAYERS, S.PROCESS_LAYERS)


class TestEmbed:
    @pytest.mark.seed("000", "3.9", "8.10")
    @row(S.EMBED, E.PREFILL_UPDATE_FAILED)
    def test_failed_to_send_prefill_update_then_done(self) -> None:
        text, _ = text_of([1, 2, 3], 1, on_progress=lambda *_: False)
        walk = Case(text=text).run()
        assert ended(walk, S.EMBED, E.PREFILL_UPDATE_FAILED)
        assert walk.reason == "the client disconnected"

    @pytest.mark.seed("000", "3.10", "8.10")
    @row(S.EMBED, E.NO_MODEL_FOR_NEXT_LAYER)
    def test_no_model_available_for_next_layer_then_done(self) -> None:
        walk = Case(held=[(2, 4)]).run()
        assert ended(walk, S.EMBED, E.NO_MODEL_FOR_NEXT_LAYER)
        assert walk.reason == "no node of the pipe holds layer 0"

    @pytest.mark.seed("000", "3.11", "6.5", "8.11")
    @row(S.EMBED, E.NEXT_LAYER_REMOTE)
    def test_next_layer_is_remote_then_send(self) -> None:
        case = Case(held=[], hops=FROM_B)
        walk = case.run()
        assert moved(walk, S.EMBED, E.NEXT_LAYER_REMOTE, S.SEND)
        assert [(node, job.current_layer) for node, job in case.out.sent] == [("B", 0)]

    @pytest.mark.seed("000", "3.12", "8.12")
    @row(S.EMBED, E.NEXT_LAYER_LOCAL)
    def test_next_layer_is_local_then_process_layers(self) -> None:
        assert moved(Case().run(), S.EMBED, E.NEXT_LAYER_LOCAL, S.PROCESS_LAYERS)


class TestProcessLayers:
    @pytest.mark.seed("000", "4.7", "8.13")
    @row(S.PROCESS_LAYERS, E.NO_LOCAL_MODEL)
    def test_no_local_model_available_then_done(self) -> None:
        walk = Case(held=[], hops=TO_B, node_id="B").arrive(2).run()
        assert ended(walk, S.PROCESS_LAYERS, E.NO_LOCAL_MODEL)
        assert walk.reason == "B does not hold layer 2"

    @pytest.mark.seed("000", "4.8", "6.4", "8.14")
    @row(S.PROCESS_LAYERS, E.NEXT_LAYER_REMOTE)
    def test_next_layer_segment_is_remote_then_send(self) -> None:
        case = Case(held=[(0, 2)], hops=TO_B)
        assert moved(case.run(), S.PROCESS_LAYERS, E.NEXT_LAYER_REMOTE, S.SEND)
        assert [(node, job.current_layer) for node, job in case.out.sent] == [("B", 2)]

    @pytest.mark.seed("000", "4.2", "4.9", "8.15")
    @row(S.PROCESS_LAYERS, E.NEXT_LAYER_LOCAL)
    def test_next_layer_segment_is_local_then_process_layers(self) -> None:
        case = Case(held=[(0, 1), (1, 4)])
        assert moved(case.run(), S.PROCESS_LAYERS, E.NEXT_LAYER_LOCAL, S.PROCESS_LAYERS)
        assert [segment.passes[0][:2] for segment in case.segments] == [(0, 1), (1, 4)]

    @pytest.mark.seed("000", "4.10", "8.16", "15.1", "16.4")
    @row(S.PROCESS_LAYERS, E.LAYERS_COMPLETE)
    def test_all_layers_complete_on_the_origin_then_a_new_look(self) -> None:
        walk = Case().run()
        assert moved(walk, S.PROCESS_LAYERS, E.LAYERS_COMPLETE, S.VALIDATING)
        after = walk.moves.index((S.PROCESS_LAYERS, E.LAYERS_COMPLETE)) + 1
        assert walk.moves[after] == (S.VALIDATING, E.PREFILL_COMPLETE)

    @pytest.mark.seed("000", "4.10", "6.3", "15.1")
    def test_all_layers_complete_elsewhere_then_send_to_the_origin(self) -> None:
        case = Case(held=[(2, 4)], hops=TO_B, node_id="B").arrive(2, tokens=3)
        assert moved(case.run(), S.PROCESS_LAYERS, E.NEXT_LAYER_REMOTE, S.SEND)
        [(node, job)] = case.out.sent
        assert job.data is not None
        assert (node, job.compute_step, job.data.shape[0]) == ("A", ComputeStep.HEAD, 1)


class TestHead:
    @pytest.mark.seed("000", "5.9", "7.2", "8.6")
    @row(S.HEAD, E.JOB_COMPLETED)
    def test_job_completed_then_done(self) -> None:
        told: list[Any]
        text, told = text_of([1, 2, 3], 9, is_complete=lambda job, token: len(told) == 2)
        walk = Case(text=text).run()
        assert ended(walk, S.HEAD, E.JOB_COMPLETED)
        assert len(told) == 2

    @pytest.mark.seed("000", "5.7", "15.9")
    def test_as_many_tokens_as_it_may_have_then_done(self) -> None:
        case = Case()
        assert ended(case.run(), S.HEAD, E.JOB_COMPLETED)
        assert len(case.told) == 2

    @pytest.mark.seed("000", "5.10", "8.6", "16.5")
    @row(S.HEAD, E.JOB_UPDATE_FAILED)
    def test_failed_to_send_job_update_then_done(self) -> None:
        text, _ = text_of([1, 2, 3], 9, on_token=lambda *_: False)
        walk = Case(text=text).run()
        assert ended(walk, S.HEAD, E.JOB_UPDATE_FAILED)
        assert walk.reason == "the client disconnected"

    @pytest.mark.seed("000", "15.8")
    def test_last_token_that_nobody_heard_is_a_completion(self) -> None:
        text, _ = text_of([1, 2, 3], 1, on_token=lambda *_: False)
        assert ended(Case(text=text).run(), S.HEAD, E.JOB_COMPLETED)

    @pytest.mark.seed("000", "5.11", "8.7")
    @row(S.HEAD, E.MORE_TOKENS_LOCAL)
    def test_more_tokens_and_its_own_to_embed_then_embed(self) -> None:
        assert moved(Case().run(), S.HEAD, E.MORE_TOKENS_LOCAL, S.EMBED)

    @pytest.mark.seed("000", "5.12", "8.8", "15.3", "16.3")
    @row(S.HEAD, E.MORE_TOKENS_REMOTE)
    def test_more_tokens_next_layer_is_remote_then_send(self) -> None:
        case = Case(held=[], hops=FROM_B).prefilled().arrive(LAYERS)
        walk = embedded_with_others(case)
        assert moved(walk, S.HEAD, E.MORE_TOKENS_REMOTE, S.SEND)
        assert [node for node, _ in case.out.sent] == ["B"]

    @pytest.mark.seed("000", "5.13", "8.9", "16.3")
    @row(S.HEAD, E.MORE_TOKENS_NEED_LAYERS)
    def test_more_tokens_next_layer_needs_processing_then_process_layers(self) -> None:
        walk = embedded_with_others(Case())
        assert moved(walk, S.HEAD, E.MORE_TOKENS_NEED_LAYERS, S.PROCESS_LAYERS)


class TestSend:
    @pytest.mark.seed("000", "6.6", "7.3", "8.17", "11.4", "12.2")
    @row(S.SEND, E.HANDOFF_COMPLETE)
    def test_handoff_complete_then_done(self) -> None:
        walk = Case(held=[(0, 2)], hops=TO_B).run()
        assert ended(walk, S.SEND, E.HANDOFF_COMPLETE)

    @pytest.mark.seed("000", "15.7")
    def test_chunk_that_returns_nothing_only_lands(self) -> None:
        case = Case(held=[(2, 4)], hops=TO_B, node_id="B").arrive(2, tokens=3, returns=0)
        assert ended(case.run(), S.SEND, E.HANDOFF_COMPLETE)
        assert (case.out.sent, case.out.landings) == ([], [case.job])


def embedded_with_others(case: Case) -> Walk:
    """As when several jobs are at their heads: their tokens are embedded in one go."""
    walk = Walk(case.context)
    end_model, job = case.context.end_model, case.job
    assert end_model is not None
    is_first = True
    for need in walk.steps():
        if isinstance(need, Layers):
            need.model.process_jobs([job], need.end)
            continue
        assert isinstance(need, Head)
        end_model.compute_norm([job])
        end_model.compute_head([job])
        end_model.choose(job)
        if is_first:
            job.begin_pass(8)
            end_model.compute_embed([job])
        is_first = False
    return walk


@pytest.mark.seed("000", "1.1", "8.18", "18.1")
def test_every_row_of_the_table_has_a_test_here() -> None:
    assert {(before, event) for before, event, _ in PROCESSOR} == TESTED


@pytest.mark.seed("000", "7.4", "12.3", "16.5")
@pytest.mark.parametrize("event", sorted(ERRORS))
def test_error_that_led_to_done_is_a_failed_job_with_its_name(event: ProcessorEvent) -> None:
    end = ENDS[event]
    assert (end.state, end.error_code) == (JobState.FAILED, event.name)


@pytest.mark.seed("000", "1.5")
def test_completion_is_a_success_and_a_handoff_is_no_end() -> None:
    assert ENDS[E.JOB_COMPLETED].state is JobState.SUCCEEDED
    assert E.HANDOFF_COMPLETE not in ENDS
