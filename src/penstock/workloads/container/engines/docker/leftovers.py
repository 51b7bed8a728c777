"""What a build that did not end well leaves behind in Docker: the images of its steps so far."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

from penstock.workloads.container.engine import EngineError
from penstock.workloads.container.engines.docker.answers import ImageAnswer
from penstock.workloads.container.engines.docker.api import Api

_STEP = re.compile(r"Step \d+/\d+ : (\w+)")
_MADE = re.compile(r" ---> ([0-9a-f]{12,64})\s*$")
_RUNS = re.compile(r" ---> Running in ([0-9a-f]{12,64})\s*$")
_PATIENCE = 10.0


class Leftovers:
    """Listens to a build's log, which names what it makes."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._verb = ""
        self._images: list[str] = []
        self._containers: list[str] = []

    def hear(self, text: str) -> None:
        for line in text.splitlines():
            if step := _STEP.match(line):
                self._verb = step[1].upper()
            elif running := _RUNS.match(line):
                self._containers.append(running[1])
            elif (made := _MADE.match(line)) and self._verb != "FROM":
                self._images.append(made[1])

    async def remove(self) -> None:
        """As far as it goes; the newest first, because each is the parent of the next."""
        with suppress(EngineError, TimeoutError):
            await asyncio.shield(self._remove())

    async def _remove(self) -> None:
        async with asyncio.timeout(_PATIENCE):
            for container in self._containers[-1:]:
                await self._quietly("DELETE", f"/containers/{container}", {"force": 1, "v": 1})
            for image in reversed(self._images):
                if await self._is_unnamed(image):
                    await self._quietly("DELETE", f"/images/{image}", {"force": 0})

    async def _is_unnamed(self, image: str) -> bool:
        try:
            answer = await self._api.ask(ImageAnswer, "GET", f"/images/{image}/json")
        except EngineError:
            return False
        return not answer.repo_tags and not answer.repo_digests

    async def _quietly(self, method: str, path: str, query: dict[str, str | int]) -> None:
        with suppress(EngineError):
            await self._api.tell(method, path, query)
