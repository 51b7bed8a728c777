"""Which image a job runs: one that is here, one that is fetched, or one that is built for it.

A name is looked up once and the job runs by the image's id, so that nobody can put another
image under the name between the check and the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.ports.clock import Clock
from penstock.workloads.container.config import Pull, WorkerConfig
from penstock.workloads.container.engine import (
    BuildFailed,
    BuildRequest,
    ContainerEngine,
    EngineError,
    EngineUnavailable,
    Image,
    ImageNotFound,
    PullFailed,
    Unsupported,
)
from penstock.workloads.container.engines.credentials import RegistryCredentials
from penstock.workloads.container.job import ContainerJob
from penstock.workloads.container.protocol.policy import check_resolved
from penstock.workloads.container.running.ending import number
from penstock.workloads.container.running.patience import Late, within

_LOOK = 60.0
"""Seconds in which an engine that is there knows whether it has an image."""
_LOG_KEPT = 256 << 10
_LOG_QUOTED = 2 << 10
_MIB = 1 << 20


class BuildLog:
    """The end of what a build said."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def say(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * _LOG_KEPT:
            del self._kept[:-_LOG_KEPT]

    @property
    def data(self) -> bytes:
        return bytes(self._kept[-_LOG_KEPT:])

    def tail(self) -> str:
        return self.data[-_LOG_QUOTED:].decode(errors="replace").strip()


class Resolving:
    def __init__(self, engine: ContainerEngine, config: WorkerConfig, clock: Clock) -> None:
        self._engine, self._config, self._clock = engine, config, clock

    async def image(self, job: ContainerJob) -> Image:
        """Raises ImageNotFound, PullFailed, EngineUnavailable, or IMAGE_NOT_ALLOWED."""
        try:
            image = await within(self._clock, _LOOK, self._engine.image(job.image))
        except Late:
            raise EngineUnavailable(
                f"the container engine did not say within {_LOOK:g} s whether it has an image"
            ) from None
        except ImageNotFound:
            image = await self._pull(job)
        check_resolved(self._config.images, job.image, image)
        return image

    async def _pull(self, job: ContainerJob) -> Image:
        if self._config.images.pull is Pull.NEVER:
            raise ImageNotFound(
                f"image {job.image!r} is not on this machine, and this worker fetches none "
                "(images.pull: never); load it there, or let the worker fetch it"
            )
        seconds = job.limits.pull_seconds
        try:
            return await within(self._clock, seconds, self._fetched(job.image))
        except Late:
            raise PullFailed(
                f"fetching image {job.image!r} took longer than {number(seconds)} s "
                "(runtime.limits.pull_seconds)"
            ) from None
        except ImageNotFound as error:
            raise ImageNotFound(
                f"image {job.image!r} is neither on this machine nor to be had from its "
                f"registry; check its name and tag: {error}"
            ) from error
        except Unsupported:
            raise ImageNotFound(
                f"image {job.image!r} is not on this machine, and its engine fetches none; "
                "load it there"
            ) from None
        except PullFailed as error:
            raise PullFailed(f"image {job.image!r} can't be fetched: {error}") from error

    async def _fetched(self, reference: str) -> Image:
        credentials = RegistryCredentials(self._config.images.registry_auth_file)
        return await self._engine.pull(reference, await credentials.find(reference))

    async def build(
        self,
        job: ContainerJob,
        context: Path,
        tag: str,
        labels: Mapping[str, str],
        log: BuildLog,
    ) -> Image:
        """Raises BuildFailed with the end of the log, EngineUnavailable, Unsupported."""
        rules = self._config.build
        plan = BuildRequest(
            tag=tag,
            context=context,
            memory=int(rules.memory_mb * _MIB),
            cpus=job.limits.cpus,
            labels=labels,
        )
        try:
            return await within(self._clock, rules.max_seconds, self._engine.build(plan, log.say))
        except Late:
            why = f"the build took longer than {number(rules.max_seconds)} s"
            raise BuildFailed(_with_log(why, log)) from None
        except (EngineUnavailable, Unsupported):
            raise
        except EngineError as error:
            raise BuildFailed(_with_log(f"the image could not be built: {error}", log)) from error


def _with_log(why: str, log: BuildLog) -> str:
    said = log.tail()
    return f"{why}; its log ends with:\n{said}" if said else why
