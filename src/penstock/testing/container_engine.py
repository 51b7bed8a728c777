"""What every `ContainerEngine` of container jobs must do, as tests against a real one.

class TestMyEngine(EngineContract):
    @pytest.fixture
    def make(self):
        return lambda: MyEngine(...)      # each call: another client of the same engine

The engine must have the image `penstock.testing.images.IMAGE`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.aio import run_async
from penstock.testing.images import IMAGE, NOT_EXECUTABLE
from penstock.workloads.container.engine import (
    JOB_LABEL,
    OWNER_LABEL,
    AttachSession,
    CommandNotFound,
    CommandNotRunnable,
    ContainerEngine,
    ContainerNotFound,
    ContainerSpec,
    ContainerState,
    EngineError,
    ExitStatus,
    Gpus,
    ImageNotFound,
    Mount,
    Unsupported,
    command_failure,
)
from penstock.workloads.container.job import Stream

MIB = 1 << 20
PATIENCE = 30.0
MakeEngine = Callable[[], ContainerEngine]


@dataclass
class Ran:
    """What a container did."""

    exit: ExitStatus
    stdout: bytes
    stderr: bytes


@dataclass
class Lab:
    """An engine, and what a test made with it."""

    engine: ContainerEngine
    image: str
    owner: str = field(default_factory=lambda: secrets.token_hex(6))
    made: list[str] = field(default_factory=list)

    def plan(self, *cmd: str, **others: Any) -> ContainerSpec:
        name = f"penstock-{secrets.token_hex(12)}"
        self.made.append(name)
        usual: dict[str, Any] = {
            "image": self.image,
            "memory": 64 * MIB,
            "cpus": 1.0,
            "pids": 64,
            "tmp": 8 * MIB,
            "labels": {OWNER_LABEL: self.owner, JOB_LABEL: name},
        }
        return ContainerSpec(name=name, cmd=cmd, **{**usual, **others})

    def shell(self, script: str, **others: Any) -> ContainerSpec:
        return self.plan("sh", "-c", script, **others)

    async def run(self, plan: ContainerSpec, stdin: bytes = b"") -> Ran:
        """From create to exit."""
        await self.engine.create(plan)
        attached = await self.engine.attach(plan.name, stdin=True)
        heard = asyncio.create_task(collected(attached))
        await self.engine.start(plan.name)
        await attached.send(stdin)
        await attached.end_input()
        async with asyncio.timeout(PATIENCE):
            ended = await self.engine.wait(plan.name)
            stdout, stderr = await heard
        attached.close()
        return Ran(ended, stdout, stderr)

    async def refusal(self, plan: ContainerSpec) -> EngineError | None:
        """What the engine, or the init program in the container, says of its command."""
        try:
            ran = await self.run(plan)
        except EngineError as error:
            return error
        assert ran.exit.code
        return command_failure(ran.stderr)

    async def begin(self, plan: ContainerSpec) -> AttachSession:
        """Created, attached and started; its input is at its end."""
        await self.engine.create(plan)
        attached = await self.engine.attach(plan.name, stdin=True)
        await self.engine.start(plan.name)
        await attached.end_input()
        return attached


async def collected(attached: AttachSession) -> tuple[bytes, bytes]:
    parts: dict[Stream, list[bytes]] = {Stream.STDOUT: [], Stream.STDERR: []}
    async for chunk in attached.output():
        parts[chunk.stream].append(chunk.data)
    return b"".join(parts[Stream.STDOUT]), b"".join(parts[Stream.STDERR])


async def first_output(attached: AttachSession) -> bytes:
    """The first bytes; what comes later goes on being read by nobody."""
    async with asyncio.timeout(PATIENCE):
        async for chunk in attached.output():
            return chunk.data
    raise AssertionError("it ended without a word")


def processes_with(mark: str) -> list[int]:
    """Processes on this machine whose arguments hold a mark."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                words = Path("/proc", entry, "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in words:
                found.append(int(entry))
    return found


