"""Which images this worker pulled, and when a job last used each.

Only those are ever removed: what was on the machine before is none of its business.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.ports.clock import Clock
from penstock.workloads.container.engine import ContainerEngine, EngineError, Image, RegistryAuth

log = logging.getLogger(__name__)


class Pulled(Struct, frozen=True):
    reference: str
    used_at: float


class PulledImages:
    """By image id, in a file; one that can't be read or written costs only disk space."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._images = _read(path)
        self._changed = False

    def pulled(self, reference: str, image: Image) -> None:
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


class PullTracker:
    """An engine whose pulls are recorded; all else is the engine's own."""

    def __init__(self, engine: ContainerEngine, images: PulledImages) -> None:
        self._engine, self._images = engine, images

    async def pull(self, reference: str, auth: RegistryAuth | None = None) -> Image:
        image = await self._engine.pull(reference, auth)
        self._images.pulled(reference, image)
        return image

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _read(path: Path) -> dict[str, Pulled]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Pulled])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("it is not known which images were pulled: %s", error)
        return {}
