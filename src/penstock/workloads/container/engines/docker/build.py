"""Building an image: without a network, without fetching anything, and nothing left of a build
that failed."""

from __future__ import annotations

import asyncio
import secrets
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import msgspec

from penstock.workloads.container.engine import (
    BuildFailed,
    BuildRequest,
    EngineError,
    EngineUnavailable,
    Image,
    ImageNotFound,
)
from penstock.workloads.container.engines.cgroups import Cgroups
from penstock.workloads.container.engines.docker.answers import ListedContainer
from penstock.workloads.container.engines.docker.api import Api, Query, Refused, container
from penstock.workloads.container.engines.docker.images import Images, by_labels
from penstock.workloads.container.protocol.dockerfile import SCRATCH, bases_of, labelled

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

    async def on_docker(self, spec: BuildRequest, say: Say) -> Image:
        """A build ends with its connection."""
        dockerfile = await self._check_bases(spec)
        # By which its steps are told from those of other builds.
        label = f"penstock.build.{secrets.token_hex(16)}"
        marked = labelled(dockerfile, label)
        await asyncio.to_thread((spec.context / "Dockerfile").write_text, marked)
        try:
            return await self._follow(
                "/build", build_query(spec), spec, lambda text: say(text.encode())
            )
        except BaseException:
            await asyncio.shield(remove_leftovers(self._api, label))
            raise

    async def on_podman(self, spec: BuildRequest, say: Say, podman: PodmanBuild) -> Image:
        """A build goes on, whatever becomes of its connection, until it is killed."""
        await self._check_bases(spec)
        query = build_query(spec) | podman.query()
        building = asyncio.ensure_future(
            self._follow(podman.PATH, query, spec, lambda text: say(text.encode()))
        )
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:
            await self._end(building, spec, podman)
            raise

    async def _check_bases(self, spec: BuildRequest) -> str:
        """The Dockerfile. An engine fetches a base that is not here, whatever it is told."""
        dockerfile = await asyncio.to_thread((spec.context / "Dockerfile").read_text)
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
        self, path: str, query: Query, spec: BuildRequest, hear: Callable[[str], None]
    ) -> Image:
        try:
            async with self._api.progress(path, query, packed(spec.context)) as lines:
                async for line in lines:
                    if line.failure:
                        raise BuildFailed(line.failure.strip())
                    if line.stream:
                        hear(line.stream)
        except Refused as refused:
            raise BuildFailed(refused.message) from None
        try:
            return await self._images.image(spec.tag)
        except ImageNotFound:
            raise EngineUnavailable("the engine ended the build without an error message") from None

    async def _end(
        self, building: asyncio.Future[Image], spec: BuildRequest, podman: PodmanBuild
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
            await self._images.remove(spec.tag)


def build_query(spec: BuildRequest) -> dict[str, str | int]:
    """Nothing is shared with other builds: not even what they have in common."""
    return {
        "t": spec.tag,
        "version": 1,
        "dockerfile": "Dockerfile",
        "networkmode": "none",
        "nocache": 1,
        "rm": 1,
        "forcerm": 1,
        "memory": spec.memory,
        "memswap": spec.memory,
        "cpuperiod": _CPU_PERIOD,
        "cpuquota": round(spec.cpus * _CPU_PERIOD),
        "shmsize": _SHARED_MEMORY,
        "labels": msgspec.json.encode(dict(spec.labels)).decode(),
    }


_PIECE = 1 << 20


async def packed(folder: Path) -> AsyncIterator[bytes]:
    """A tar of it, piece by piece; everything belongs to root."""
    with TemporaryFile(dir=folder.parent) as file:
        await asyncio.to_thread(_pack, folder, file)
        file.seek(0)
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece


def _pack(folder: Path, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=_of_root)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (entry.isdir() or entry.isreg() or entry.issym()):
        return None
    entry.mode = entry.mode & 0o755 | 0o444
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


_PATIENCE = 10.0


async def remove_leftovers(api: Api, label: str) -> None:
    """What a build with this label left on Docker, as far as it goes."""
    marked = by_labels({label: ""})
    with suppress(EngineError, TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            query: Query = {"all": 1, **marked}
            for one in await api.ask(list[ListedContainer], "GET", "/containers/json", query):
                with suppress(EngineError):
                    await api.tell("DELETE", container(one.value().name), {"force": 1, "v": 1})
            # Those without a name, each with the images that it was built on.
            await api.tell("POST", "/images/prune", marked)


_NO_NETWORK = 1
_OWN_NETWORK = msgspec.json.encode([{"Name": "network", "Host": False, "Path": ""}]).decode()
_ULIMITS = msgspec.json.encode(["core=0:0", "nofile=1024:1024"]).decode()


class PodmanBuild:
    """One build."""

    PATH = "/libpod/build"

    def __init__(self, profile: str, *, rootless: bool) -> None:
        """`profile` is a file with seccomp rules. A rootless Podman can't choose cgroups."""
        self._profile = profile
        self._cgroup = "" if rootless else f"penstock-build-{secrets.token_hex(8)}"

    def query(self) -> dict[str, str | int]:
        more: dict[str, str | int] = {
            "pullpolicy": "never",
            "layers": 0,
            "networkmode": _NO_NETWORK,
            "nsoptions": _OWN_NETWORK,
            "seccomp": self._profile,
            "ulimits": _ULIMITS,
        }
        return more | {"cgroupparent": f"/{self._cgroup}"} if self._cgroup else more

    def kill(self) -> None:
        """Everything that runs in it now, on this machine."""
        if self._cgroup:
            Cgroups.here().kill(self._cgroup)
