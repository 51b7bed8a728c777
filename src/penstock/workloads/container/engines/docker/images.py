"""Images: found, fetched, built and removed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from urllib.parse import quote

import msgspec

from penstock.workloads.container.engine import (
    BuildFailed,
    BuildPlan,
    EngineError,
    EngineUnavailable,
    Image,
    ImageNotFound,
)
from penstock.workloads.container.engines.docker import podman
from penstock.workloads.container.engines.docker.answers import ImageAnswer, ListedImage
from penstock.workloads.container.engines.docker.api import Api, Refused
from penstock.workloads.container.engines.docker.build import bases, build_query, packed
from penstock.workloads.container.engines.docker.leftovers import Leftovers
from penstock.workloads.container.engines.docker.refusals import NOT_FOUND, of_pull

_REMEMBERED = 256


class Images:
    """The images of one engine."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: OrderedDict[str, ImageAnswer] = OrderedDict()
        """By id: what an id means never changes."""

    async def image(self, reference: str) -> Image:
        return (await self._ask(reference)).value()

    async def known(self, image_id: str) -> ImageAnswer:
        """The same, without asking again for an id that was asked for before."""
        return self._known.get(image_id) or await self._ask(image_id)

    def forget(self, image_id: str) -> None:
        self._known.pop(image_id, None)

    async def _ask(self, reference: str) -> ImageAnswer:
        try:
            answer = await self._api.ask(ImageAnswer, "GET", f"{_path(reference)}/json")
        except Refused as refused:
            if refused.status == NOT_FOUND:
                raise ImageNotFound(f"there is no image {reference}") from None
            raise EngineError(refused.message) from None
        self._known[answer.value().id] = answer
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return answer

    async def pull(self, reference: str) -> Image:
        _path(reference)
        name, tag = _split(reference)
        query = {"fromImage": name, "tag": tag}
        try:
            async with self._api.progress("/images/create", query) as lines:
                async for line in lines:
                    if line.failure:
                        raise of_pull(line.failure)
        except Refused as refused:
            raise of_pull(refused.message) from None
        return await self.image(reference)

    async def build(
        self, plan: BuildPlan, say: Callable[[bytes], None], *, on_podman: bool
    ) -> Image:
        dockerfile = await asyncio.to_thread((plan.context / "Dockerfile").read_text)
        for base in bases(dockerfile):
            try:
                await self.image(base)
            except ImageNotFound:
                raise BuildFailed(f"the image {base}, which it starts from, is not here") from None
        path, query = "/build", build_query(plan)
        query["labels"] = msgspec.json.encode(dict(plan.labels)).decode()
        if on_podman:
            path, query = podman.BUILD_PATH, query | podman.BUILD
        leftovers = Leftovers(self._api)
        try:
            await self._follow_build(path, query, plan, say, leftovers)
            return await self.image(plan.tag)
        except BaseException as error:
            await leftovers.remove()
            if isinstance(error, ImageNotFound):
                raise EngineUnavailable("the engine ended the build without a word") from None
            raise

    async def _follow_build(
        self,
        path: str,
        query: Mapping[str, str | int],
        plan: BuildPlan,
        say: Callable[[bytes], None],
        leftovers: Leftovers,
    ) -> None:
        try:
            async with self._api.progress(path, query, packed(plan.context)) as lines:
                async for line in lines:
                    if line.failure:
                        raise BuildFailed(line.failure.strip())
                    if line.stream:
                        leftovers.hear(line.stream)
                        say(line.stream.encode())
        except Refused as refused:
            raise BuildFailed(refused.message) from None

    async def listed(self, labels: Mapping[str, str]) -> list[Image]:
        found = await self._api.ask(list[ListedImage], "GET", "/images/json", by_labels(labels))
        return [image.value() for image in found]

    async def remove(self, reference: str) -> None:
        try:
            await self._api.tell("DELETE", _path(reference), {"force": 1})
        except Refused as refused:
            if refused.status != NOT_FOUND:
                raise EngineError(refused.message) from None
        except ImageNotFound:
            return


def by_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """A query for what has all of them; an empty value means any."""
    wanted = [f"{name}={value}" if value else name for name, value in labels.items()]
    return {"filters": msgspec.json.encode({"label": wanted}).decode()}


def _path(reference: str) -> str:
    if any(part in ("", ".", "..") for part in reference.split("/")):
        raise ImageNotFound(f"{reference!r} names no image")
    return f"/images/{quote(reference, safe='/:@')}"


def _split(reference: str) -> tuple[str, str]:
    """Name and tag or digest: without one an engine would fetch every tag there is."""
    name, at, digest = reference.partition("@")
    if at:
        return name, digest
    head, colon, tag = reference.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (reference, "latest")
