"""The JobProcessor of seed 000: one pass of a job through one node.

What to do in a state is here; where it leads is asked of the table in `lifecycles.processor`.

A pass is a generator. It stops where something costly is to be computed and says what
(`Layers`, or `Head`), so that its caller can compute many jobs in one pass; `run` walks one
alone. It ends in DONE with the event that led there, or is abandoned between two states because
its job was cancelled: then there is no event. Whatever raises ends it, too.

A job that lost a node goes its prompt and answer over again. Layers that have these positions
from the route before do not compute them: what went to the next node then is sent again.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

from penstock.lifecycles.processor import PROCESSOR, ProcessorEvent, ProcessorState
from penstock.workloads.pipes.job import (
    ComputeStep,
    InFlight,
    Job,
    JobContext,
    JobTime,
    OriginText,
    PassTime,
)
from penstock.workloads.pipes.network_job import of_job

if TYPE_CHECKING:
    from penstock.workloads.pipes.end_model import EndModel
    from penstock.workloads.pipes.llm_model import LlmModel
    from penstock.workloads.pipes.pipe import Pipe

_S, _E = ProcessorState, ProcessorEvent
_NEXT = {(state, event): after for state, event, after in PROCESSOR}
"""The table, as it is asked for every token."""


class Layers(NamedTuple):
    """The job is to go through layers of this segment, up to `end`."""

    model: LlmModel
    end: int


class Head(NamedTuple):
    """The job's next token is to be chosen."""

    end_model: EndModel


Need = Layers | Head


