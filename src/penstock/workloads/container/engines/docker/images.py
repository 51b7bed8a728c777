"""Images: found, fetched and removed."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from penstock.workloads.container.engine import (
    Image,
    ImageNotFound,
    RegistryAuth,
)
from penstock.workloads.container.engines.docker.answers import ImageAnswer
from penstock.workloads.container.engines.docker.api import (
    NOT_FOUND,
    Api,
    Refused,
    of_pull,
)

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
            raise
        self._known[answer.value().id] = answer
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return answer

    async def pull(self, reference: str, auth: RegistryAuth | None = None) -> Image:
        _path(reference)
        name, tag = _split(reference)
        query = {"fromImage": name, "tag": tag}
        headers = {} if auth is None else {"X-Registry-Auth": encoded_auth(auth)}
        try:
            async with self._api.progress("/images/create", query, headers=headers) as lines:
                async for line in lines:
                    if line.failure:
                        raise of_pull(line.failure)
        except Refused as refused:
            raise of_pull(refused.message) from None
        return await self.image(reference)

    async def listed(self, labels: Mapping[str, str]) -> list[Image]:
        found = await self._api.ask(list[ImageAnswer], "GET", "/images/json", by_labels(labels))
        return [image.value() for image in found]

    async def remove(self, reference: str) -> None:
        try:
            await self._api.tell("DELETE", _path(reference), {"force": 1})
        except Refused as refused:
            if refused.status != NOT_FOUND:
                raise
        except ImageNotFound:
            return


def by_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """A query for what has all of them; an empty value means any."""
    wanted = [f"{name}={value}" if value else name for name, value in labels.items()]
    return {"filters": msgspec.json.encode({"label": wanted}).decode()} if wanted else {}


def encoded_auth(auth: RegistryAuth) -> str:
    """The header X-Registry-Auth."""
    fields = {"serveraddress": auth.server}
    if auth.identity_token:
        fields["identitytoken"] = auth.identity_token
    else:
        fields |= {"username": auth.username, "password": auth.password}
    return base64.urlsafe_b64encode(msgspec.json.encode(fields)).decode()


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
