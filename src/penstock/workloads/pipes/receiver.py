"""What arrives from other nodes: is it what it says, is it from whom it should be, and is it next?

`receive` is called by the event loop and only puts the payload down; all else happens in the
thread that computes. A packet that is refused is counted and disturbs nothing, its own job
included, unless it is that job's own packet (from the right node, in the right place) and can't be
gone on from: then the origin is told.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from enum import StrEnum
from functools import partial

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.end_model import EndModel
from penstock.workloads.pipes.job import ComputeStep, Job, JobContext, JobTable
from penstock.workloads.pipes.network_job import NetworkJob, finite, unpack_steps
from penstock.workloads.pipes.processor import JobProcessor
from penstock.workloads.pipes.scheduler import PassScheduler
from penstock.workloads.pipes.wire.messages import BadFrame, Refused

log = logging.getLogger(__name__)


class StepRefused(StrEnum):
    """Names in the node's counters, beside those of the wire (`Refused`)."""

    JOB_HAS_ENDED = "job_has_ended"
    ORIGIN_MISMATCH = "origin_mismatch"
    WRONG_PIPE = "wrong_pipe"
    WRONG_LAYER = "wrong_layer"
    """Not where a part of the job's way begins on this node."""
    WRONG_SENDER = "wrong_sender"
    """Not the node that has the part of the way before this one."""
    REPEATED = "repeated"
    NOT_UNDER_WAY = "not_under_way"
    """It came back to an origin that did not send it."""
    NOT_WHAT_WAS_SENT = "not_what_was_sent"
    NOT_FINITE = "not_finite"
    GAP = "gap"
    NO_ROOM = "no_room"


class JobReceiver:
    def __init__(
        self,
        config: LpConfig,
        jobs: JobTable,
        compute: PassScheduler,
        hidden: int,
        refused: Counter[str],
        end_model: EndModel | None = None,
    ) -> None:
        self._config, self._jobs, self._compute = config, jobs, compute
        self._hidden, self._refused = hidden, refused
        self.end_model = end_model

    def receive(self, payload: memoryview, sender: str) -> None:
        """A frame of STEPS. The payload is ours from now on."""
        self._compute.submit(partial(self._open, payload, sender, time.perf_counter()))

    def context(self, job_id: bytes) -> JobContext:
        """All that a processor works with; without a job if it is not open here."""
        job, pipe = self._jobs.find(job_id)
        return JobContext(self._config, log, job, pipe, self.end_model)

    # -- in the thread that computes ------------------------------------------------

    def _open(self, payload: memoryview, sender: str, arrived: float) -> None:
        try:
            packets = unpack_steps(payload, self._hidden, partial(self._damaged, sender))
        except BadFrame as bad:
            self._refuse(bad.what, sender, bad.reason)
            return
        for packet in packets:
            context = self.context(packet.job_id)
            if context.job is None:
                self._refused[Refused.UNKNOWN_JOB] += 1
                processor = JobProcessor(context)
                event = processor.run()
                assert event is not None
                failure = LlmFailure(LlmCode[event.name], processor.reason)
                self._compute.tell_failure(
                    packet.job_id, packet.origin_node_id, packet.sequence, failure
                )
            elif why := _foreign(context, packet, sender):
                self._refuse(why, sender, f"of job {packet.job_id.hex()}: {why}")
            else:
                begin = partial(self._take, context, packet, sender, arrived)
                self._compute.enter(context.job, begin)

    def _damaged(self, sender: str, bad: BadFrame) -> None:
        """One job of a frame is not as it was sent. If the sender is one of its nodes, the job
        would wait for this step for ever."""
        self._refuse(bad.what, sender, bad.reason)
        job, pipe = self._jobs.find(bad.job_id or b"")
        if job is None or pipe is None:
            return
        if sender in {job.origin_node_id, *(hop.node_id for hop in pipe.hops)}:
            said = f"a step from {sender} is damaged: {bad.reason}"
            self._compute.fail(job, LlmFailure(LlmCode.WRONG_COMPUTATION, said, node=sender))

    def _take(
        self, context: JobContext, packet: NetworkJob, sender: str, arrived: float
    ) -> JobProcessor | None:
        """The job goes on from this packet. Called when all of its earlier passes here are over.
        Raises LlmFailure if it can't."""
        job = context.job
        assert job is not None
        layer = _layer(context, packet)
        if why := _late(job, packet, layer):
            self._refused[why] += 1
            return None
        job.seen[layer] = packet.sequence
        if job.text is not None:
            flight = job.text.under_way[packet.sequence]
            flight.away += arrived - flight.left
        if found := _flaw(job, packet, layer):
            why, code, words = found
            self._refuse(why, sender, words)
            raise LlmFailure(code, f"{sender} sent {words}", node=sender)
        job.sequence, job.start, job.count = packet.sequence, packet.start, packet.count
        job.returns, job.data = packet.returns, packet.data
        job.compute_step, job.current_layer = packet.compute_step, layer
        job.times = list(packet.times)
        processor = JobProcessor(context)
        processor.time.layer, processor.time.ready = layer, arrived
        return processor

    def _refuse(self, why: str, sender: str, words: str) -> None:
        self._refused[why] += 1
        log.warning("refused a step from %s: %s", sender, words)


