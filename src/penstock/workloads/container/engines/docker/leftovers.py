"""What a build that did not end well leaves behind in Docker: the images of its steps so far.

They are found by a label that each step inherits from its FROM line. Its name is random, so no
other image or container has it; what the build's log says counts for nothing, because a step can
write anything there.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from penstock.workloads.container.engine import EngineError
from penstock.workloads.container.engines.docker.answers import ListedContainer, ListedImage
from penstock.workloads.container.engines.docker.api import Api, container
from penstock.workloads.container.engines.docker.images import by_labels
from penstock.workloads.container.protocol.dockerfile import labelled

_PATIENCE = 10.0
_MOST_ROUNDS = 128
"""Images that are built on each other, at least one of which each round removes."""


class Leftovers:
    """Of one build."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._label = f"penstock.build.{secrets.token_hex(16)}"

    def marked(self, dockerfile: str) -> str:
        """The same Dockerfile, whose steps can be told from those of other builds."""
        return labelled(dockerfile, self._label)

    async def remove(self) -> None:
        """As far as it goes."""
        with suppress(EngineError, TimeoutError):
            await asyncio.shield(self._remove())

    async def _remove(self) -> None:
        query: dict[str, str | int] = {"all": 1, **by_labels({self._label: ""})}
        async with asyncio.timeout(_PATIENCE):
            listed = await self._api.ask(list[ListedContainer], "GET", "/containers/json", query)
            for one in listed:
                await self._quietly(container(one.value().name), {"force": 1, "v": 1})
            before: set[str] = set()
            for _ in range(_MOST_ROUNDS):
                images = await self._api.ask(list[ListedImage], "GET", "/images/json", query)
                left = {one.id for one in images if not (one.value().tags or one.value().digests)}
                if left in (set(), before):
                    return
                for image in left:  # not one that others are built on, until these are gone
                    await self._quietly(f"/images/{image}", {"force": 0})
                before = left

    async def _quietly(self, path: str, query: dict[str, str | int]) -> None:
        with suppress(EngineError):
            await self._api.tell("DELETE", path, query)
