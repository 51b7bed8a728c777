"""The JobProcessor of seed 000: one job's pass through one node of a split model.

Every row of the seed's transition tables is a row here, in the seed's order. Events are
the conditions a state finds, so they read as findings and not as commands. The table
says nothing of a cancelled job: its pass is abandoned between two states.

Two answers where the seed leaves room:

- "All layers complete" is "determined by next iteration". On the origin node that is a
  new look by VALIDATING, which then finds the job at its HEAD step. On any other node
  the head lies elsewhere, so what is found there is that the next layer is remote.
- A new job, not tokenized yet, has all of its prefill chunks before it: VALIDATING
  finds `more_prefill_chunks`, and EMBED tokenizes.

DONE ends the pass, not always the job: see `ENDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from penstock.core.machine import StateMachine
from penstock.lifecycles.canonical import CanonicalEnd, JobState


class ProcessorState(StrEnum):
    """What a JobProcessor is doing with its job."""

    VALIDATING = "VALIDATING"
    """Checks that the job, a complete pipe and, for the head, the end model are there."""
    EMBED = "EMBED"
    """Embeds the next token or prefill chunk; tokenizes the prompt first if need be."""
    PROCESS_LAYERS = "PROCESS_LAYERS"
    """Runs the hidden state through the layers this node holds."""
    HEAD = "HEAD"
    """Computes the output head and picks the next token; on the origin node only."""
    SEND = "SEND"
    """Hands the job to the node with the next layers, or back to the origin."""
    DONE = "DONE"
    """This node's pass is over: the job completed, was handed off, or met an error."""


class ProcessorEvent(StrEnum):
    """What a JobProcessor can find."""

    RECEIVE = "receive"
    JOB_MISSING = "job_missing"
    PIPE_UNAVAILABLE = "pipe_unavailable"
    ORIGIN_MISMATCH = "origin_mismatch"
    END_MODEL_UNAVAILABLE = "end_model_unavailable"
    PREFILL_COMPLETE = "prefill_complete"
    MORE_PREFILL_CHUNKS = "more_prefill_chunks"
    NEEDS_LAYERS = "needs_layers"
    PREFILL_UPDATE_FAILED = "prefill_update_failed"
    NO_MODEL_FOR_NEXT_LAYER = "no_model_for_next_layer"
    NEXT_LAYER_REMOTE = "next_layer_remote"
    NEXT_LAYER_LOCAL = "next_layer_local"
    NO_LOCAL_MODEL = "no_local_model"
    LAYERS_COMPLETE = "layers_complete"
    JOB_COMPLETED = "job_completed"
    JOB_UPDATE_FAILED = "job_update_failed"
    MORE_TOKENS_LOCAL = "more_tokens_local"
    MORE_TOKENS_REMOTE = "more_tokens_remote"
    MORE_TOKENS_NEED_LAYERS = "more_tokens_need_layers"
    HANDOFF_COMPLETE = "handoff_complete"


_S, _E = ProcessorState, ProcessorEvent

ORIGIN_ONLY = frozenset({_S.EMBED, _S.HEAD})
"""Where text or its tokens are seen: never left to another node."""

PROCESSOR: StateMachine[ProcessorState, ProcessorEvent] = StateMachine(
    "job processor",
    states=ProcessorState,
    initial=(_E.RECEIVE, _S.VALIDATING),
    moves={
        (_S.VALIDATING, _E.JOB_MISSING): _S.DONE,
        (_S.VALIDATING, _E.PIPE_UNAVAILABLE): _S.DONE,
        (_S.VALIDATING, _E.ORIGIN_MISMATCH): _S.DONE,
        (_S.VALIDATING, _E.END_MODEL_UNAVAILABLE): _S.DONE,
        (_S.VALIDATING, _E.PREFILL_COMPLETE): _S.HEAD,
        (_S.VALIDATING, _E.MORE_PREFILL_CHUNKS): _S.EMBED,
        (_S.VALIDATING, _E.NEEDS_LAYERS): _S.PROCESS_LAYERS,
        (_S.EMBED, _E.PREFILL_UPDATE_FAILED): _S.DONE,
        (_S.EMBED, _E.NO_MODEL_FOR_NEXT_LAYER): _S.DONE,
        (_S.EMBED, _E.NEXT_LAYER_REMOTE): _S.SEND,
        (_S.EMBED, _E.NEXT_LAYER_LOCAL): _S.PROCESS_LAYERS,
        (_S.PROCESS_LAYERS, _E.NO_LOCAL_MODEL): _S.DONE,
        (_S.PROCESS_LAYERS, _E.NEXT_LAYER_REMOTE): _S.SEND,
        (_S.PROCESS_LAYERS, _E.NEXT_LAYER_LOCAL): _S.PROCESS_LAYERS,
        (_S.PROCESS_LAYERS, _E.LAYERS_COMPLETE): _S.VALIDATING,
        (_S.HEAD, _E.JOB_COMPLETED): _S.DONE,
        (_S.HEAD, _E.JOB_UPDATE_FAILED): _S.DONE,
        (_S.HEAD, _E.MORE_TOKENS_LOCAL): _S.EMBED,
        (_S.HEAD, _E.MORE_TOKENS_REMOTE): _S.SEND,
        (_S.HEAD, _E.MORE_TOKENS_NEED_LAYERS): _S.PROCESS_LAYERS,
        (_S.SEND, _E.HANDOFF_COMPLETE): _S.DONE,
    },
)

ERRORS = frozenset(
    {
        _E.JOB_MISSING,
        _E.PIPE_UNAVAILABLE,
        _E.ORIGIN_MISMATCH,
        _E.END_MODEL_UNAVAILABLE,
        _E.PREFILL_UPDATE_FAILED,
        _E.NO_MODEL_FOR_NEXT_LAYER,
        _E.NO_LOCAL_MODEL,
        _E.JOB_UPDATE_FAILED,
    }
)
"""What stops a job: the pass is DONE and the job has failed."""

ENDS: Mapping[ProcessorEvent, CanonicalEnd] = {
    _E.JOB_COMPLETED: CanonicalEnd(JobState.SUCCEEDED),
    **{event: CanonicalEnd(JobState.FAILED, event.name) for event in ERRORS},
}
"""By the event that led to DONE. `handoff_complete` is no end: the job goes on elsewhere."""
