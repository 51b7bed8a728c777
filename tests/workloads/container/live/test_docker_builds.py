"""Docker and Podman alone: builds, pulls, and what an image brings along."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.container_engines import ask

from penstock.testing.aio import run_async
from penstock.testing.container_engine import Lab, processes_with
from penstock.testing.images import IMAGE
from penstock.workloads.container.engine import (
    OWNER_LABEL,
    BuildFailed,
    BuildRequest,
    CommandNotFound,
    ExitStatus,
    PullFailed,
    Unsupported,
)
from penstock.workloads.container.engines.docker.engine import DockerEngine

PATIENCE = 30.0


@pytest.fixture(params=["docker", "podman"])
def socket(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_socket")


class BuildSite:
    """A folder to build from, and an engine that must be afterwards as it was before."""

    def __init__(self, engine: DockerEngine, socket: Path, folder: Path) -> None:
        self.engine = engine
        self.socket = socket
        self.folder = folder
        self.log = b""
        self.sleeping = asyncio.Event()
        self.owner = secrets.token_hex(6)
        self.tag = f"penstock-build/{self.owner}:1"

    def plan(self, *lines: str, **files: str) -> BuildRequest:
        (self.folder / "Dockerfile").write_text("\n".join(lines))
        for name, text in files.items():
            (self.folder / name).write_text(text)
        return BuildRequest(
            tag=self.tag,
            context=self.folder,
            memory=64 << 20,
            cpus=1,
            labels={OWNER_LABEL: self.owner},
        )

    def say(self, data: bytes) -> None:
        self.log += data
        if self.log.endswith(b"\nsleeping now\n"):
            self.sleeping.set()

    def everything(self) -> tuple[bytes, bytes]:
        """All images and containers, however unnamed."""
        _, images = ask(self.socket, "GET", "/images/json?all=1")
        _, containers = ask(self.socket, "GET", "/containers/json?all=1")
        return _ids(images), containers


def _ids(images: bytes) -> bytes:
    return b",".join(sorted(part[:80] for part in images.split(b'"Id":')[1:]))


@asynccontextmanager
async def site(socket: Path, folder: Path) -> AsyncIterator[BuildSite]:
    engine = DockerEngine(socket)
    there = BuildSite(engine, socket, folder)
    before = there.everything()
    try:
        yield there
    finally:
        await engine.remove_image(there.tag)
        await engine.close()
    assert there.everything() == before


@pytest.mark.seed("003", "4.6")
@run_async
async def test_an_image_is_built_runs_and_is_gone(socket: Path, tmp_path: Path) -> None:
    async with site(socket, tmp_path) as here:
        plan = here.plan(
            f"FROM {IMAGE}",
            "COPY a.txt /a.txt",
            "RUN echo built-it && cp /a.txt /b.txt",
            'CMD ["cat", "/b.txt"]',
            **{"a.txt": "given"},
        )
        image = await here.engine.build(plan, here.say)
        assert b"built-it" in here.log
        assert [found.id for found in await here.engine.images({OWNER_LABEL: here.owner})] == [
            image.id
        ]
        lab = Lab(here.engine, image.id)
        run = lab.plan()
        assert (await lab.run(run)).stdout == b"given"
        await here.engine.remove(run.name)
        await here.engine.remove_image(here.tag)
        assert await here.engine.images({OWNER_LABEL: here.owner}) == []
        await here.engine.remove_image(here.tag)


@pytest.mark.seed("003", "10.7")
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((f"FROM {IMAGE}", "RUN echo first", "RUN exit 3"), "3"),
        ((f"FROM {IMAGE}", "RUN echo first", "COPY not-there /"), "not-there"),
        ((f"FROM {IMAGE} AS a", "RUN echo 1", f"FRO\\\nM {IMAGE}", "RUN exit 3"), "3"),
        ((f"FROM {IMAGE}", "NONSENSE"), "(?i)nonsense"),
        (("FROM nobody/has-this:1",), "is not here"),
        ((f"FROM {IMAGE}", "RUN x=$(head -c 300000000 /dev/zero | tr '\\0' x)"), "x="),
        ((f"FROM {IMAGE}", "RUN grep -v '^ *lo:' /proc/net/dev | grep :"), "grep"),
    ],
    ids=["exit", "copy", "stages", "word", "base", "memory", "network"],
)
@run_async
async def test_a_build_that_fails_says_why_and_leaves_nothing(
    socket: Path, tmp_path: Path, lines: tuple[str, ...], words: str
) -> None:
    async with site(socket, tmp_path) as here:
        with pytest.raises(BuildFailed, match=words):
            await here.engine.build(here.plan(*lines), here.say)


@run_async
async def test_a_build_can_not_have_others_removed_by_what_it_writes(
    docker_socket: Path, tmp_path: Path
) -> None:
    """It writes what Docker itself writes of the steps of a build."""
    async with site(docker_socket, tmp_path) as here:
        lab = Lab(here.engine, (await here.engine.image(IMAGE)).id)
        other = lab.plan("sleep", "60")
        await here.engine.create(other)
        await here.engine.start(other.name)
        _, listed = ask(docker_socket, "GET", "/containers/json")
        (container,) = json.loads(listed)
        lines = (
            f"FROM {IMAGE} AS one",
            f"RUN echo ' ---> Running in {container['Id'][:12]}'; exit 3",
        )
        with pytest.raises(BuildFailed):
            await here.engine.build(here.plan(*lines), here.say)
        found = await here.engine.find({})
        assert [one.name for one in found] == [other.name]
        await here.engine.remove(other.name)


@run_async
async def test_a_cancelled_build_goes_on_nowhere(socket: Path, tmp_path: Path) -> None:
    mark, before = f"6{secrets.randbelow(10**8):08}", _build_cgroups()
    async with site(socket, tmp_path) as here:
        plan = here.plan(
            f"FROM {IMAGE}", "RUN echo one", f"RUN echo sleeping now; sleep {mark}", "RUN true"
        )
        building = asyncio.create_task(here.engine.build(plan, here.say))
        async with asyncio.timeout(PATIENCE):
            await here.sleeping.wait()
            # An engine may show the step's command before it runs it.
            while not processes_with(mark):  # noqa: ASYNC110 nothing tells of it
                await asyncio.sleep(0.02)
        building.cancel()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(asyncio.CancelledError):
                await building
        assert processes_with(mark) == []
        new = _build_cgroups() - before  # by now only those of a build that runs beside this test
        async with asyncio.timeout(PATIENCE):
            while new & _build_cgroups():  # noqa: ASYNC110 nothing tells of it
                await asyncio.sleep(0.05)


def _build_cgroups() -> set[str]:
    folders = (folder for folder, _, _ in os.walk("/sys/fs/cgroup"))
    return {folder for folder in folders if "penstock-build" in folder}


@run_async
async def test_an_image_that_cannot_be_fetched_is_told(socket: Path) -> None:
    engine = DockerEngine(socket)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(PullFailed, match=r"unreachable|dial|lookup"):
            await engine.pull("registry.invalid/team/tool:1")
    await engine.close()


@run_async
async def test_a_folder_that_an_image_declares_is_memory_with_a_limit(
    socket: Path, tmp_path: Path
) -> None:
    async with site(socket, tmp_path) as here:
        plan = here.plan(f"FROM {IMAGE}", "RUN mkdir /data", "VOLUME /data")
        image = await here.engine.build(plan, here.say)
        lab = Lab(here.engine, image.id)
        run = lab.shell(
            "grep ' /data ' /proc/mounts; echo x > /data/x; head -c 9999999 /dev/zero >/data/y"
        )
        ran = await lab.run(run)
        await here.engine.remove(run.name)
        assert b"tmpfs /data" in ran.stdout
        assert ran.exit.code != 0
        assert b"head" in ran.stderr


@run_async
async def test_an_image_without_a_command_has_none_to_find(socket: Path, tmp_path: Path) -> None:
    async with site(socket, tmp_path) as here:
        image = await here.engine.build(here.plan("FROM scratch", "COPY a /a", a="text"), here.say)
        lab = Lab(here.engine, image.id)
        for plan in (lab.plan(), lab.plan("/nothing"), lab.plan("nothing")):
            assert isinstance(await lab.refusal(plan), CommandNotFound)
            await here.engine.remove(plan.name)


@run_async
async def test_a_runtime_that_is_not_there_is_not_supported(socket: Path) -> None:
    engine = DockerEngine(socket)
    lab = Lab(engine, (await engine.image(IMAGE)).id)
    with pytest.raises(Unsupported):
        await engine.create(lab.plan("true", runtime="no-such-runtime"))
    await engine.close()


@run_async
async def test_a_kill_frees_one_that_nobody_reads(socket: Path) -> None:
    """The reader neither goes on nor lets go: the engine's kill must not wait for it."""
    engine = DockerEngine(socket)
    lab = Lab(engine, (await engine.image(IMAGE)).id)
    plan = lab.shell("yes")
    attached = await lab.begin(plan)
    await asyncio.sleep(0.5)
    async with asyncio.timeout(10):
        await engine.kill(plan.name)
        assert (await engine.wait(plan.name)).code == 137
        await engine.remove(plan.name)
    size = sum([len(chunk.data) async for chunk in attached.output()])
    assert 0 < size < 8 << 20
    await engine.close()


@run_async
async def test_a_creation_that_is_cancelled_leaves_nothing(socket: Path) -> None:
    engine = DockerEngine(socket)
    lab = Lab(engine, (await engine.image(IMAGE)).id)
    for pause in (0, 0.001, 0.005, 0.02):
        creating = asyncio.create_task(engine.create(lab.plan("true")))
        await asyncio.sleep(pause)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        if not creating.cancelled():
            await engine.remove(lab.made[-1])
    assert await engine.find({OWNER_LABEL: lab.owner}) == []
    await engine.close()


@run_async
async def test_input_that_is_not_wanted_is_at_its_end(socket: Path) -> None:
    engine = DockerEngine(socket)
    lab = Lab(engine, (await engine.image(IMAGE)).id)
    plan = lab.plan("cat")
    await engine.create(plan)
    attached = await engine.attach(plan.name, stdin=False)
    await engine.start(plan.name)
    async with asyncio.timeout(10):
        assert await engine.wait(plan.name) == ExitStatus(0)
        assert [chunk async for chunk in attached.output()] == []
    await engine.remove(plan.name)
    await engine.close()
