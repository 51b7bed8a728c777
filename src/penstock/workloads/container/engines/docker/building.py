"""Building an image: without a network, without fetching anything, and nothing left of a build
that did not end well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from penstock.workloads.container.engine import (
    BuildFailed,
    BuildPlan,
    EngineError,
    EngineUnavailable,
    Image,
    ImageNotFound,
)
from penstock.workloads.container.engines.docker.api import Api, Query, Refused
from penstock.workloads.container.engines.docker.context import packed
from penstock.workloads.container.engines.docker.images import Images
from penstock.workloads.container.engines.docker.leftovers import Leftovers
from penstock.workloads.container.engines.docker.podman_build import PodmanBuild
from penstock.workloads.container.protocol.dockerfile import SCRATCH, bases_of

_CPU_PERIOD = 100_000
_SHARED_MEMORY = 16 << 20
_LAST_RESORT = 30.0
"""Seconds that the end of a cancelled build may take."""
_KILL_EVERY = 0.05

Say = Callable[[bytes], None]


class Builder:
    """Builds on one engine."""

    def __init__(self, api: Api, images: Images) -> None:
        self._api = api
        self._images = images

    async def on_docker(self, plan: BuildPlan, say: Say) -> Image:
        """A build ends with its connection."""
        dockerfile = await self._check_bases(plan)
        leftovers = Leftovers(self._api)
        marked = leftovers.marked(dockerfile)
        await asyncio.to_thread((plan.context / "Dockerfile").write_text, marked)
        try:
            return await self._follow(
                "/build", build_query(plan), plan, lambda text: say(text.encode())
            )
        except BaseException:
            await leftovers.remove()
            raise

    async def on_podman(self, plan: BuildPlan, say: Say, podman: PodmanBuild) -> Image:
        """A build goes on, whatever becomes of its connection, until it is killed."""
        await self._check_bases(plan)
        query = build_query(plan) | podman.query()
        building = asyncio.ensure_future(
            self._follow(podman.PATH, query, plan, lambda text: say(text.encode()))
        )
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:
            await self._end(building, plan, podman)
            raise

    async def _check_bases(self, plan: BuildPlan) -> str:
        """The Dockerfile. An engine fetches a base that is not here, whatever it is told."""
        dockerfile = await asyncio.to_thread((plan.context / "Dockerfile").read_text)
        try:
            bases = bases_of(dockerfile)
        except ValueError as error:
            raise BuildFailed(f"the Dockerfile can't be used: {error}") from None
        for base in bases:
            try:
                if base != SCRATCH:
                    await self._images.image(base)
            except ImageNotFound:
                raise BuildFailed(f"the image {base}, which it starts from, is not here") from None
        return dockerfile

    async def _follow(
        self, path: str, query: Query, plan: BuildPlan, hear: Callable[[str], None]
    ) -> Image:
        try:
            async with self._api.progress(path, query, packed(plan.context)) as lines:
                async for line in lines:
                    if line.failure:
                        raise BuildFailed(line.failure.strip())
                    if line.stream:
                        hear(line.stream)
        except Refused as refused:
            raise BuildFailed(refused.message) from None
        try:
            return await self._images.image(plan.tag)
        except ImageNotFound:
            raise EngineUnavailable("the engine ended a build without a word") from None

    async def _end(
        self, building: asyncio.Future[Image], plan: BuildPlan, podman: PodmanBuild
    ) -> None:
        """Whatever step it is at; then the image, if there is one all the same."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_RESORT):
                while not building.done():
                    podman.kill()
                    await asyncio.wait((building,), timeout=_KILL_EVERY)
        building.cancel()
        await asyncio.gather(building, return_exceptions=True)
        with suppress(EngineError):
            await self._images.remove(plan.tag)


def build_query(plan: BuildPlan) -> dict[str, str | int]:
    """Nothing is shared with other builds: not even what they have in common."""
    return {
        "t": plan.tag,
        "version": 1,
        "dockerfile": "Dockerfile",
        "networkmode": "none",
        "nocache": 1,
        "rm": 1,
        "forcerm": 1,
        "memory": plan.memory,
        "memswap": plan.memory,
        "cpuperiod": _CPU_PERIOD,
        "cpuquota": round(plan.cpus * _CPU_PERIOD),
        "shmsize": _SHARED_MEMORY,
        "labels": msgspec.json.encode(dict(plan.labels)).decode(),
    }
