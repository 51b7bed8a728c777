"""What holds for all five lifecycles, and the exact moves of each seed.

The moves are written out here a second time, in the seeds' own words and by hand, so
that no change of a table goes unnoticed.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import IllegalMove
from penstock.core.machine import StateMachine, Step
from penstock.lifecycles import container, pipeline, processor, spool
from penstock.lifecycles.batch import BATCH, BatchEvent
from penstock.lifecycles.canonical import ACTORS, CANONICAL, HELD, WAITING, JobEvent, JobState, Role
from penstock.lifecycles.container import CONTAINER, ContainerJobEvent, ContainerJobState
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobEvent, PipelineJobStatus
from penstock.lifecycles.processor import PROCESSOR, ProcessorEvent
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status

Machine = StateMachine[Any, Any]

EVENTS: dict[Machine, tuple[Any, ...]] = {
    CANONICAL: tuple(JobEvent),
    PIPELINE: tuple(PipelineJobEvent),
    CONTAINER: tuple(ContainerJobEvent),
    SPOOL: tuple(SpoolEvent),
    PROCESSOR: tuple(ProcessorEvent),
    BATCH: tuple(BatchEvent),
}

every_lifecycle = pytest.mark.parametrize("machine", EVENTS, ids=lambda machine: machine.name)


def parse(moves: str) -> set[tuple[str, str, str]]:
    """Read lines of `BEFORE -> AFTER : event`."""
    lines = [line.split() for line in moves.strip().splitlines()]
    return {(before, event, after) for before, _, after, _, event in lines}


LEGAL = {
    CANONICAL: """
        [*] -> PENDING : accept
        PENDING -> SCHEDULED : schedule
        SCHEDULED -> DISPATCHED : dispatch
        DISPATCHED -> RUNNING : start
        RUNNING -> SUCCEEDED : succeed
        RUNNING -> FAILED : fail
        RUNNING -> TIMEOUT : expire
        DISPATCHED -> TIMEOUT : expire
        SCHEDULED -> DENIED : deny
        PENDING -> CANCELLED : cancel
        SCHEDULED -> CANCELLED : cancel
        DISPATCHED -> CANCELLED : cancel
        RUNNING -> CANCELLED : cancel
        SCHEDULED -> SCHEDULED : park
        SCHEDULED -> SCHEDULED : approve
        DISPATCHED -> DISPATCHED : redispatch
        RUNNING -> RUNNING : redispatch
        DISPATCHED -> DISPATCHED : request_cancel
        RUNNING -> RUNNING : request_cancel
        PENDING -> PENDING : note
        SCHEDULED -> SCHEDULED : note
        DISPATCHED -> DISPATCHED : note
        RUNNING -> RUNNING : note
        SUCCEEDED -> SUCCEEDED : note
        FAILED -> FAILED : note
        CANCELLED -> CANCELLED : note
        DENIED -> DENIED : note
        TIMEOUT -> TIMEOUT : note
    """,
    PIPELINE: """
        [*] -> PENDING : create
        PENDING -> RUNNING : execute
        PENDING -> CANCELLED : cancel
        RUNNING -> COMPLETED : complete
        RUNNING -> PARTIAL : complete_partly
        RUNNING -> FAILED : fail
        RUNNING -> RUNNING : request_cancel
        RUNNING -> CANCELLED : cancel
        PENDING -> FAILED : clean_up
        RUNNING -> FAILED : clean_up
    """,
    CONTAINER: """
        [*] -> queued : accept
        [*] -> rejected : reject
        queued -> running : start
        running -> finished : finish
        running -> failed : fail
        queued -> failed : cancel
        running -> failed : cancel
    """,
    SPOOL: """
        [*] -> STAGING : stage
        STAGING -> QUEUED : submit
        QUEUED -> RUNNING : claim
        RUNNING -> DONE : finish
        RUNNING -> FAILED : fail
        RUNNING -> QUEUED : recover
    """,
    BATCH: """
        [*] -> validating : create
        validating -> failed : refuse
        validating -> in_progress : accept
        validating -> cancelling : cancel
        in_progress -> finalizing : finalize
        in_progress -> cancelling : cancel
        finalizing -> completed : complete
        finalizing -> expired : expire
        cancelling -> cancelled : end
    """,
    PROCESSOR: """
        [*] -> VALIDATING : receive
        VALIDATING -> DONE : job_missing
        VALIDATING -> DONE : pipe_unavailable
        VALIDATING -> DONE : origin_mismatch
        VALIDATING -> DONE : end_model_unavailable
        VALIDATING -> HEAD : prefill_complete
        VALIDATING -> EMBED : more_prefill_chunks
        VALIDATING -> PROCESS_LAYERS : needs_layers
        EMBED -> DONE : prefill_update_failed
        EMBED -> DONE : no_model_for_next_layer
        EMBED -> SEND : next_layer_remote
        EMBED -> PROCESS_LAYERS : next_layer_local
        PROCESS_LAYERS -> DONE : no_local_model
        PROCESS_LAYERS -> SEND : next_layer_remote
        PROCESS_LAYERS -> PROCESS_LAYERS : next_layer_local
        PROCESS_LAYERS -> VALIDATING : layers_complete
        HEAD -> DONE : job_completed
        HEAD -> DONE : job_update_failed
        HEAD -> EMBED : more_tokens_local
        HEAD -> SEND : more_tokens_remote
        HEAD -> PROCESS_LAYERS : more_tokens_need_layers
        SEND -> DONE : handoff_complete
    """,
}

FINAL = {
    CANONICAL: {"SUCCEEDED", "FAILED", "CANCELLED", "DENIED", "TIMEOUT"},
    PIPELINE: {"COMPLETED", "PARTIAL", "FAILED", "CANCELLED"},
    CONTAINER: {"finished", "failed", "rejected"},
    SPOOL: {"DONE", "FAILED"},
    PROCESSOR: {"DONE"},
    BATCH: {"failed", "completed", "expired", "cancelled"},
}


@pytest.mark.seed("000", "1.1", "8.18", "16.2", "18.1")
@pytest.mark.seed("001", "3.1")
@pytest.mark.seed("002", "1.14")
@pytest.mark.seed("003", "1.11")
@pytest.mark.seed("004", "8.7")
@every_lifecycle
def test_the_legal_moves_are_those_of_the_seed_and_no_others(machine):
    births = {("[*]", str(event), str(state)) for event, state in machine.births.items()}
    moves = {(str(before), str(event), str(after)) for before, event, after in machine}
    assert births | moves == parse(LEGAL[machine])


@pytest.mark.seed("001", "3.16")
@pytest.mark.seed("002", "1.12")
@every_lifecycle
def test_the_final_states_are_those_of_the_seed(machine):
    assert machine.final == FINAL[machine]


@pytest.mark.seed("000", "7.1")
@pytest.mark.seed("001", "3.16")
@pytest.mark.seed("004", "8.7")
@every_lifecycle
def test_nothing_leaves_a_final_state(machine):
    for state, event in product(machine.final, EVENTS[machine]):
        if machine.judge(state, event) is not Step.ILLEGAL:
            assert machine.after(state, event) is state


@pytest.mark.seed("000", "2.1")
@every_lifecycle
def test_every_state_can_be_reached_from_a_birth(machine):
    reached = set(machine.births.values())
    for _ in machine.states:
        reached |= {after for before, _, after in machine if before in reached}
    assert reached == set(machine.states)


@pytest.mark.seed("002", "1.13")
@every_lifecycle
def test_an_end_can_be_reached_from_every_state(machine):
    ending = set(machine.final)
    for _ in machine.states:
        ending |= {before for before, _, after in machine if after in ending}
    assert ending == set(machine.states)


@every_lifecycle
def test_every_event_happens_somewhere_or_is_a_birth(machine):
    happening = {event for _, event, _ in machine} | set(machine.births)
    assert happening == set(EVENTS[machine])


@every_lifecycle
def test_the_verdict_and_the_next_state_agree(machine):
    table = {(before, event): after for before, event, after in machine}
    for state, event in product(machine.states, EVENTS[machine]):
        match machine.judge(state, event):
            case Step.MOVE:
                assert machine.after(state, event) is table[state, event]
            case Step.REPEAT:
                assert machine.after(state, event) is state
                assert (state, event) not in table
            case Step.ILLEGAL:
                with pytest.raises(IllegalMove):
                    machine.after(state, event)


@pytest.mark.seed("001", "5.1")
@every_lifecycle
def test_the_same_event_twice_leads_where_once_did(machine):
    for before, event, after in machine:
        assert machine.after(after, event) is after, (before, event)


@pytest.mark.seed("001", "3.3")
@pytest.mark.parametrize("machine", [CANONICAL, PIPELINE, CONTAINER], ids=lambda m: m.name)
def test_jobs_only_go_forward(machine):
    order = {state: place for place, state in enumerate(machine.states)}
    for before, _, after in machine:
        assert order[after] >= order[before]


@pytest.mark.seed("004", "8.6")
def test_only_recovery_leads_a_spooled_job_back():
    order = {state: place for place, state in enumerate(SPOOL.states)}
    back = [event for before, event, after in SPOOL if order[after] < order[before]]
    assert back == [SpoolEvent.RECOVER]


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[Machine, Any, list[tuple[Any, int]]]:
    """A lifecycle, one of its births, and events, each delivered so many times over."""
    machine = draw(st.sampled_from(list(EVENTS)))
    birth = draw(st.sampled_from(list(machine.births.values())))
    some_event = st.sampled_from(EVENTS[machine])
    return machine, birth, draw(st.lists(st.tuples(some_event, st.integers(1, 3)), max_size=30))


def deliver(machine: Machine, state: Any, event: Any) -> Any:
    return state if machine.judge(state, event) is Step.ILLEGAL else machine.after(state, event)


@given(deliveries())
@settings(deadline=None)
def test_whatever_arrives_a_job_stays_in_its_lifecycle_and_its_end_stands(walk):
    machine, state, events = walk
    ended = None
    for event, _ in events:
        state = deliver(machine, state, event)
        assert state in machine.states
        ended = ended or (state if machine.is_final(state) else None)
        assert ended is None or state is ended


@given(deliveries())
@settings(deadline=None)
def test_messages_that_arrive_several_times_over_lead_where_single_ones_do(walk):
    machine, birth, events = walk
    once = several = birth
    for event, times in events:
        once = deliver(machine, once, event)
        for _ in range(times):
            several = deliver(machine, several, event)
    assert several is once


def test_a_canonical_job_waits_is_held_or_has_ended():
    assert WAITING | HELD | CANONICAL.final == set(JobState)
    assert len(WAITING) + len(HELD) + len(CANONICAL.final) == len(JobState)


@pytest.mark.seed("001", "4.10")
def test_every_canonical_event_has_the_actors_that_the_seed_names():
    assert set(ACTORS) == set(JobEvent)
    assert Role.GATEWAY in ACTORS[JobEvent.ACCEPT]
    for event in (JobEvent.SCHEDULE, JobEvent.DISPATCH, JobEvent.DENY):
        assert ACTORS[event] == {Role.SCHEDULER}
    for event in (JobEvent.START, JobEvent.SUCCEED, JobEvent.FAIL):
        assert ACTORS[event] == {Role.WORKER}
    assert ACTORS[JobEvent.EXPIRE] == {Role.RECONCILER}
    assert Role.RECONCILER in ACTORS[JobEvent.CANCEL]


@pytest.mark.seed("002", "6.5")
def test_every_end_of_a_pipeline_is_a_canonical_end():
    assert {status: (end.state, end.error_code) for status, end in pipeline.ENDS.items()} == {
        PipelineJobStatus.COMPLETED: (JobState.SUCCEEDED, None),
        PipelineJobStatus.PARTIAL: (JobState.SUCCEEDED, "PARTIAL"),
        PipelineJobStatus.FAILED: (JobState.FAILED, "PIPELINE_FAILED"),
        PipelineJobStatus.CANCELLED: (JobState.CANCELLED, "CANCELLED"),
    }
    assert set(pipeline.ENDS) == PIPELINE.final == set(PIPELINE.states) - pipeline.ACTIVE


@pytest.mark.parametrize(
    ("state", "error_code", "end"),
    [
        ("finished", None, (JobState.SUCCEEDED, None)),
        ("failed", "NON_ZERO_EXIT", (JobState.FAILED, "NON_ZERO_EXIT")),
        ("failed", None, (JobState.FAILED, "RUNTIME_ERROR")),
        ("failed", "TIMEOUT", (JobState.TIMEOUT, "TIMEOUT")),
        ("failed", "CANCELLED", (JobState.CANCELLED, "CANCELLED")),
        ("rejected", "IMAGE_NOT_ALLOWED", (JobState.DENIED, "IMAGE_NOT_ALLOWED")),
        ("rejected", "RUNTIME_NOT_SUPPORTED", (JobState.FAILED, "RUNTIME_NOT_SUPPORTED")),
    ],
)
def test_every_end_of_a_container_job_is_a_canonical_end(state, error_code, end):
    assert container.canonical_end(ContainerJobState(state), error_code) == end


@pytest.mark.parametrize("state", sorted(set(ContainerJobState) - CONTAINER.final))
def test_a_container_job_that_has_not_ended_has_no_canonical_end(state):
    with pytest.raises(ValueError, match="has not ended"):
        container.canonical_end(state)


@pytest.mark.seed("003", "1.10")
def test_a_rejected_container_job_is_final_and_not_stored():
    assert set(CONTAINER.states) - container.STORED == {ContainerJobState.REJECTED}
    assert CONTAINER.absent is ContainerJobState.NOT_FOUND


def test_every_end_of_a_spooled_job_is_a_canonical_end():
    assert {status: end.state for status, end in spool.ENDS.items()} == {
        Status.DONE: JobState.SUCCEEDED,
        Status.FAILED: JobState.FAILED,
    }
    assert set(spool.ENDS) == SPOOL.final


@pytest.mark.seed("004", "1.2")
def test_every_state_of_a_spooled_job_has_a_folder_of_its_own_and_missing_has_none():
    assert set(spool.FOLDERS) == set(SPOOL.states)
    assert len(set(spool.FOLDERS.values())) == len(SPOOL.states)
    assert SPOOL.absent is Status.MISSING


@pytest.mark.seed("000", "7.4")
def test_every_way_to_done_but_a_handoff_ends_the_job():
    to_done = {event for _, event, after in PROCESSOR if PROCESSOR.is_final(after)}
    assert to_done - set(processor.ENDS) == {ProcessorEvent.HANDOFF_COMPLETE}
    assert set(processor.ENDS) <= to_done
    succeeded = {e for e, end in processor.ENDS.items() if end.state is JobState.SUCCEEDED}
    assert succeeded == {ProcessorEvent.JOB_COMPLETED}
    assert processor.ENDS[ProcessorEvent.JOB_MISSING] == (JobState.FAILED, "JOB_MISSING")


def test_every_canonical_end_is_one_that_the_canonical_table_has():
    ends = [*pipeline.ENDS.values(), *spool.ENDS.values(), *processor.ENDS.values()]
    assert {end.state for end in ends} <= CANONICAL.final
