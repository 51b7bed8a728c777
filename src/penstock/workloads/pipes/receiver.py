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
from functools import partial

from penstock.core.llm import LlmCode, LlmFailure
from penstock.workloads.pipes.compute import Compute
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.end_model import EndModel
from penstock.workloads.pipes.job import ComputeStep, Flight, Job, JobContext
from penstock.workloads.pipes.jobs import JobTable
from penstock.workloads.pipes.network_job import NetworkJob, finite, unpack_steps
from penstock.workloads.pipes.processor import JobProcessor
from penstock.workloads.pipes.wire.frames import BadFrame

log = logging.getLogger(__name__)


class JobReceiver:
    def __init__(
        self,
        config: LpConfig,
        jobs: JobTable,
        compute: Compute,
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
                self._refused["unknown job"] += 1  # as a rule one that has just ended
                failure = LlmFailure(LlmCode.JOB_MISSING, "the job is not known here")
                self._compute.tell_failure(
                    packet.job_id, packet.origin_node_id, packet.sequence, failure
                )
            elif why := self._foreign(context, packet, sender):
                self._refuse(why, sender)
            else:
                self._compute.enter(context.job, partial(self._take, context, packet, arrived))

    def _damaged(self, sender: str, bad: BadFrame) -> None:
        """One job of a frame is not as it was sent."""
        self._refuse(bad.what, sender, bad.reason)
        job, pipe = self._jobs.find(bad.job_id or b"")
        if job is None or pipe is None:
            return
        if sender in {job.origin_node_id, *(hop.node_id for hop in pipe.hops)}:
            self._compute.fail(job, LlmFailure(LlmCode.WRONG_COMPUTATION, bad.reason))

    def _foreign(self, context: JobContext, packet: NetworkJob, sender: str) -> str:
        """Why this is not the job's own packet."""
        job, pipe = context.job, context.pipe
        if job is None or pipe is None:
            return ""
        if packet.origin_node_id != job.origin_node_id:
            return "origin mismatch"
        if packet.pipe_id != job.pipe_id:
            return "wrong pipe"
        if packet.compute_step is ComputeStep.HEAD:
            layer = pipe.num_layers
            if job.origin_node_id != pipe.node_id:
                return "origin mismatch"
        else:
            layer = packet.current_layer
            hop = pipe.hop_at(layer)
            if packet.compute_step is not ComputeStep.LAYER:
                return "wrong step"
            if hop is None or hop.node_id != pipe.node_id or hop.start != layer:
                return "wrong layer"
        if sender == pipe.node_id or sender != pipe.before(layer, job.origin_node_id):
            return "wrong sender"
        return ""

    def _take(self, context: JobContext, packet: NetworkJob, arrived: float) -> JobProcessor | None:
        """The job goes on from this packet. Called when all of its earlier passes here are over.
        Raises LlmFailure if it can't."""
        job, pipe = context.job, context.pipe
        assert job is not None
        assert pipe is not None
        is_head = packet.compute_step is ComputeStep.HEAD
        layer = pipe.num_layers if is_head else packet.current_layer
        if job.cancelled:
            self._refused["job has ended"] += 1
            return None
        if packet.sequence <= job.seen.get(layer, 0):
            self._refused["repeated"] += 1
            return None
        flight = job.text.under_way.get(packet.sequence) if job.text is not None else None
        if job.text is not None and flight is None:
            self._refused["not under way"] += 1
            return None
        job.seen[layer] = packet.sequence
        if flight is not None:
            flight.away += arrived - flight.left
            _check_flight(flight, packet)
        _check(job, packet, layer, is_head)
        job.sequence, job.start, job.count = packet.sequence, packet.start, packet.count
        job.returns, job.data = packet.returns, packet.data
        job.compute_step, job.current_layer = packet.compute_step, layer
        job.times = list(packet.times)
        processor = JobProcessor(context)
        processor.time.layer, processor.time.ready = layer, arrived
        return processor

    def _refuse(self, why: str, sender: str, words: str = "") -> None:
        self._refused[why] += 1
        log.warning("refused a step from %s: %s", sender, words or why)


def _check_flight(flight: Flight, packet: NetworkJob) -> None:
    """Raises LlmFailure if what came back to the origin is not what it sent."""
    sent = (flight.end - flight.count, flight.count, flight.returns)
    came = (packet.start, packet.count, packet.returns)
    if sent != came:
        raise LlmFailure(
            LlmCode.WRONG_COMPUTATION,
            f"positions {came[0]} to {came[0] + came[1]} came back, and"
            f" {sent[0]} to {sent[0] + sent[1]} were sent",
        )


def _check(job: Job, packet: NetworkJob, layer: int, is_head: bool) -> None:
    """Raises LlmFailure if the job can't go on from its own packet."""
    data = packet.data
    rows = packet.returns if is_head else packet.count
    if data is None or data.shape[0] != rows or rows == 0:
        raise LlmFailure(LlmCode.WRONG_COMPUTATION, f"{rows} positions were to come")
    if not finite(data):
        raise LlmFailure(
            LlmCode.WRONG_COMPUTATION,
            f"what came for layer {layer} has something that is no number",
        )
    if is_head or job.cache is None:
        return
    if packet.start > job.cache.filled[layer]:
        raise LlmFailure(
            LlmCode.ENGINE_ERROR,
            f"a gap: the step begins at {packet.start}, and the cache ends at"
            f" {job.cache.filled[layer]}",
        )
    if packet.start + packet.count > job.cache.capacity:
        raise LlmFailure(
            LlmCode.CONTEXT_EXCEEDED,
            f"the job has room for {job.cache.capacity} tokens, and this one is"
            f" {packet.start + packet.count}",
        )