def _layer(context: JobContext, packet: NetworkJob) -> int:
    """Where it comes in; the number of layers stands for the head."""
    assert context.pipe is not None
    is_head = packet.compute_step is ComputeStep.HEAD
    return context.pipe.num_layers if is_head else packet.current_layer


def _foreign(context: JobContext, packet: NetworkJob, sender: str) -> StepRefused | None:
    """Why this is not the job's own packet."""
    job, pipe = context.job, context.pipe
    assert job is not None
    assert pipe is not None
    if packet.origin_node_id != job.origin_node_id:
        return StepRefused.ORIGIN_MISMATCH
    if packet.pipe_id != job.pipe_id:
        return StepRefused.WRONG_PIPE
    layer = _layer(context, packet)
    if packet.compute_step is ComputeStep.HEAD:
        # From the last node of the route it is the job's own, and its processor finds the mismatch.
        if job.origin_node_id != pipe.node_id and sender != pipe.before(layer, ""):
            return StepRefused.ORIGIN_MISMATCH
    else:
        hop = pipe.hop_at(layer)
        if hop is None or hop.node_id != pipe.node_id or hop.start != layer:
            return StepRefused.WRONG_LAYER
    if sender == pipe.node_id or sender != pipe.before(layer, job.origin_node_id):
        return StepRefused.WRONG_SENDER
    return None


def _late(job: Job, packet: NetworkJob, layer: int) -> StepRefused | None:
    """Why nothing is to be done about a job's own packet (any more)."""
    if job.cancelled:
        return StepRefused.JOB_HAS_ENDED
    if packet.sequence <= job.seen.get(layer, 0):
        return StepRefused.REPEATED
    if job.text is not None and packet.sequence not in job.text.under_way:
        return StepRefused.NOT_UNDER_WAY
    return None


def _flaw(job: Job, packet: NetworkJob, layer: int) -> tuple[StepRefused, LlmCode, str] | None:
    """Why the job can't go on from its own packet."""
    if job.text is not None:
        flight = job.text.under_way[packet.sequence]
        sent = (flight.end - flight.count, flight.count, flight.returns)
        if sent != (packet.start, packet.count, packet.returns):
            words = (
                f"{packet.count} positions from {packet.start}, and it had {sent[1]} of {sent[0]}"
            )
            return StepRefused.NOT_WHAT_WAS_SENT, LlmCode.WRONG_COMPUTATION, words
    if not finite(packet.data):
        words = f"NaN or infinity, for layer {layer}"
        return StepRefused.NOT_FINITE, LlmCode.WRONG_COMPUTATION, words
    cache, end = job.cache, packet.start + packet.count
    if packet.compute_step is ComputeStep.HEAD or cache is None:
        return None
    filled = cache.filled.get(layer)
    if filled is not None and packet.start > filled:
        words = f"positions from {packet.start}, and {filled} are here: a gap"
        return StepRefused.GAP, LlmCode.ENGINE_ERROR, words
    if end > cache.capacity:
        words = f"positions up to {end}, and the job has room for {cache.capacity}"
        return StepRefused.NO_ROOM, LlmCode.CONTEXT_EXCEEDED, words
    return None
