"""Whether a command is there, before the container starts.

An engine starts its init, and only the init finds that there is nothing to run; what it then
says and how it exits differs. So the file is looked up first. The answer for a file of an image
is remembered: an image never changes.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections import OrderedDict

from penstock.workloads.container.engine import (
    CommandNotFound,
    CommandNotRunnable,
    Image,
    Plan,
)
from penstock.workloads.container.engines.docker.answers import PathStat
from penstock.workloads.container.engines.docker.api import Api, Refused, container
from penstock.workloads.container.engines.docker.refusals import NOT_FOUND

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STAT = "X-Docker-Container-Path-Stat"
_REMEMBERED = 1000
_MOST_LINKS = 16


class Commands:
    """Looks commands up in containers that have not been started yet."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def check(self, plan: Plan, image: Image) -> None:
        """Raises CommandNotFound, CommandNotRunnable."""
        command = (image.entrypoint + (plan.cmd or image.cmd))[:1]
        if not command:
            raise CommandNotFound("neither the job nor the image names a command")
        places = _places(command[0], plan, image)
        known = (plan.image, ":".join(places))
        if known in self._known:
            self._known.move_to_end(known)
            return
        await self._find(plan.name, command[0], places)
        if not any(_below(place, mount.target) for place in places for mount in plan.mounts):
            self._known[known] = None
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    async def _find(self, name: str, command: str, places: tuple[str, ...]) -> None:
        there = False
        for place in places:
            found = await self._file(name, place)
            if found is not None:
                there = True
                if found.is_program:
                    return
        if there:
            raise CommandNotRunnable(f"{command!r} can't be executed: it is no program")
        raise CommandNotFound(f"there is no command {command!r} in the image")

    async def _file(self, name: str, path: str) -> PathStat | None:
        """What a path leads to, links followed."""
        for _ in range(_MOST_LINKS):
            found = await self._stat(name, path)
            if found is None or not found.is_link:
                return found
            path = posixpath.join(posixpath.dirname(path), found.link_target)
        return None

    async def _stat(self, name: str, path: str) -> PathStat | None:
        try:
            text = await self._api.header(container(name, "/archive"), {"path": path}, _STAT)
        except Refused as refused:
            if refused.status == NOT_FOUND:
                return None
            raise
        try:
            return self._api.decoded(PathStat, base64.b64decode(text))
        except binascii.Error:
            raise self._api.nonsense(repr(text[:100])) from None


def _places(command: str, plan: Plan, image: Image) -> tuple[str, ...]:
    """Where it may be, in order."""
    if "/" in command:
        folder = plan.workdir or image.workdir or "/"
        return (posixpath.normpath(posixpath.join("/", folder, command)),)
    env = dict(pair.partition("=")[::2] for pair in image.env)
    path = {**env, **plan.env}.get("PATH") or DEFAULT_PATH
    folders = dict.fromkeys(folder for folder in path.split(":") if folder.startswith("/"))
    return tuple(posixpath.join(folder, command) for folder in folders)


def _below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")