class EngineContract:
    """The promises of `penstock.workloads.container.engine.ContainerEngine`."""

    runtime = ""
    """The runtime that all plans name; empty is the engine's default."""
    own_kernel = False
    """Whether containers have a kernel of their own (gVisor), which hides some facts."""

    @pytest.fixture
    def make(self) -> MakeEngine:
        raise NotImplementedError

    @asynccontextmanager
    async def lab(self, make: MakeEngine) -> AsyncIterator[Lab]:
        """Everything that a test makes is gone afterwards, or the test has failed."""
        engine = make()
        lab = Lab(engine, (await engine.image(IMAGE)).id)
        plan = lab.plan
        if self.runtime:
            lab.plan = lambda *cmd, **others: plan(  # type: ignore[method-assign]
                *cmd, **{"runtime": self.runtime, "pids": 512, **others}
            )
        try:
            yield lab
        finally:
            for name in lab.made:
                await engine.remove(name)
            left = await engine.find({OWNER_LABEL: lab.owner})
            await engine.close()
        assert left == []

    # -- what it says of itself ---------------------------------------------------

    @pytest.mark.seed("003", "10.13")
    @run_async
    async def test_it_says_what_it_is(self, make: MakeEngine) -> None:
        engine = make()
        facts = await engine.facts()
        await engine.close()
        assert facts.name == engine.name
        assert facts.version
        assert facts.where

    @run_async
    async def test_an_image_is_found_by_name_and_by_id(self, make: MakeEngine) -> None:
        engine = make()
        image = await engine.image(IMAGE)
        assert image.id.startswith("sha256:")
        assert image.cmd == ("/bin/sh",)
        assert (await engine.image(image.id)).id == image.id
        assert (await engine.image(IMAGE.partition(":")[0])).id == image.id
        await engine.close()

    @run_async
    async def test_an_unknown_image_is_not_found(self, make: MakeEngine) -> None:
        engine = make()
        for name in ("nobody/has-this:1", "alpine:no-such-tag", "sha256:" + "0" * 64):
            with pytest.raises(ImageNotFound):
                await engine.image(name)
        await engine.close()

    @run_async
    async def test_a_container_of_an_image_that_is_gone_is_not_made(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            with pytest.raises(ImageNotFound):
                await lab.engine.create(lab.plan("true", image="sha256:" + "0" * 64))

    # -- running ------------------------------------------------------------------

    @run_async
    async def test_the_streams_are_separate_and_the_exit_code_is_told(
        self, make: MakeEngine
    ) -> None:
        async with self.lab(make) as lab:
            ran = await lab.run(lab.shell("echo out; echo err >&2; exit 3"))
            assert (ran.stdout, ran.stderr) == (b"out\n", b"err\n")
            assert ran.exit == ExitStatus(3)

    @run_async
    async def test_input_arrives_whole_and_ends(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            data = os.urandom(MIB)
            ran = await lab.run(lab.plan("cat"), data)
            assert ran.stdout == data
            assert ran.exit == ExitStatus(0)

    @run_async
    async def test_without_a_command_the_image_has_its_own(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            ran = await lab.run(lab.plan(), b"echo from the shell\n")
            assert ran.stdout == b"from the shell\n"

    @run_async
    async def test_one_that_does_not_read_its_input_is_no_trouble(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            ran = await lab.run(lab.plan("true"), b"x" * MIB)
            assert ran.exit == ExitStatus(0)

    @run_async
    async def test_the_environment_is_the_images_and_the_plans(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            odd = 'a "b" $c\n=d'
            ran = await lab.run(lab.plan("env", env={"COLOUR": "blue", "ODD": odd}))
            text = ran.stdout.decode()
            names = {line.partition("=")[0] for line in text.splitlines() if "=" in line}
            assert "COLOUR=blue" in text
            assert f"ODD={odd}" in text
            assert "PATH=/bin" in text
            assert names - {""} <= {
                "COLOUR",
                "ODD",
                "PATH",
                "HOME",
                "HOSTNAME",
                "TERM",
                "container",
            }

    @run_async
    async def test_a_command_that_is_missing_is_told(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.plan("no-such-command", "x")
            assert isinstance(await lab.refusal(plan), CommandNotFound)

    @run_async
    async def test_a_command_that_is_no_program_is_told(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.plan(NOT_EXECUTABLE)
            assert isinstance(await lab.refusal(plan), CommandNotRunnable)

    @run_async
    async def test_exit_127_of_a_shell_is_an_exit(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            ran = await lab.run(lab.shell("no-such-command"))
            assert ran.exit.code == 127

    @run_async
    async def test_output_comes_while_it_runs(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.shell("echo now; sleep 60")
            attached = await lab.begin(plan)
            assert await first_output(attached) == b"now\n"
            [found] = await lab.engine.find({JOB_LABEL: plan.name})
            assert found.state is ContainerState.RUNNING
            attached.close()
            await lab.engine.kill(plan.name)

    @pytest.mark.seed("003", "6.1")
    @run_async
    async def test_much_output_is_complete(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            ran = await lab.run(lab.shell("head -c 20000000 /dev/zero; echo done >&2"))
            assert len(ran.stdout) == 20_000_000
            assert ran.stderr == b"done\n"

    @run_async
    async def test_several_run_at_once(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plans = [lab.shell(f"echo {n}; exit {n}") for n in range(4)]
            ran = await asyncio.gather(*(lab.run(plan) for plan in plans))
            assert [one.exit.code for one in ran] == [0, 1, 2, 3]
            assert [one.stdout for one in ran] == [b"0\n", b"1\n", b"2\n", b"3\n"]

    @run_async
    async def test_a_name_is_used_once(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.plan("true")
            await lab.engine.create(plan)
            with pytest.raises(EngineError):
                await lab.engine.create(plan)

    # -- ending -------------------------------------------------------------------

    @run_async
    async def test_term_ends_a_plain_program(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.shell("echo on; sleep 60")
            attached = await lab.begin(plan)
            await first_output(attached)
            attached.close()
            await lab.engine.signal(plan.name, signal.SIGTERM)
            async with asyncio.timeout(PATIENCE):
                ended = await lab.engine.wait(plan.name)
            assert ended.code == 143

    @run_async
    async def test_term_can_be_heeded_and_ignored(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            script = "trap 'echo heard' TERM; echo on; while :; do sleep 0.1; done"
            plan = lab.shell(script)
            attached = await lab.begin(plan)
            output = attached.output()
            assert (await anext(output)).data == b"on\n"
            await lab.engine.signal(plan.name, signal.SIGTERM)
            async with asyncio.timeout(PATIENCE):
                assert (await anext(output)).data == b"heard\n"
            await lab.engine.kill(plan.name)
            async with asyncio.timeout(PATIENCE):
                assert (await lab.engine.wait(plan.name)).code == 137
            attached.close()

    @run_async
    async def test_a_kill_ends_everything_in_it(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            mark = f"7{secrets.randbelow(10**8):08}"
            plan = lab.shell(f"sleep {mark} & (trap '' TERM; sleep {mark}) & echo on; wait")
            attached = await lab.begin(plan)
            await first_output(attached)
            if not self.own_kernel:
                assert processes_with(mark)
            attached.close()
            await lab.engine.kill(plan.name)
            async with asyncio.timeout(PATIENCE):
                ended = await lab.engine.wait(plan.name)
            assert ended.code == 137
            assert not ended.oom
            await lab.engine.remove(plan.name)
            assert processes_with(mark) == []

    @run_async
    async def test_a_reader_that_stands_still_does_not_hold_up_a_kill(
        self, make: MakeEngine
    ) -> None:
        async with self.lab(make) as lab:
            plan = lab.shell("while :; do echo yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; done")
            attached = await lab.begin(plan)
            await first_output(attached)
            async with asyncio.timeout(PATIENCE):
                attached.close()
                await lab.engine.kill(plan.name)
                await lab.engine.wait(plan.name)
                await lab.engine.remove(plan.name)

    @run_async
    async def test_removal_ends_what_runs_and_leaves_nothing(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            mark = f"8{secrets.randbelow(10**8):08}"
            plan = lab.shell(f"echo on; sleep {mark}")
            attached = await lab.begin(plan)
            await first_output(attached)
            attached.close()
            await lab.engine.remove(plan.name)
            assert processes_with(mark) == []
            assert plan.name not in _mounts()
            assert _cgroups(plan.name) == []
            assert await lab.engine.find({JOB_LABEL: plan.name}) == []
            await lab.engine.remove(plan.name)

    @run_async
    async def test_several_may_remove_it_at_once(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.shell("echo on; sleep 60")
            attached = await lab.begin(plan)
            await first_output(attached)
            await asyncio.gather(*(lab.engine.remove(plan.name) for _ in range(3)))
            assert await lab.engine.find({JOB_LABEL: plan.name}) == []

    @run_async
    async def test_what_is_not_there_can_be_ended_but_not_waited_for(
        self, make: MakeEngine
    ) -> None:
        async with self.lab(make) as lab:
            await lab.engine.signal("penstock-nobody", signal.SIGTERM)
            await lab.engine.kill("penstock-nobody")
            await lab.engine.remove("penstock-nobody")
            with pytest.raises(ContainerNotFound):
                await lab.engine.wait("penstock-nobody")

    @run_async
    async def test_an_end_can_be_asked_for_again(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.shell("exit 5")
            await lab.run(plan)
            assert (await lab.engine.wait(plan.name)).code == 5
            await lab.engine.kill(plan.name)
            [found] = await lab.engine.find({JOB_LABEL: plan.name})
            assert found.state is ContainerState.EXITED
            assert found.labels[OWNER_LABEL] == lab.owner

    # -- another worker -----------------------------------------------------------

    @run_async
    async def test_another_client_finds_and_takes_over_what_runs(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        async with self.lab(make) as lab:
            script = "echo on; while [ ! -e /output/go ]; do sleep 0.05; done; echo late; exit 7"
            folder = open_folder(tmp_path / "output")
            plan = lab.shell(script, mounts=(Mount(folder, "/output", read_only=False),))
            attached = await lab.begin(plan)
            await first_output(attached)
            attached.close()
            other = make()
            [found] = await other.find({OWNER_LABEL: lab.owner})
            assert (found.name, found.state) == (plan.name, ContainerState.RUNNING)
            again = await other.reattach(plan.name, {Stream.STDOUT: 3})
            heard = asyncio.create_task(collected(again))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(other.wait(plan.name))
            (folder / "go").touch()
            async with asyncio.timeout(PATIENCE):
                assert (await waiting).code == 7
                stdout, _ = await heard
            assert stdout.endswith(b"late\n")
            await other.close()

    @run_async
    async def test_output_that_nobody_read_is_there_for_the_next_client(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        """Whether the container runs or has ended when it comes, and to the byte."""
        script = (
            "echo on; while [ ! -e /output/go ]; do sleep 0.05; done; i=0;"
            " while [ $i -lt 2000 ]; do echo line $i; echo err $i >&2; i=$((i+1)); done;"
            " head -c 100000 /dev/zero | tr '\\0' x; printf end; touch /output/done;"
            " while [ ! -e /output/leave ]; do sleep 0.05; done; echo last; exit 7"
        )
        lines = "".join(f"line {n}\n" for n in range(2000))
        expected = f"on\n{lines}{'x' * 100_000}endlast\n".encode()
        for running in (True, False):
            async with self.lab(make) as lab:
                folder = open_folder(tmp_path / f"output-{running}")
                plan = lab.shell(script, mounts=(Mount(folder, "/output", read_only=False),))
                attached = await lab.begin(plan)
                got = await first_output(attached)
                attached.close()
                (folder / "go").touch()
                async with asyncio.timeout(PATIENCE):
                    while not (folder / "done").exists():  # noqa: ASYNC110 - only the container knows
                        await asyncio.sleep(0.02)
                    other = make()
                    waiting = asyncio.create_task(other.wait(plan.name))
                    if not running:
                        (folder / "leave").touch()
                        await waiting
                    again = await other.reattach(plan.name, {Stream.STDOUT: len(got)})
                    heard = asyncio.create_task(collected(again))
                    await asyncio.sleep(0.1)
                    (folder / "leave").touch()
                    stdout, stderr = await heard
                    assert (await waiting).code == 7
                await other.close()
                assert got + stdout == expected
                assert stderr == "".join(f"err {n}\n" for n in range(2000)).encode()

    @run_async
    async def test_one_that_was_never_started_says_so(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.plan("true")
            await lab.engine.create(plan)
            other = make()
            [found] = await other.find({OWNER_LABEL: lab.owner, JOB_LABEL: ""})
            await other.close()
            assert found.state is ContainerState.CREATED

    # -- limits -------------------------------------------------------------------

    @run_async
    async def test_too_much_memory_is_a_kill_that_is_told(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            bomb = "x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo ${#x}"
            ran = await lab.run(lab.shell(bomb, memory=32 * MIB))
            assert ran.exit.oom
            assert ran.exit.code not in (0, None)

    @pytest.mark.seed("003", "5.5")
    @run_async
    async def test_a_fork_bomb_stays_within_its_limit(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            script = "i=0; while [ $i -lt 900 ]; do sleep 20 & i=$((i+1)); done; echo $i"
            plan = lab.shell(script)
            ran = await lab.run(plan)
            assert b"fork" in ran.stderr or ran.exit.code != 0

    @run_async
    async def test_a_file_has_its_limit(self, make: MakeEngine, tmp_path: Path) -> None:
        async with self.lab(make) as lab:
            mounts = (Mount(open_folder(tmp_path / "output"), "/output", read_only=False),)
            plan = lab.shell("head -c 900000 /dev/zero > /output/f", mounts=mounts, file_size=4096)
            ran = await lab.run(plan)
            assert ran.exit.code != 0
            assert (mounts[0].source / "f").stat().st_size <= 4096

    @pytest.mark.seed("003", "10.12")
    @run_async
    async def test_what_it_used_is_told_or_unknown(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.shell("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 0.3")
            attached = await lab.begin(plan)
            drained = asyncio.create_task(collected(attached))
            await lab.engine.wait(plan.name)
            usage = await lab.engine.usage(plan.name)
            await drained
            assert usage.cpu_seconds is None or 0.01 < usage.cpu_seconds < 60
            assert usage.peak_memory_bytes is None or 0 < usage.peak_memory_bytes <= 64 * MIB

    # -- the sandbox --------------------------------------------------------------

    @pytest.mark.seed("003", "10.4")
    @run_async
    async def test_it_is_locked_down(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            ran = await lab.run(lab.shell(PROBE, shm=20 * MIB))
            said = dict(line.split("=", 1) for line in ran.stdout.decode().splitlines())
        assert said["uid"] == "65534"
        assert said["gid"] == "65534"
        assert int(said["CapEff"], 16) == int(said["CapPrm"], 16) == int(said["CapBnd"], 16) == 0
        if not self.own_kernel:
            assert said["NoNewPrivs"] == "1"
            assert said["Seccomp"] == "2"
            assert said["core"] == "0"
        assert said["interfaces"].split() == ["lo"]
        assert said["root"] == "read-only"
        assert (said["tmp"], said["tmp_mode"], said["tmp_kb"]) == ("writable", "1777", "8192")
        assert (said["shm"], said["shm_mode"], said["shm_kb"]) == ("writable", "1777", "20480")
        assert (said["home"], said["home_file"]) == ("/tmp", "writable")
        assert said["tmp_exec"] == "no"
        assert said["userns"] == "no"
        assert said["mount"] == "no"
        assert int(said["open_files"]) <= 4096
        # gVisor has a /dev/fuse of its own, which is not the machine's.
        assert set(said["devices"].split()) <= _DEVICES | ({"fuse"} if self.own_kernel else set())
        assert said["host"] == "no"

    @pytest.mark.seed("003", "5.5")
    @run_async
    async def test_tmp_has_its_size(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            ran = await lab.run(lab.shell("head -c 12000000 /dev/zero > /tmp/f"))
            assert ran.exit.code != 0

    @run_async
    async def test_an_input_folder_can_be_read_only_and_an_output_folder_written(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        async with self.lab(make) as lab:
            source, target = open_folder(tmp_path / "in"), open_folder(tmp_path / "out")
            (source / "a.txt").write_text("given")
            mounts = (Mount(source, "/input"), Mount(target, "/output", read_only=False))
            script = "cat /input/a.txt > /output/b.txt; touch /input/c || echo refused"
            ran = await lab.run(lab.shell(script, mounts=mounts))
            assert ran.stdout == b"refused\n"
            assert (target / "b.txt").read_text() == "given"

    @run_async
    async def test_another_user_and_folder_can_be_asked_for(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            ran = await lab.run(lab.shell("id -u; id -g; pwd", user=(1234, 99), workdir="/work"))
            assert ran.stdout.split() == [b"1234", b"99", b"/work"]

    @run_async
    async def test_an_entrypoint_takes_the_place_of_the_images_own_and_of_its_command(
        self, make: MakeEngine
    ) -> None:
        async with self.lab(make) as lab:
            for cmd, entrypoint, said in (
                (("b",), ("echo", "a"), b"a b\n"),
                ((), ("echo", "alone"), b"alone\n"),
                (("echo", "whole"), (), b"whole\n"),
            ):
                ran = await lab.run(lab.plan(*cmd, entrypoint=entrypoint))
                assert (ran.stdout, ran.exit) == (said, ExitStatus(0))
            wrong = lab.plan("x", entrypoint=("no-such-program",))
            assert isinstance(await lab.refusal(wrong), CommandNotFound)

    @run_async
    async def test_the_root_file_system_is_writable_if_asked_for_and_the_image_stays_as_it_is(
        self, make: MakeEngine
    ) -> None:
        async with self.lab(make) as lab:
            script = "ls /work; echo yes > /work/made && cat /work/made"
            for _ in range(2):
                ran = await lab.run(lab.shell(script, user=(0, 0), read_only_root=False))
                assert (ran.stdout, ran.exit) == (b"yes\n", ExitStatus(0))
            ran = await lab.run(lab.shell("id -u; touch /work/made", user=(0, 0)))
            assert ran.stdout == b"0\n"
            assert ran.exit.code != 0

    @run_async
    async def test_a_cache_can_be_mounted_where_the_image_has_no_folder(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        async with self.lab(make) as lab:
            source = open_folder(tmp_path / "models")
            (source / "weights").write_text("1 2 3")
            script = "cat /cache/models/weights; touch /cache/models/x || echo refused"
            plan = lab.shell(script, mounts=(Mount(source, "/cache/models"),))
            ran = await lab.run(plan)
            assert ran.stdout == b"1 2 3refused\n"
            ran = await lab.run(lab.shell("ls /cache"))
            assert ran.exit.code != 0

    @run_async
    async def test_gpus_that_are_not_there_are_refused_with_a_reason(
        self, make: MakeEngine
    ) -> None:
        async with self.lab(make) as lab:
            if not (await lab.engine.facts()).no_gpus:
                pytest.skip("this machine has GPUs")
            for gpus in (Gpus(-1), Gpus(2), Gpus(ids=("0",))):
                with pytest.raises(Unsupported, match="GPU"):
                    await lab.engine.create(lab.plan("true", gpus=gpus))

    @run_async
    async def test_a_user_namespace_is_made_or_refused(self, make: MakeEngine) -> None:
        async with self.lab(make) as lab:
            plan = lab.shell("cat /proc/self/uid_map", user_namespace=True)
            if (await lab.engine.facts()).user_namespaces:
                ran = await lab.run(plan)
                assert ran.stdout.split()[:2] != [b"0", b"0"]
            else:
                with pytest.raises(Unsupported, match="user namespace"):
                    await lab.engine.create(plan)


_DEVICES = frozenset(
    [
        "console",
        "core",
        "fd",
        "full",
        "mqueue",
        "net",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    ]
)

PROBE = r"""
field() { grep "^$1:" /proc/self/status | { read -r _ value _; echo "$1=$value"; }; }
echo "uid=$(id -u)"
echo "gid=$(id -g)"
for name in CapEff CapPrm CapBnd NoNewPrivs Seccomp; do field $name; done
echo "core=$(ulimit -c)"
echo "open_files=$(ulimit -n)"
echo "interfaces=$(ls /sys/class/net 2>/dev/null | tr '\n' ' ')"
grep -q : /proc/net/dev && echo "interfaces=$(grep : /proc/net/dev | cut -d: -f1 | tr -d ' ' \
  | tr '\n' ' ')"
touch /file 2>/dev/null && echo root=writable || echo root=read-only
touch /tmp/file && echo tmp=writable || echo tmp=read-only
touch /dev/shm/file && echo shm=writable || echo shm=read-only
for folder in tmp dev/shm; do
  echo "${folder#dev/}_mode=$(stat -c %a /$folder)"
  df -k /$folder | tail -1 | { read -r _ size _; echo "${folder#dev/}_kb=$size"; }
done
echo "home=$HOME"
touch "$HOME/file" && echo home_file=writable || echo home_file=read-only
printf '#!/bin/sh\necho ran\n' > /tmp/run; chmod +x /tmp/run
/tmp/run >/dev/null 2>&1 && echo tmp_exec=yes || echo tmp_exec=no
unshare -U true 2>/dev/null && echo userns=yes || echo userns=no
mount -t tmpfs none /tmp 2>/dev/null && echo mount=yes || echo mount=no
echo "devices=$(ls /dev | tr '\n' ' ')"
[ -e /etc/debian_version ] || [ -e /var/lib ] && echo host=yes || echo host=no
"""
"""Asks the container itself what it can do; one answer a line."""


def open_folder(path: Path) -> Path:
    """A folder that any user may write in."""
    path.mkdir()
    path.chmod(0o777)
    return path


def _mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def _cgroups(name: str) -> list[str]:
    return [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if name in folder]
