"""Simulated jobs that submit others, and wait for them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from tests.support.simulation.engine import SimEngine
from tests.support.simulation.history import ChildGiven, History, WaitBegan, WaitEnded
from tests.support.simulation.link import SimLink

from penstock.core.errors import PenstockError, StoreFailed, Unavailable
from penstock.core.job import Job, JobRequest, RetryPolicy, chain_of
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context
from penstock.workloads.function.context import awaiting, child_keys, running

T = TypeVar("T")

FOREVER = 2000.0
"""A timeout beyond the end of every history: a parent that is stuck is seen to be."""
_LONG = 60.0
"""The timeout of children that do not end by themselves: much longer than their parents live."""
_TOPICS = (*["job.a"] * 5, *["job.b"] * 3, "job.denied", "job.asked", "job.slow", "job.few")
_ACTS = ("succeed", "succeed", "succeed", "fail", "long", "deaf", "checkpoint")


class Plan(Struct, frozen=True):
    """What a parent does, in each of its attempts and tries."""

    children: tuple[JobRequest, ...]
    waits_for: str
    """"all", "each" in turn, "none", or "impatient": for all, but not for long."""
    then: str
    """The act that it ends with, unless a child failed that it has waited for."""


def some_family(chance: random.Random, depth: int = 2) -> tuple[str, float | None]:
    """The input of a parent, and its timeout."""
    children = [_some_child(chance, depth) for _ in range(chance.choice([1, 1, 2, 3]))]
    if chance.random() < 0.3:
        children[0] = _child(chance, "endless", _LONG)
        plan = Plan(tuple(children), "all", "succeed")
        return _encoded(plan), chance.choice([None, None, 2.0])
    if chance.random() < 0.3:
        children.append(children[0])
    waits_for = chance.choice(["all", "all", "all", "each", "none", "impatient"])
    plan = Plan(tuple(children), waits_for, chance.choice(["succeed", "succeed", "fail", "long"]))
    return _encoded(plan), chance.choice([None, 2.0, FOREVER, FOREVER])


def _encoded(plan: Plan) -> str:
    return encode_data(msgspec.json.encode(plan))


def _some_child(chance: random.Random, depth: int) -> JobRequest:
    if depth > 1 and chance.random() < 0.15:
        pointer, timeout = some_family(chance, depth - 1)
        return replace(_child(chance, "parent", timeout), context_ptr=pointer)
    return replace(_child(chance, chance.choice(_ACTS)), detached=chance.random() < 0.2)


def _child(chance: random.Random, act: str, timeout: float | None = None) -> JobRequest:
    return JobRequest(
        job_id="",
        topic=chance.choice(_TOPICS),
        env={"act": act},
        timeout=timeout,
        idempotent=chance.random() < 0.5,
        retry=RetryPolicy(retries=chance.choice([0, 0, 1]), delay=0.5),
    )


class SimClient:
    """The engine, as the jobs of one worker reach it: over the connection of that worker."""

    def __init__(
        self, link: SimLink, engine: Callable[[], SimEngine], met: Callable[[Job], None]
    ) -> None:
        """`met` is told of every child that the engine acknowledges."""
        self._link, self._engine, self._met = link, engine, met

    async def submit(self, request: JobRequest) -> Job:
        """Asked again until there is an answer: the key makes that safe."""
        (job,) = await self._call(lambda engine: engine.gateway.submit([request]))
        self._met(job)
        return job

    async def ended(self, job_id: str) -> Job:
        """The last try of a job, once it has ended."""
        while True:
            job = await self._call(partial(_ended, job_id))
            if job.successor is None:
                return job
            job_id = job.successor

    async def _call(self, call: Callable[[SimEngine], Coroutine[Any, Any, T]]) -> T:
        while True:
            await self._connected()
            if not (engine := self._engine()).is_dead:
                task = engine.own(_answer(call(engine)))
                try:
                    await asyncio.wait((task,))
                except asyncio.CancelledError:
                    task.cancel()
                    raise
                await self._connected()
                if not task.cancelled():
                    answer = task.result()
                    if not isinstance(answer, PenstockError):
                        return answer
                    if not isinstance(answer, StoreFailed | Unavailable):
                        raise answer
            await asyncio.sleep(0.5)

    async def _connected(self) -> None:
        while not self._link.healthy:
            if self._link.dead:
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(0.1)


async def _ended(job_id: str, engine: SimEngine) -> Job:
    return await engine.feed.ended(job_id)


async def _answer(work: Coroutine[Any, Any, T]) -> T | PenstockError:
    try:
        return await work
    except PenstockError as error:
        return error


class Parent:
    """One attempt of a job that submits others."""

    def __init__(
        self,
        payload: bytes,
        ctx: Context,
        link: SimLink,
        client: SimClient,
        chance: random.Random,
        history: History,
    ) -> None:
        self._plan = msgspec.json.decode(payload, type=Plan)
        self._ctx, self._link, self._client = ctx, link, client
        self._chance, self._events = chance, history.events

    async def run(self) -> str:
        """Returns the act that the job ends with."""
        token = running.set(self._ctx)
        try:
            ended = await self._wait(await self._submit())
        finally:
            running.reset(token)
        failed = any(job.state is not JobState.SUCCEEDED for job in ended)
        return "fail" if failed else self._plan.then

    async def _submit(self) -> list[str]:
        """In whatever order."""
        chance, parent = self._chance, self._ctx.request
        wanted = list(self._plan.children)
        chance.shuffle(wanted)
        given: list[str] = []
        numbers: Counter[str] = Counter()
        for request in wanted:
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 0.3)
            chain = chain_of(parent)
            # Those that only differ in how they run are equal work.
            work = f"{request.topic} {request.env['act']} {request.context_ptr}"
            numbers[work] += 1
            key = child_keys(self._ctx).take(chain, request.topic, work.encode())
            job = await self._client.submit(
                replace(
                    request,
                    tenant=parent.tenant,
                    idempotency_key=key,
                    child_of=chain,
                    parent_job_id=parent.job_id,
                )
            )
            asked = f"{work} {numbers[work]}"
            self._events.append(ChildGiven(*self._key, asked, job.job_id))
            given.append(job.job_id)
        return given

    @property
    def _key(self) -> tuple[str, int]:
        return self._ctx.job_id, self._ctx.attempt

    async def _wait(self, job_ids: list[str]) -> list[Job]:
        match self._plan.waits_for:
            case "none":
                return []
            case "each":
                return [job for job_id in job_ids for job in await self._wait_for([job_id])]
            case "impatient":
                try:
                    async with asyncio.timeout(self._chance.uniform(0.1, 2)):
                        return await self._wait_for(job_ids)
                except TimeoutError:
                    return []
        return await self._wait_for(job_ids)

    async def _wait_for(self, job_ids: list[str]) -> list[Job]:
        now = asyncio.get_running_loop().time
        wanted_at, is_broken_off = float("inf"), True
        self._note(WaitBegan(*self._key, self._link.worker_id))
        try:
            async with awaiting(job_ids):
                ended = [await self._client.ended(job_id) for job_id in job_ids]
                wanted_at = now()
            is_broken_off = False
        finally:
            worker_id = self._link.worker_id
            self._note(WaitEnded(*self._key, worker_id, wanted_at, now(), is_broken_off))
        return ended

    def _note(self, event: WaitBegan | WaitEnded) -> None:
        if not self._link.dead:
            self._events.append(event)
