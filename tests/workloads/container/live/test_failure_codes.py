"""Real jobs that fail in real containers: each engine's say comes to the same code."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.container.lines import Line
from tests.support.container.shop import (
    MIB,
    OnCrun,
    OnDocker,
    OnPodman,
    OnRunc,
    Open,
    Shop,
    shop_on,
)

from penstock.testing.aio import run_async
from penstock.testing.images import IMAGE, NOT_EXECUTABLE
from penstock.workloads.container import monitor
from penstock.workloads.container.config import (
    ImageRules,
    Pull,
)
from penstock.workloads.container.engine import OWNER_LABEL
from penstock.workloads.container.engines.docker.engine import DockerEngine
from penstock.workloads.container.engines.oci.engine import OciEngine
from penstock.workloads.container.job import BuildSpec, ContainerResult, InputFile, Mode, Stream

NOBODY = "localhost:1/nothing:1"
"""An image of a registry that does not answer."""


async def timeout(shop: Shop) -> ContainerResult:
    return await shop.shell("trap '' TERM; while :; do sleep 1; done", limits=SHORT)


SHORT = {"max_runtime_seconds": 1}


async def memory(shop: Shop) -> ContainerResult:
    return await shop.shell("x=a; while :; do x=$x$x; done", limits={"memory_mb": 16})


async def exit_code(shop: Shop) -> ContainerResult:
    return await shop.shell("exit 3")


async def no_image(shop: Shop) -> ContainerResult:
    shop.config = replace(shop.config, images=ImageRules(pull=Pull.NEVER))
    return await shop.run(image="nothing:1")


async def no_registry(shop: Shop) -> ContainerResult:
    return await shop.run(image=NOBODY)


async def not_allowed(shop: Shop) -> ContainerResult:
    pinned = IMAGE.partition(":")[0] + f"@sha256:{'0' * 64}"
    shop.config = replace(shop.config, images=ImageRules(allowed=(pinned,)))
    return await shop.run("true")


async def no_command(shop: Shop) -> ContainerResult:
    return await shop.run("no-such-command")


async def no_program(shop: Shop) -> ContainerResult:
    return await shop.run(NOT_EXECUTABLE)


async def too_much(shop: Shop) -> ContainerResult:
    script = "i=0; while :; do i=$((i+1)); head -c 100000 /dev/zero > /output/$i; done"
    return await shop.shell(script, outputs=True, limits={"max_artifact_bytes": MIB})


async def too_large(shop: Shop) -> ContainerResult:
    script = "head -c 10000000 /dev/zero > /output/f"
    return await shop.shell(script, outputs=True, limits={"max_artifact_bytes": MIB})


async def cancel(shop: Shop) -> ContainerResult:
    running = await shop.begun(shop.shell("echo up; sleep 1000"))
    shop.stop.request("enough")
    return await running


async def no_input(shop: Shop) -> ContainerResult:
    missing = InputFile(path="f", pointer="blob://nowhere/f")
    return await shop.run("true", inputs=(missing,))


async def failed_build(shop: Shop) -> ContainerResult:
    build = BuildSpec(dockerfile=f"FROM {IMAGE}\nRUN echo broken >&2; exit 9\n", bases=(IMAGE,))
    return await shop.run(image="", mode=Mode.BUILD, build=build)


JOBS: dict[Callable[[Shop], Awaitable[ContainerResult]], tuple[str, tuple[int | None, ...]]] = {
    timeout: ("TIMEOUT", (None,)),
    memory: ("OOM_KILLED", (137,)),
    exit_code: ("NON_ZERO_EXIT", (3,)),
    no_image: ("IMAGE_NOT_FOUND", (125,)),
    no_registry: ("IMAGE_PULL_FAILED", (125,)),
    not_allowed: ("IMAGE_NOT_ALLOWED", (125,)),
    no_command: ("COMMAND_NOT_FOUND", (127,)),
    no_program: ("COMMAND_NOT_RUNNABLE", (126,)),
    too_much: ("OUTPUT_LIMIT", (137, 143)),
    too_large: ("OUTPUT_LIMIT", (153, 137, 143)),
    cancel: ("CANCELLED", (None,)),
    no_input: ("INPUT_UNAVAILABLE", (None, 125)),
    failed_build: ("BUILD_FAILED", (None,)),
}


class FailureCodes:
    """What each engine must tell."""

    @pytest.mark.seed("003", "6.10", "9.4", "10.3")
    @pytest.mark.parametrize("fail", JOBS, ids=lambda fail: fail.__name__)
    @run_async
    async def test_a_job_that_fails_says_why(
        self,
        open_engine: Open,
        tmp_path: Path,
        fail: Callable[[Shop], Awaitable[ContainerResult]],
    ) -> None:
        code, exit_codes = JOBS[fail]
        async with shop_on(open_engine, tmp_path) as shop:
            facts = await shop.engine.facts()
            if fail is no_registry and not facts.can_pull:
                code = "IMAGE_NOT_FOUND"
            if fail is failed_build and not facts.can_build:
                code, exit_codes = "RUNTIME_NOT_SUPPORTED", (125,)
            end = await fail(shop)
        assert end.error is not None, end
        assert end.error.code == code, end
        assert end.exit_code in exit_codes, end

    @run_async
    async def test_a_job_that_is_all_right_is_finished(
        self, open_engine: Open, tmp_path: Path
    ) -> None:
        async with shop_on(open_engine, tmp_path) as shop:
            end = await shop.shell(
                "cat; cat /input/a; echo made > /output/b; echo warn >&2",
                stdin_bytes=b"from stdin, ",
                inputs=(InputFile(path="a", text="from a file"),),
                outputs=True,
            )
            assert (end.error, end.exit_code) == (None, 0)
            assert shop.output.text(Stream.STDOUT) == "from stdin, from a file"
            assert shop.output.text(Stream.STDERR) == "warn\n"
            assert shop.left == ["b"]

    @pytest.mark.seed("003", "9.3")
    @run_async
    async def test_a_child_that_was_killed_for_memory_does_not_fail_who_copes(
        self, open_engine: Open, tmp_path: Path
    ) -> None:
        async with shop_on(open_engine, tmp_path) as shop:
            bomb = "sh -c 'x=a; while :; do x=$x$x; done'; exit 0"
            end = await shop.shell(bomb, limits={"memory_mb": 16})
            assert (end.error, end.exit_code) == (None, 0)

    @run_async
    async def test_a_command_that_ends_itself_with_127_is_no_missing_command(
        self, open_engine: Open, tmp_path: Path
    ) -> None:
        async with shop_on(open_engine, tmp_path) as shop:
            end = await shop.shell("exit 127")
            assert end.error is not None
            assert (end.error.code, end.exit_code) == ("NON_ZERO_EXIT", 127)


class OverASocket(FailureCodes):
    """Engines that can go away while their containers stay."""

    @pytest.mark.seed("003", "1.7", "10.3")
    @run_async
    async def test_an_engine_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        async with shop_on(lambda: DockerEngine(tmp_path / "none.sock"), tmp_path) as shop:
            shop.engine_is_away = True
            end = await shop.run("true")
            assert end.error is not None
            assert (end.error.code, end.exit_code) == ("ENGINE_UNAVAILABLE", None)

    @asynccontextmanager
    async def line(self, socket: Path) -> AsyncIterator[Line]:
        with tempfile.TemporaryDirectory(prefix="pl-") as short:
            async with Line(Path(short, "s"), socket) as line:
                yield line

    @run_async
    async def test_a_job_goes_on_when_the_line_to_its_engine_was_cut(
        self, socket: Path, tmp_path: Path
    ) -> None:
        async with (
            self.line(socket) as line,
            shop_on(lambda: DockerEngine(line.address), tmp_path) as shop,
        ):
            running = await shop.begun(shop.shell("echo up; sleep 6; echo after; exit 4"))
            await line.cut()
            await asyncio.sleep(0.5)
            await line.mend()
            end = await running
            assert end.error is not None
            assert (end.error.code, end.exit_code) == ("NON_ZERO_EXIT", 4), end.error
            assert shop.output.text(Stream.STDOUT) == "up\nafter\n"
            assert not end.stdout_count.gap

    @run_async
    async def test_a_job_is_given_up_when_its_engine_stays_away(
        self, socket: Path, tmp_path: Path
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(monitor, "ENGINE_PATIENCE", 1.0)
            async with (
                self.line(socket) as line,
                shop_on(lambda: DockerEngine(line.address), tmp_path) as shop,
            ):
                shop.engine_is_away = True
                running = await shop.begun(shop.shell("echo up; sleep 1000"))
                await line.cut()
                end = await running
                assert end.error is not None
                assert (end.error.code, end.exit_code) == ("ENGINE_UNAVAILABLE", None), end.error
                await line.mend()
                for found in await shop.engine.find({OWNER_LABEL: shop.owner}):
                    await shop.engine.remove(found.name)


class TestDocker(OnDocker, OverASocket):
    pass


class TestPodman(OnPodman, OverASocket):
    pass


class TestRunc(OnRunc, FailureCodes):
    @pytest.mark.seed("003", "1.7", "10.3")
    @run_async
    async def test_an_engine_that_is_not_there_is_told(
        self, open_engine: Open, tmp_path: Path
    ) -> None:
        open_engine()
        gone = lambda: OciEngine(tmp_path / "oci", runtime="no-such-runtime")  # noqa: E731
        async with shop_on(gone, tmp_path) as shop:
            shop.engine_is_away = True
            end = await shop.run("true")
            assert end.error is not None
            assert (end.error.code, end.exit_code) == ("ENGINE_UNAVAILABLE", None)


class TestCrun(OnCrun, FailureCodes):
    pass
