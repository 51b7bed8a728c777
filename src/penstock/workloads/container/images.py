"""Images of jobs: which one a job runs, and which ones this worker pulled.

A name is looked up once and the job runs by the image's id, so that nobody can put another
image under the name between the check and the start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

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
from penstock.workloads.container.protocol.image_rules import check_resolved
from penstock.workloads.container.result import number
from penstock.workloads.container.timeouts import Late, within

_LOOK = 60.0
"""Seconds in which an engine that is there knows whether it has an image."""
_LOG_KEPT = 256 << 10
_LOG_QUOTED = 2 << 10
_MIB = 1 << 20

log = logging.getLogger(__name__)


class ImageResolver:
    """Finds, fetches or builds the images of jobs."""

    def __init__(
        self,
        engine: ContainerEngine,
        config: WorkerConfig,
        pulled: PulledImages | None = None,
    ) -> None:
        self._engine, self._config, self._pulled = engine, config, pulled

    async def find(self, job: ContainerJob) -> Image:
        """Raises ImageNotFound, PullFailed, EngineUnavailable, or IMAGE_NOT_ALLOWED."""
        try:
            image = await within(_LOOK, self._engine.image(job.image))
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
            return await within(seconds, self._fetched(job.image))
        except Late:
            raise PullFailed(
                f"fetching image {job.image!r} took longer than {number(seconds)} s "
                "(runtime.limits.pull_seconds)"
            ) from None
        except ImageNotFound as error:
            raise ImageNotFound(
                f"image {job.image!r} is not on this machine and could not be fetched "
                f"(check its name and tag): {error}"
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
        image = await self._engine.pull(reference, await credentials.find(reference))
        if self._pulled is not None:
            self._pulled.add(reference, image)
        return image

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
        request = BuildRequest(
            tag=tag,
            context=context,
            memory=int(rules.memory_mb * _MIB),
            cpus=job.limits.cpus,
            labels=labels,
        )
        try:
            building = self._engine.build(request, log.write)
            return await within(rules.max_seconds, building)
        except Late:
            why = f"the build took longer than {number(rules.max_seconds)} s"
            raise BuildFailed(why + log.quoted()) from None
        except (EngineUnavailable, Unsupported):
            raise
        except EngineError as error:
            why = f"the image could not be built: {error}"
            raise BuildFailed(why + log.quoted()) from error


class BuildLog:
    """The end of what a build said."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def write(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * _LOG_KEPT:
            del self._kept[:-_LOG_KEPT]

    @property
    def data(self) -> bytes:
        return bytes(self._kept[-_LOG_KEPT:])

    def quoted(self) -> str:
        """Its last lines, to go on with an error message."""
        tail = self.data[-_LOG_QUOTED:].decode(errors="replace").strip()
        return f"; its log ends with:\n{tail}" if tail else ""


class Pulled(Struct, frozen=True):
    reference: str
    used_at: float


class PulledImages:
    """Images that this worker pulled, and when a job last used each, by image id, in a file. Only
    those are ever removed: what was on the machine before is none of its business. A file that
    can't be read or written costs only disk space."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._images = _read(path)
        self._changed = False

    def add(self, reference: str, image: Image) -> None:
        self._images[image.id] = Pulled(reference, self._clock.now())
        self._changed = True
        self.save()

    def used(self, image_id: str) -> None:
        if (image := self._images.get(image_id)) is not None:
            self._images[image_id] = replace(image, used_at=self._clock.now())
            self._changed = True

    async def remove_unused(
        self, engine: ContainerEngine, seconds: float, in_use: Collection[str]
    ) -> int:
        """Remove those that no job has used for so long; returns how many. `in_use`: names and
        ids of images that jobs are about to use."""
        self.save()
        removed = 0
        for image_id, image in list(self._images.items()):
            if image.used_at >= self._clock.now() - seconds:
                continue
            if image_id in in_use or image.reference in in_use:
                continue
            try:
                await engine.remove_image(image.reference)
            except EngineError as error:
                log.info("image %s is not removed: %s", image.reference, error)
                continue
            # A job may have pulled it again meanwhile.
            if self._images.get(image_id) is image:
                del self._images[image_id]
                self._changed = True
            removed += 1
        self.save()
        return removed

    def save(self) -> None:
        if not self._changed:
            return
        try:
            new = self._path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(self._images))
            os.replace(new, self._path)
            self._changed = False
        except OSError as error:
            log.warning("can't note which images were pulled: %s", error)


def _read(path: Path) -> dict[str, Pulled]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Pulled])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("it is not known which images were pulled: %s", error)
        return {}
