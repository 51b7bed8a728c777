"""One node: its layers, its part in the network, and, with the end model, an origin of jobs.

Other threads than the event loop's reach it in `send`, `acked`, `done` and `failed` only, which
the thread that computes calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise

import torch

from penstock.core.errors import Misconfigured
from penstock.lifecycles.processor import ERRORS, ProcessorEvent
from penstock.workloads.llm.runner import Loading, ProgressListener
from penstock.workloads.llm.values import (
    Completion,
    Delta,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    ModelFacts,
)
from penstock.workloads.pipes.admission import Admission
from penstock.workloads.pipes.config import LayerRange, LpConfig, check_within
from penstock.workloads.pipes.device import device_dtype, device_of
from penstock.workloads.pipes.end_model import EndModel
from penstock.workloads.pipes.generation import blamed, code_of
from penstock.workloads.pipes.job import Hop, Job, JobTable, JobTime
from penstock.workloads.pipes.loaded_layers import LoadedLayers, timed_ends
from penstock.workloads.pipes.measure import Choice, measured
from penstock.workloads.pipes.model.architecture import Architecture
from penstock.workloads.pipes.model.cache import KvPool
from penstock.workloads.pipes.model.linear import COMPUTE, held_bytes
from penstock.workloads.pipes.model.segment import Segment
from penstock.workloads.pipes.model.trial import try_ends
from penstock.workloads.pipes.net.assigning import Assigning
from penstock.workloads.pipes.net.mesh import Mesh
from penstock.workloads.pipes.net.records import NodeRecord, ranges_of, written
from penstock.workloads.pipes.network_job import NetworkJob, pack_steps
from penstock.workloads.pipes.origin import Origin
from penstock.workloads.pipes.receiver import JobReceiver
from penstock.workloads.pipes.routes import NoRoute, Route, find_route, loads
from penstock.workloads.pipes.scheduler import PassScheduler, failure_of
from penstock.workloads.pipes.text.tokenizing import Text
from penstock.workloads.pipes.weights.memory import give_back
from penstock.workloads.pipes.weights.room import Room, room
from penstock.workloads.pipes.weights.source import (
    Source,
    architecture_of,
    fingerprint,
    naming,
    open_source,
)
from penstock.workloads.pipes.wire.identity import Identity
from penstock.workloads.pipes.wire.messages import (
    MAX_STEPS,
    Acked,
    Counters,
    End,
    Failed,
    Kind,
    Message,
    Open,
    Opened,
    Refused,
    decode,
    encode,
    kind_of,
    steps_limit,
)

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two looks at deadlines."""
SLACK = 2.0
LONGEST = 20.0
"""Times `step_timeout` that a step may take at most, however slow its nodes say they are."""
COMPARED = 8 << 30
"""Bytes of a model up to which an origin reads all of it, to know the weights of the others."""