class JobProcessor:
    def __init__(self, context: JobContext) -> None:
        self.context = context
        # What the other states rely on: VALIDATING looks whether it is there.
        self._job: Job = context.job  # type: ignore[assignment]
        self._pipe: Pipe = context.pipe  # type: ignore[assignment]
        self._end_model: EndModel = context.end_model  # type: ignore[assignment]
        self.state = PROCESSOR.initial
        self.event: ProcessorEvent | None = None
        """The last one that was found."""
        self.reason = ""
        """Of an end that is no success, in words."""
        self.time = PassTime()
        self.head_seconds = 0.0

    def run(self) -> ProcessorEvent | None:
        """The whole pass, alone. The event that led to DONE; None if it was abandoned."""
        for need in self.steps():
            began = time.perf_counter()
            if isinstance(need, Layers):
                need.model.process_jobs([self._job], need.end)
                self.time.computed(began, time.perf_counter(), 1)
            else:
                need.end_model.compute_norm([self._job])
                need.end_model.compute_head([self._job])
                need.end_model.choose(self._job)
                self.head_seconds = time.perf_counter() - began
        return self.event if self.state is _S.DONE else None

    def steps(self) -> Generator[Need, None, None]:
        """Each need is to be met before the generator is asked to go on."""
        while self.state is not _S.DONE:
            job = self.context.job
            if job is not None and job.cancelled:
                self.reason = job.cancelled
                return
            if self.state is _S.PROCESS_LAYERS:
                layers = None
                is_held = self._pass_over()
                if not is_held and (layers := self._find_layers()) is not None:
                    yield layers
                event = self._after_layers() if is_held or layers else _E.NO_LOCAL_MODEL
            elif self.state is _S.HEAD:
                yield Head(self._end_model)
                event = self._after_head()
            elif self.state is _S.VALIDATING:
                event = self._validate()
            elif self.state is _S.EMBED:
                event = self._embed()
            else:
                event = self._send()
            self.event = event
            self.state = _NEXT[self.state, event]

    # -- the states -----------------------------------------------------------------

    def _validate(self) -> ProcessorEvent:
        job, pipe = self.context.job, self.context.pipe
        if job is None:
            self.reason = "the job is not known here"
            return _E.JOB_MISSING
        if pipe is None or not pipe.is_complete:
            self.reason = pipe.unavailable if pipe is not None else "the job has no pipe"
            return _E.PIPE_UNAVAILABLE
        if job.compute_step is ComputeStep.LAYER:
            return _E.NEEDS_LAYERS
        if job.origin_node_id != pipe.node_id:
            self.reason = f"{pipe.node_id} is not the job's origin"
            return _E.ORIGIN_MISMATCH
        if self.context.end_model is None or job.text is None:
            self.reason = f"{pipe.node_id} has no end model of {job.model_id}"
            return _E.END_MODEL_UNAVAILABLE
        if job.compute_step is ComputeStep.TOKENIZE or job.compute_step is ComputeStep.EMBED:
            return _E.MORE_PREFILL_CHUNKS
        self._land()
        return _E.MORE_PREFILL_CHUNKS if job.text.chunking.has_more else _E.PREFILL_COMPLETE

    def _embed(self) -> ProcessorEvent:
        job, text = self._job, _text(self._job)
        began = time.perf_counter()
        if job.compute_step is ComputeStep.TOKENIZE:
            self._end_model.tokenize(job)
        chunking = text.chunking
        if chunking.total == 0:
            chunking.total = len(text.input_ids)
            # The last token is always computed: what follows it is what is wanted.
            chunking.sent = chunking.acked = min(chunking.sent, chunking.total - 1)
        text.timing.begin()
        is_prefill = chunking.has_more
        job.begin_pass(self.context.config.prefill_chunk_size)
        self._end_model.compute_embed([job])
        self.embedded(began)
        if is_prefill:
            text.timing.prefill_tokens += job.count
            if not text.on_progress(job, chunking.sent, chunking.total):
                self.reason = "the client disconnected"
                return _E.PREFILL_UPDATE_FAILED
        return self._next_layer(_E.NEXT_LAYER_LOCAL, _E.NEXT_LAYER_REMOTE)

    def _find_layers(self) -> Layers | None:
        pipe, layer = self._pipe, self._job.current_layer
        found = pipe.local(layer)
        if found is None:
            self.reason = pipe.released or f"{pipe.node_id} does not hold layer {layer}"
            return None
        model, end = found
        if self._is_replay:
            end = next((n for n in range(layer + 1, end) if self._held_until(n) > n), end)
        return Layers(model, end)

    @property
    def _is_replay(self) -> bool:
        job = self._job
        return job.start + job.count <= job.same and not job.returns and job.cache is not None

    def _held_until(self, layer: int) -> int:
        """Up to which layer, from this one on, the pass need not be computed."""
        job, cache, hop = self._job, self._job.cache, self._pipe.hop_at(layer)
        assert cache is not None
        until, end = layer, job.start + job.count
        while hop is not None and until < hop.end and cache.filled.get(until, 0) >= end:
            until += 1
        while until > layer and not (
            until == self._pipe.num_layers  # what comes out there is not needed
            or cache.remembered(until, job.start, end) is not None
        ):
            until -= 1
        return until

    def _pass_over(self) -> bool:
        """Go past layers that computed these positions for an earlier route, if there are any."""
        job = self._job
        if not self._is_replay or (until := self._held_until(job.current_layer)) == (
            job.current_layer
        ):
            return False
        assert job.cache is not None
        if until < self._pipe.num_layers:
            job.data = job.cache.remembered(until, job.start, job.start + job.count)
        else:
            job.compute_step = ComputeStep.HEAD
        if not self.time.compute:
            self.time.together = 0
        job.current_layer = until
        return True

    def _after_layers(self) -> ProcessorEvent:
        job, pipe = self._job, self._pipe
        job.last_update = time.monotonic()
        if job.current_layer < pipe.num_layers:
            is_local = pipe.is_local(job.current_layer)
            return _E.NEXT_LAYER_LOCAL if is_local else _E.NEXT_LAYER_REMOTE
        if job.origin_node_id != pipe.node_id:
            return _E.NEXT_LAYER_REMOTE
        self._note_time()
        if job.returns == 0 and not _text(job).chunking.has_more:
            # All of the prompt is sent, and its last chunk, which the head waits for, is elsewhere.
            return _E.NEXT_LAYER_REMOTE
        return _E.LAYERS_COMPLETE

    def _after_head(self) -> ProcessorEvent:
        job, text = self._job, _text(self._job)
        job.last_update = time.monotonic()
        text.timing.chose(job.origin_node_id, self.head_seconds, len(text.chosen))
        if text.timing.tokens == 1 and self.context.logger is not None:
            self.context.logger.debug("prefill is over after %.1f ms", text.timing.prefill_ms)
        for number, chosen in enumerate(text.chosen, text.generated - len(text.chosen) + 1):
            is_heard = text.on_token(job, chosen.token, chosen.logprobs)
            if text.is_complete(job, chosen.token) or 0 < text.max_tokens <= number:
                del text.input_ids[text.prompt_tokens + number :]
                if self.context.config.print_times and self.context.logger is not None:
                    self.context.logger.info("%s", text.timing.table())
                return _E.JOB_COMPLETED
            if not is_heard:
                self.reason = "the client disconnected"
                return _E.JOB_UPDATE_FAILED
        if job.compute_step is ComputeStep.EMBED:
            return _E.MORE_TOKENS_LOCAL
        return self._next_layer(_E.MORE_TOKENS_NEED_LAYERS, _E.MORE_TOKENS_REMOTE)

    def _send(self) -> ProcessorEvent:
        job, pipe = self._job, self._pipe
        is_over = job.current_layer == pipe.num_layers
        if is_over and job.origin_node_id == pipe.node_id:
            self._land()
            return _E.HANDOFF_COMPLETE
        self._note_time()
        if is_over and job.returns == 0:
            pipe.land_job(job)
            return _E.HANDOFF_COMPLETE
        if is_over:
            job.compute_step = ComputeStep.HEAD
        elif job.text is not None:
            self._depart(job.text)
        if not is_over and job.cache is not None and job.data is not None:
            job.cache.remember(job.current_layer, job.start, job.data)
        pipe.send_job(of_job(job), pipe.destination(job))
        job.data = None
        return _E.HANDOFF_COMPLETE

    # -- what they share ------------------------------------------------------------

    def embedded(self, began: float) -> None:
        """A new pass begins with the embedding that was computed since then."""
        now = time.perf_counter()
        self.time = PassTime(ready=now, embed=now - began)

    def _next_layer(self, local: ProcessorEvent, remote: ProcessorEvent) -> ProcessorEvent:
        """Of a pass that is to begin: where its first layer is."""
        pipe, layer = self._pipe, self._job.current_layer
        hop = pipe.hop_at(layer)
        if hop is not None and hop.node_id != pipe.node_id:
            return remote
        if local is _E.NEXT_LAYER_LOCAL and pipe.local(layer) is None:
            self.reason = f"no node of the pipe holds layer {layer}"
            return _E.NO_MODEL_FOR_NEXT_LAYER
        return local

    def _note_time(self) -> None:
        """What this node did in the pass goes along with it."""
        job, took = self._job, self.time
        job.times.append(
            JobTime(
                self._pipe.node_id,
                took.layer,
                job.current_layer,
                int(took.compute * 1e6),
                int(took.queue * 1e6),
                embed_us=int(took.embed * 1e6),
                together=took.together,
            )
        )
        self.time = PassTime(layer=job.current_layer, ready=took.ready)

    def _depart(self, text: OriginText) -> None:
        job, now = self._job, time.perf_counter()
        flight = text.under_way.get(job.sequence)
        if flight is None:
            text.under_way[job.sequence] = InFlight(
                job.start + job.count, job.count, job.returns, now
            )
        else:
            flight.left = now

    def _land(self) -> None:
        """The origin's pass has been through all layers."""
        job, text = self._job, _text(self._job)
        flight = text.land(job.sequence)
        text.chunking.land(job.start + job.count)
        away = flight.away if flight is not None else 0.0
        text.timing.passed(job.times, away, job.origin_node_id, job.count)


def _text(job: Job) -> OriginText:
    assert job.text is not None
    return job.text
