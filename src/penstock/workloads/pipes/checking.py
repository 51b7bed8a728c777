"""Spot checks as they are carried out: a way of one layer, and what came back of it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from functools import partial
from os import urandom
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.generation import Broken
from penstock.workloads.pipes.job import ComputeStep, Hop, Job
from penstock.workloads.pipes.network_job import NetworkJob
from penstock.workloads.pipes.spotcheck import TOKENS, chosen, differ, recomputed, route_of
from penstock.workloads.pipes.wire.messages import End, Open

if TYPE_CHECKING:
    from penstock.workloads.pipes.model.architecture import Architecture
    from penstock.workloads.pipes.model.segment import Segment
    from penstock.workloads.pipes.weights.source import Source

log = logging.getLogger(__name__)


class Around(Protocol):
    """What a check needs of its node."""

    config: LpConfig
    node_id: str

    async def ask(self, node_id: str, message: Open) -> object:
        """Until there is room. Raises Broken."""

    def expect(self, job: Job) -> None:
        """A job that no layer here is to compute: what comes back of it is told as it is."""

    def forget(self, job: Job) -> None: ...

    def send(self, node_id: str, jobs: list[NetworkJob]) -> None: ...

    def end(self, node_id: str, message: End) -> None: ...

    def dtype_of(self, node_id: str) -> str: ...

    def step_limit(self, hops: Iterable[Hop], tokens: int) -> float:
        """Seconds that a step of this many tokens may take over these hops."""

    def soon(self, act: Callable[..., object], *args: object) -> None: ...


class SpotChecks:
    def __init__(
        self, around: Around, source: Source, architecture: Architecture, ends: Segment | None
    ) -> None:
        self._around, self._source, self._ends = around, source, ends
        self._architecture = architecture
        self._chance = random.Random()
        self._waiting: dict[bytes, tuple[str, asyncio.Future[Any]]] = {}
        self.passed = 0

    async def maybe(self, hops: tuple[Hop, ...]) -> None:
        """Check one layer of this way, as often as was set. Raises Broken with a node that is not
        to be trusted."""
        if self._chance.random() >= self._around.config.spot_check or self._ends is None:
            return
        check = chosen(hops, self._around.node_id, self._chance)
        if check is not None:
            await self.check(check)

    async def check(self, check: Hop) -> None:
        job_id = urandom(16)
        states = await asyncio.to_thread(self._some_states)
        try:
            ours = await asyncio.to_thread(
                recomputed, self._architecture, self._source, check, states
            )
        except LlmFailure as failure:
            log.info("layer %d can't be checked: %s", check.start, failure)
            return
        theirs = await self._theirs(job_id, check, states)
        wrong = differ(theirs, ours, self._around.dtype_of(check.node_id))
        if wrong:
            said = f"{check.node_id} computes layer {check.start} wrongly: {wrong}"
            raise Broken(job_id, LlmCode.WRONG_COMPUTATION, said, check.node_id)
        self.passed += 1

    def _some_states(self) -> Any:
        """Each a mixture of tokens that nobody wrote: an embedding as such never leaves."""
        assert self._ends is not None
        words = self._architecture.vocabulary
        rows = self._ends.embed(
            [self._chance.randrange(words) for _ in range(TOKENS)], range(TOKENS)
        ).to("cpu")
        return torch.randn(TOKENS, TOKENS, dtype=rows.dtype) / TOKENS**0.5 @ rows

    async def _theirs(self, job_id: bytes, check: Hop, states: Any) -> Any:
        around = self._around
        hops = route_of(check, around.node_id, self._architecture.num_layers)
        pipe_id = job_id.hex()[:8]
        job = Job(job_id, pipe_id, around.config.model, around.node_id, hops=hops)
        job.on_return = partial(around.soon, self._came, job_id)
        coming: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[job_id] = (check.node_id, coming)
        around.expect(job)
        try:
            await around.ask(
                check.node_id, Open(job_id, pipe_id, around.config.model, hops, TOKENS)
            )
            around.send(check.node_id, [_step(job, check, states)])
            limit = around.step_limit((check,), TOKENS)
            return await asyncio.wait_for(coming, limit)
        except TimeoutError:
            said = f"{check.node_id} did not answer in time"
            raise Broken(job_id, LlmCode.NODE_STALLED, said, check.node_id) from None
        finally:
            del self._waiting[job_id]
            around.forget(job)
            around.end(check.node_id, End(job_id))

    # -- what comes back ------------------------------------------------------------

    def failed(self, job_id: bytes, failure: LlmFailure) -> bool:
        """Whether it was one. (From any thread.)"""
        found = self._waiting.get(job_id)
        if found is None:
            return False
        self._around.soon(self._break, found, job_id, failure.code, failure.message)
        return True

    def lost(self, node_id: str, reason: str) -> None:
        """The node, or what was under way to it or from it."""
        for job_id, found in list(self._waiting.items()):
            if found[0] == node_id:
                self._break(found, job_id, LlmCode.NODE_LOST, reason)

    def _came(self, job_id: bytes, states: Any) -> None:
        found = self._waiting.get(job_id)
        if found is not None and not found[1].done():
            found[1].set_result(states)

    def _break(
        self, found: tuple[str, asyncio.Future[Any]], job_id: bytes, code: LlmCode, why: str
    ) -> None:
        node_id, coming = found
        if not coming.done():
            guilty = "" if code is LlmCode.NODE_LOST else node_id
            coming.set_exception(Broken(job_id, code, why, guilty))


def _step(job: Job, check: Hop, states: Any) -> NetworkJob:
    return NetworkJob(
        job_id=job.job_id,
        pipe_id=job.pipe_id,
        origin_node_id=job.origin_node_id,
        current_layer=check.start,
        compute_step=ComputeStep.LAYER,
        sequence=1,
        start=0,
        count=TOKENS,
        returns=TOKENS,
        times=(),
        data=states,
    )