class Node:
    """Begins with `start`, ends with `stop`; both may be called again and then do nothing."""

    def __init__(self, config: LpConfig) -> None:
        self.config = config
        self.node_id = config.node_id or own_name()
        self.refused = Counters()
        self.origin: Origin | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._jobs = JobTable()
        self._trimmed = 0
        """Passes after which memory was given back."""
        self._draining = False
        self._reference: tuple[str, ...] = ()
        self._disagree: frozenset[str] = frozenset()
        """Whose weights were others when it last looked."""

    # -- life -----------------------------------------------------------------------

    async def start(self, on_progress: Loading | None = None) -> None:
        """Until its own layers are loaded. Raises LlmFailure and Misconfigured."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start(on_progress))
        await asyncio.shield(self._starting)

    async def _start(self, on_progress: Loading | None) -> None:
        self._loop = asyncio.get_running_loop()
        identity = Identity.make(self.config.key, self.node_id)
        tell = on_progress or (lambda fraction, what: None)
        tell(0.0, "measuring")
        self._source, self._architecture, self._choice = await asyncio.to_thread(self._look)
        self._check_layers()
        os.environ.update(self._choice.environment)
        await self._make_parts(tell)
        self.mesh = Mesh(
            identity,
            self.node_id,
            self.config.listen,
            self.config.advertise,
            self.config.join,
            ping=self.config.ping,
            silence=self.config.silence,
            steps=self._largest_steps(),
            counters=self.refused,
        )
        self._assigning = Assigning(self.mesh, self.node_id, self.config.model)
        self._listen()
        self.mesh.publish(self.record)
        await self.mesh.start()
        self._compute.start()
        self._spawn(self._tick())
        await self._hold(self._own_ranges(), tell)
        if self.origin is not None:
            tell(1.0, "reading what the others' weights should be")
            self._reference = await asyncio.to_thread(self._weights_of_others)
        tell(1.0, "ready")

    def _largest_steps(self) -> int:
        """Others may have been told to send larger ones than this node does."""
        config = self.config
        tokens = max(config.pass_tokens, config.prefill_chunk_size)
        return max(MAX_STEPS, steps_limit(self._architecture.hidden, tokens))

    def _weights_of_others(self) -> tuple[str, ...]:
        """What an origin knows of layers that it does not hold, by its own files. Where that would
        take long, what most nodes have counts."""
        layers = range(self._architecture.num_layers)
        if self._source.fingerprints:
            return tuple(self._source.fingerprints)
        if self._source.size > COMPARED:
            return ()
        held = {
            layer: segment.fingerprints[layer - segment.layers.start]
            for segment in self._holding.segments
            for layer in range(segment.layers.start, segment.layers.end)
        }
        found: list[str] = []
        try:
            for n in layers:
                if self._stopping:
                    return ()
                found.append(held.get(n) or fingerprint(self._source.layer(n)))
        except LlmFailure:  # it has only its own part of the model
            return ()
        return tuple(found)

    def _look(self) -> tuple[Source, Architecture, Choice]:
        """All that takes a while before weights are read."""
        source = open_source(self.config.source)
        architecture = architecture_of(source)
        self._device = device_of(self.config.device, architecture.linears, self.config.dtype)
        return source, architecture, self._chosen(architecture)

    def _chosen(self, architecture: Architecture) -> Choice:
        """Measured, unless all was said; only float32 is known to work everywhere."""
        dtype, threads = self.config.dtype, self.config.threads
        if self._device.type != "cpu":
            return Choice(device_dtype(self._device, dtype), threads or 1, 0.0)
        if dtype == "float32" and threads:
            return Choice(dtype, threads, 0.0)
        return measured(architecture.linears, threads, dtype)

    async def _make_parts(self, tell: Callable[[float, str], None]) -> None:
        config, architecture, dtype = self.config, self._architecture, self._choice.dtype
        self.context = min(config.context, architecture.max_positions)
        self._room: Room = room(
            architecture,
            dtype,
            device=self._device,
            memory=config.memory,
            cache=config.cache,
            context=self.context,
            ends=config.end_model,
        )
        self._holding = LoadedLayers(
            config.model,
            self._source,
            architecture,
            dtype,
            self._device,
            self._news,
            self._room.layers,
            self._release,
        )
        end_model = None
        if config.end_model:
            tell(0.05, "reading the end model")
            ends, text = await asyncio.to_thread(self._load_ends)
            end_model = EndModel(ends, partial(text.tokenize, bare=True))
            self._end_bytes, self._end_ms = held_bytes(ends.model), timed_ends(ends)
            self.origin = Origin(self, text, self.context, speculates=ends.can_be_cut)
        else:
            self._end_bytes, self._end_ms = 0, 0.0
        self._pool = KvPool(
            self._holding.layouts,
            architecture.max_positions,
            self._cache_budget(),
            COMPUTE[dtype],
            self._device,
            hidden=architecture.hidden,
        )
        self._pool.on_free = lambda: self.soon(self._admission.retry)
        self._compute = PassScheduler(self, config, self._choice.threads)
        self._receiver = JobReceiver(
            config, self._jobs, self._compute, architecture.hidden, self.refused, end_model
        )
        self._admission = Admission(
            self.node_id,
            config,
            self._jobs,
            self._pool,
            num_layers=architecture.num_layers,
            segments=lambda: self._holding.segments,
            outbox=self._compute,
            answer=self._answer,
            after_pass=self._compute.submit,
            refused=self.refused.add,
        )

    def _load_ends(self) -> tuple[Segment, Text]:
        text = Text(self._source.tokenizer(), self._source.config, self._source.generation)
        ends = Segment(self._architecture, self._choice.dtype, self._device)
        with naming(self._source):
            ends.load_ends(self._source.ends())
            with torch.inference_mode():
                try_ends(ends)
        give_back()
        return ends, text

    def _cache_budget(self) -> int:
        if self.config.cache:
            return self.config.cache
        layers = self.config.layers
        count = self._room.layers if layers is None else sum(map(len, layers))
        return self._room.cache(self._room.ends + count * self._room.layer)

    async def stop(self, reason: str = "it leaves") -> None:
        """Politely: what it has goes on for `drain` seconds, nothing new begins."""
        if self._starting is None or self._stopping:
            return
        self._stopping = True
        if not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if hasattr(self, "mesh"):
            await self._drain()
        if self.origin is not None:
            self._receiver.end_model = None
            self.origin.break_all(f"{self.node_id} stops")
            await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "mesh"):
            await self.mesh.stop(reason)
        if hasattr(self, "_compute"):
            await asyncio.to_thread(self._compute.stop, self.config.step_timeout)

    async def _drain(self) -> None:
        self._draining = True
        self._admission.closing = "is about to leave"
        if self.origin is not None:
            self.origin.closing = f"{self.node_id} is about to leave"
        self._news()
        until = time.monotonic() + self.config.drain
        while len(self._jobs) and time.monotonic() < until:
            await self.changed(min(TICK, until - time.monotonic()))

    # -- layers ---------------------------------------------------------------------

    def _check_layers(self) -> None:
        try:
            check_within(self.config.layers or (), self._architecture.num_layers)
        except ValueError as error:
            raise Misconfigured(f"{self.config.model}: {error}") from error
        if self.config.end_model and self.config.local_layers > self._architecture.num_layers:
            raise Misconfigured(
                f"{self.config.local_layers} local layers were asked for, and"
                f" {self.config.model} has {self._architecture.num_layers}"
            )

    def _own_ranges(self) -> tuple[LayerRange, ...]:
        """What it holds whatever the network decides."""
        local = self.config.local_layers if self.config.end_model else 0
        own = [LayerRange(0, local)] if local else []
        return merged([*own, *(self.config.layers or ())])

    async def _hold(
        self, ranges: Sequence[LayerRange], tell: Callable[[float, str], None] | None = None
    ) -> None:
        total = sum(map(len, ranges)) or 1
        done = 0

        def read(count: int, of: int) -> None:
            nonlocal done
            done += 1
            if tell is not None:
                tell(0.1 + 0.9 * min(1.0, done / total), f"reading layer {done} of {total}")

        await self._holding.hold(ranges, read)

    async def _take_on(self, layers: LayerRange | None) -> None:
        """What the network wants of it."""
        extra = [layers] if layers is not None else []
        try:
            await self._hold(merged([*self._own_ranges(), *extra]))
        except Exception as error:  # whatever it is, the others have to plan without this node
            failure = failure_of(error)
            log.error("layers %s can't be held: %s", layers, failure)
            self._assigning.gave_up(str(failure))

    async def _release(self, layers: Collection[int]) -> None:
        """Until no job uses these layers of this node. Those that still do after `drain` seconds
        have to take another route."""
        until = time.monotonic() + self.config.drain
        while (jobs := self._jobs_over(layers)) and time.monotonic() < until:
            await self.changed(min(TICK, max(0.0, until - time.monotonic())))
        why = f"{self.node_id} no longer holds layers {written(ranges_of(layers))}"
        for job in jobs:
            _, pipe = self._jobs.find(job.job_id)
            if pipe is not None:
                pipe.release(layers, why)
        until = time.monotonic() + self.config.silence
        while self._jobs_over(layers) and time.monotonic() < until:
            await self.changed(TICK)

    def _jobs_over(self, layers: Collection[int]) -> list[Job]:
        return [
            job
            for job in self._jobs.all()
            if job.cache is not None and not set(layers).isdisjoint(job.cache.layers)
        ]

    # -- the network ----------------------------------------------------------------

    def _listen(self) -> None:
        on = self.mesh.on
        on(Kind.STEPS, lambda sender, payload: self._receiver.receive(payload, sender))
        on(Kind.OPEN, lambda sender, it: self._admission.open(sender, decode(it, Open)))
        on(Kind.END, lambda sender, it: self._admission.end(sender, decode(it, End)))
        on(Kind.OPENED, self._opened)
        on(Kind.ACKED, self._acked)
        on(Kind.FAILED, self._failed)
        self.mesh.on_lost.append(self._lost)
        self.mesh.on_back.append(self._back)
        self.mesh.on_change.append(self._wake)
        self.mesh.on_refused.append(lambda why: log.error("%s is not taken: %s", self.node_id, why))
        self._assigning.on_assigned(lambda layers: self._spawn(self._take_on(layers)))

    def _opened(self, sender: str, payload: memoryview) -> None:
        if self.origin is not None:
            self.origin.opened(sender, decode(payload, Opened))

    def _acked(self, sender: str, payload: memoryview) -> None:
        message = decode(payload, Acked)
        why = self.origin.acked(sender, message) if self.origin else Refused.UNKNOWN_JOB
        if why is not None:
            self.refused.add(why)
            return
        context = self._receiver.context(message.job_id)
        self._compute.acked(context, message.sequence, message.times)

    def _failed(self, sender: str, payload: memoryview) -> None:
        message = decode(payload, Failed)
        job_id, said = message.job_id, f"{sender}: {message.reason}"
        failure = LlmFailure(code_of(message.code), said, lost=message.lost, node=message.node_id)
        origin = self.origin
        why = origin.failed(sender, job_id, failure) if origin else Refused.UNKNOWN_JOB
        if why is not None:
            self.refused.add(why)

    def _lost(self, node_id: str, reason: str) -> None:
        self._part(node_id, f"{node_id} was lost by {self.node_id}: {reason}")
        if self.origin is not None:
            self.origin.lost(node_id, reason)

    @property
    def record(self) -> NodeRecord:
        config, now = self.config, time.monotonic()
        tokens_per_s, busy = self._compute.timing.rates(now)
        local = config.local_layers if config.end_model else 0
        return NodeRecord(
            node_id=self.node_id,
            model=config.model,
            num_layers=self._architecture.num_layers,
            layer_bytes=self._room.layer,
            layer_ms=self._holding.layer_ms or self._choice.layer_ms,
            end_models=(config.model,) if config.end_model else (),
            local_layers=local,
            end_ms=self._end_ms,
            auto=config.layers is None,
            room=self._room.layers,
            segments=self._holding.records(),
            threads=self._choice.threads,
            context=self.context,
            memory=self._room.memory,
            weights=self._holding.weight_bytes + self._end_bytes,
            cache_total=self._pool.total,
            cache_used=self._pool.used,
            cache_kept=self._pool.kept,
            jobs=len(self._jobs),
            waiting=self._admission.waiting,
            tokens_per_s=tokens_per_s,
            busy=busy,
            draining=self._draining,
            stalled=self._is_stalled(now),
            refused=dict(self.refused),
            **self._assigning.record_fields(),
        )

    def _is_stalled(self, now: float) -> bool:
        since = self._compute.busy_since
        held = sum(len(segment.layers) for segment in self._holding.segments)
        expected = self._compute.busy_tokens * held * self._holding.layer_ms / 1000
        limit = step_limit(self.config.step_timeout, expected) / 2
        return since is not None and now - since > limit

    def step_limit(self, hops: Iterable[Hop], tokens: int) -> float:
        """Seconds that a step of this many tokens may take over these hops: `step_timeout`, or more
        if the measured speed of the nodes says so. A node that is stalled gets no more."""
        expected = 0.0
        for hop in hops:
            record = self.mesh.table.get(hop.node_id)
            if record is None or record.stalled:
                return self.config.step_timeout
            layers = (hop.end - hop.start) * tokens
            if record.jobs > 1:  # it may have to wait for a pass of the others
                held = sum(len(segment.layers) for segment in record.of(self.config.model))
                layers += held * self.config.pass_tokens
            expected += layers * record.layer_ms / 1000
        return step_limit(self.config.step_timeout, expected)

    def _send(self, node_id: str, message: Message) -> bool:
        return self.mesh.send(node_id, kind_of(message), encode(message))

    def _answer(self, to: str, message: Opened) -> None:
        if to != self.node_id:
            self._send(to, message)
        elif self.origin is not None:
            self.origin.opened(to, message)

    def _back(self, node_id: str) -> None:
        """The connection to a node broke, and there is a new one: steps may be lost."""
        if self.origin is not None:
            self.origin.cut_off(node_id)
        self._part(node_id, f"the connection to {node_id} broke")
        self._wake()

    def _part(self, node_id: str, reason: str) -> None:
        """What was under way to or from a node may be gone, and so may be its word that a job has
        ended: its own jobs take other ways from now on."""
        self._admission.lose(node_id)
        lost = LlmFailure(LlmCode.NODE_LOST, reason, lost=node_id)
        for job in self._jobs.all():
            if job.origin_node_id != self.node_id and adjoin(job.hops, self.node_id, node_id):
                _, pipe = self._jobs.find(job.job_id)
                if pipe is not None:
                    pipe.unavailable = reason
                self.failed(job.job_id, job.origin_node_id, job.sequence, lost)

    # -- called by the thread that computes -----------------------------------------

    def send(self, node_id: str, jobs: Sequence[NetworkJob]) -> None:
        self.soon(self._deliver, node_id, pack_steps(jobs), jobs)

    def acked(self, origin: str, job_id: bytes, sequence: int, times: Sequence[JobTime]) -> None:
        self.soon(self._send, origin, Acked(job_id, sequence, tuple(times)))

    def done(self, job: Job, event: ProcessorEvent, reason: str) -> None:
        if job.origin_node_id == self.node_id:
            if self.origin is not None:
                self.origin.done(job, event, reason)
        elif event in ERRORS:
            failure = LlmFailure(LlmCode[event.name], reason)
            self.failed(job.job_id, job.origin_node_id, job.sequence, failure)

    def failed(self, job_id: bytes, origin: str, sequence: int, failure: LlmFailure) -> None:
        if origin != self.node_id:
            code, lost = str(failure.code), str(failure.facts.get("lost", ""))
            guilty = blamed(failure, self.node_id)
            message = Failed(job_id, sequence, code, failure.message[:4096], guilty, lost)
            self.soon(self._send, origin, message)
        elif self.origin is not None:
            self.origin.failed_here(job_id, failure)

    def soon(self, act: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(act, *args)

    def _deliver(
        self, node_id: str, buffers: Sequence[bytes | memoryview], jobs: Sequence[NetworkJob]
    ) -> None:
        try:
            if self.mesh.send(node_id, Kind.STEPS, *buffers):
                return
            said = f"{node_id} can't be reached from {self.node_id}"
            failure = LlmFailure(LlmCode.NODE_LOST, said, lost=node_id)
        except ValueError as error:  # nobody would take a frame of this size
            failure = LlmFailure(LlmCode.ENGINE_ERROR, str(error))
        for job in jobs:
            self.failed(job.job_id, job.origin_node_id, job.sequence, failure)

    # -- what an origin needs -----------------------------------------------------------

    def find(
        self,
        avoid: frozenset[str],
        apart: frozenset[frozenset[str]] = frozenset(),
        before: Sequence[Hop] = (),
    ) -> Route | NoRoute:
        """A way over nodes that are there now; between those of a pair in `apart` only if there is
        no other. Who is still there keeps what it had in the way `before`."""
        if self._draining:
            return NoRoute((), (), f"{self.node_id} is about to leave")
        records = self.mesh.table.live()
        load = loads(records)
        found = find_route(
            self.config.model,
            self._architecture.num_layers,
            records,
            self.node_id,
            self.config.local_layers,
            load,
            avoid,
            self._reference,
            apart,
            before,
        )
        for said in set(found.disagree) - self._disagree:
            self.refused.add(Refused.OTHER_WEIGHTS)
            log.warning("%s", said)
        self._disagree = frozenset(found.disagree)
        return found

    def holds(self, hops: tuple[Hop, ...]) -> bool:
        """Whether all of this way is still there, and may be gone."""
        table = self.mesh.table
        return all(
            (record := table.get(hop.node_id)) is not None
            and (record.usable or hop.node_id == self.node_id)
            and any(
                one.ready and one.layers.start <= hop.start and hop.end <= one.layers.end
                for one in record.of(self.config.model)
            )
            for hop in hops
        )

    def context_of(self, hops: tuple[Hop, ...]) -> int:
        """Tokens that a job may have on all of these nodes."""
        records = (self.mesh.table.get(hop.node_id) for hop in hops)
        contexts = (record.context for record in records if record is not None and record.context)
        return min([self.context, *contexts])

    async def changed(self, timeout: float) -> None:
        """Until something about the nodes is new, or time has passed."""
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    def mends(self) -> bool:
        """Whether layers that are missing may be given to a node."""
        return any(record.auto for record in self.mesh.table.of(self.config.model))

    def knows(self, node_id: str) -> bool:
        """Whether it is a member: one that is not connected may be in a moment."""
        return node_id in self.mesh.table

    def open(self, node_id: str, message: Open) -> bool:
        """False when the node is not connected."""
        if node_id == self.node_id:
            self._admission.open(node_id, message)
            return True
        return self._send(node_id, message)

    def end(self, node_id: str, message: End) -> None:
        if node_id == self.node_id:
            self._admission.end(node_id, message)
        else:
            self._send(node_id, message)

    def submit(self, job_id: bytes, prepare: Callable[[Job], None]) -> None:
        """Have a job that was let in computed; `prepare` makes it ready."""
        context = self._receiver.context(job_id)
        if context.job is None:
            raise LlmFailure(LlmCode.JOB_MISSING, "the job was given up before it began")
        prepare(context.job)
        self._compute.begin(context)

    async def settled(self) -> None:
        """Until the thread that computes is past whatever it does now."""
        past = self._loop.create_future()
        self._compute.submit(
            lambda: self.soon(lambda: None if past.done() else past.set_result(None))
        )
        await past

    # -- for callers ----------------------------------------------------------------

    @property
    def address(self) -> str:
        return self.mesh.address

    def records(self) -> tuple[NodeRecord, ...]:
        """All nodes that it knows of, and itself."""
        return self.mesh.table.live()

    def join(self, addresses: Iterable[str]) -> None:
        """See whether there are nodes."""
        self.mesh.join(addresses)

    async def generate(
        self,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
        tenant: str = "",
        on_state: Callable[[torch.Tensor], None] | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        """`on_state` is given what the last token became behind all layers and the norm, for each
        token that is chosen."""
        await self.start()
        if self.origin is None:
            raise LlmFailure(
                LlmCode.END_MODEL_UNAVAILABLE, f"{self.node_id} has no end model: it sees no text"
            )
        answer = self.origin.generate(ask, choice, watch, tenant, on_state)
        try:
            async for piece in answer:
                yield piece
        finally:
            await answer.aclose()

    def facts(self) -> ModelFacts:
        ready = self._starting is not None and self._starting.done()
        if not ready:
            return ModelFacts(name=self.config.model, path=str(self.config.source))
        architecture = self._architecture
        return ModelFacts(
            name=self.config.model,
            path=str(self.config.source),
            size=self._source.size,
            architecture=architecture.name,
            quantisation=self._choice.dtype,
            train_context=architecture.max_positions,
            context=self.context,
            slots=self.config.max_jobs,
            loaded=isinstance(self.find(frozenset()), Route),
            memory=self._holding.weight_bytes + self._end_bytes + self._pool.used,
        )

    # -- time -----------------------------------------------------------------------

    def _news(self) -> None:
        """Something about this node is new."""
        self.mesh.publish(self.record)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                self._look_round(time.monotonic())
            except Exception:  # without deadlines somebody might wait for ever
                log.exception("a look at the deadlines failed")

    def _look_round(self, now: float) -> None:
        self._pool.forget(now)
        self._admission.retry()
        if self._compute.timing.passes != self._trimmed and not len(self._jobs):
            # What jobs were computed with: the C library would keep it.
            self._trimmed = self._compute.timing.passes
            self._spawn(asyncio.to_thread(give_back))
        if self.origin is not None:
            self.origin.watch_over(now, self._looks_stalled)
        self.mesh.publish(self.record)

    def _looks_stalled(self, node_id: str) -> bool:
        record = self.mesh.table.get(node_id)
        return record is None or not record.usable


def step_limit(timeout: float, expected: float) -> float:
    """Seconds after which a step is given up that should take so many. Speed is measured with one
    token on an idle machine: many at once take less for each, others on the machine add."""
    return min(max(timeout, SLACK * expected), LONGEST * timeout)


def adjoin(hops: Sequence[Hop], one: str, other: str) -> bool:
    """Whether a step goes from one of two nodes to the other."""
    return any({a.node_id, b.node_id} == {one, other} for a, b in pairwise(hops))


def merged(ranges: Sequence[LayerRange]) -> tuple[LayerRange, ...]:
    """As few as they can be; those that touch or overlap become one."""
    found: list[LayerRange] = []
    for one in sorted(ranges):
        if found and one.start <= found[-1].end:
            found[-1] = LayerRange(found[-1].start, max(found[-1].end, one.end))
        else:
            found.append(one)
    return tuple(found)


def own_name() -> str:
    """A name for a node that was given none."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-") or "node"
    return f"{host[:40]}-{os.urandom(3).hex()}"
