"""What the engine without a daemon promises beyond every engine: nothing is lost when a worker
dies, and nothing is left over whenever it is stopped."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.conftest import needs_runtime
from tests.support.container.leftovers import settled
from tests.support.waiting import eventually

from penstock.testing.aio import run_async
from penstock.testing.container_engine import Lab, collected, first_output, processes_with
from penstock.testing.images import IMAGE
from penstock.workloads.container.engine import (
    OWNER_LABEL,
    ContainerState,
    EngineError,
    EngineUnavailable,
    ImageNotFound,
    Mount,
    PullFailed,
    Unsupported,
)
from penstock.workloads.container.engines.oci import machine as machine_module
from penstock.workloads.container.engines.oci import shim as shim_module
from penstock.workloads.container.engines.oci.engine import OciEngine
from penstock.workloads.container.engines.oci.images import ImageStore
from penstock.workloads.container.engines.programs import process_end
from penstock.workloads.container.files.tree import remove_tree

RUNTIMES = ("runc", "crun")


@pytest.fixture(scope="module")
def root(busybox: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("oci")
    ImageStore(root / "images").import_tree(busybox, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
    return root


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    needs_runtime(request.param)
    return str(request.param)


@asynccontextmanager
async def laboratory(root: Path, runtime: str = "") -> AsyncIterator[Lab]:
    engine = OciEngine(root, runtime=runtime)
    lab = Lab(engine, (await engine.image(IMAGE)).id)
    try:
        yield lab
    finally:
        for name in lab.made:
            await engine.remove(name)
        await engine.close()
    for name in lab.made:
        assert traces(root, name) == []


def traces(root: Path, name: str) -> list[str]:
    """Everything on this machine that still bears a container's name."""
    left = [str(path) for path in (root / "live" / "run" / name,) if path.exists()]
    left += [str(path) for path in (root / "live").glob(f"state/*/{name}*")]
    for folder, _, _ in os.walk("/sys/fs/cgroup"):
        if name in folder:
            left.append(folder)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if name.encode() in words:
                left.append(words.decode(errors="replace"))
    return left


WORKER = """
import asyncio, sys
from pathlib import Path
from penstock.workloads.container.engine import ContainerSpec
from penstock.workloads.container.engines.oci.engine import OciEngine

async def main():
    root, runtime, name, script, owner = sys.argv[1:]
    engine = OciEngine(Path(root), runtime=runtime)
    image = await engine.image("alpine")
    await engine.create(ContainerSpec(name=name, image=image.id, cmd=("sh", "-c", script),
        memory=64 << 20, cpus=1, pids=64, tmp=1 << 20, labels={"penstock.owner": owner}))
    await engine.attach(name, stdin=True)
    await engine.start(name)
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def killed_worker(root: Path, runtime: str, lab: Lab, script: str) -> str:
    """A container whose worker was killed right after it had started it."""
    plan = lab.shell(script)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(root), runtime, plan.name, script, lab.owner],
        stdout=subprocess.PIPE,
    )
    with worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"started\n"
        worker.kill()
    return plan.name


@run_async
async def test_what_runs_when_a_worker_is_killed_is_taken_over_without_loss(
    root: Path, runtime: str
) -> None:
    async with laboratory(root, runtime) as lab:
        # More than a pipe holds, so it can't end before somebody reads.
        name = killed_worker(root, runtime, lab, "seq 400000; exit 9")
        [found] = await lab.engine.find({OWNER_LABEL: lab.owner})
        assert (found.name, found.state) == (name, ContainerState.RUNNING)
        attached = await lab.engine.reattach(name, {})
        async with asyncio.timeout(30):
            stdout, _ = await collected(attached)
            ended = await lab.engine.wait(name)
        assert ended.code == 9
        assert stdout.split() == [b"%d" % n for n in range(1, 400_001)]


@run_async
async def test_what_ended_while_nobody_was_there_tells_its_last_words(
    root: Path, runtime: str
) -> None:
    async with laboratory(root, runtime) as lab:
        name = killed_worker(root, runtime, lab, "echo last words; echo bad >&2; exit 4")
        async with asyncio.timeout(30):
            ended = await lab.engine.wait(name)
            assert ended.code == 4
            [found] = await lab.engine.find({OWNER_LABEL: lab.owner})
            assert found.state is ContainerState.EXITED
            attached = await lab.engine.reattach(name, {})
            assert await collected(attached) == (b"last words\n", b"bad\n")
        usage = await lab.engine.usage(name)
        assert usage.peak_memory_bytes
        assert usage.cpu_seconds


def shim_of(root: Path) -> int:
    """The process that holds the containers of an engine."""
    folder = os.path.realpath(root / "live")
    # A child that it has just started has its arguments for a moment.
    return min(
        pid for pid in processes_with("/shim.py") if os.path.realpath(f"/proc/{pid}/cwd") == folder
    )


def test_a_worker_killed_while_it_starts_the_shim_leaves_no_second_one(tmp_path: Path) -> None:
    folder, slow = tmp_path / "live", tmp_path / "slow.py"
    folder.mkdir()
    slow.write_text(
        f"import os, time, sys; open({str(tmp_path / 'begun')!r}, 'w').close()\n"
        "for _ in range(600):\n"
        f"    if os.path.exists({str(tmp_path / 'go')!r}): break\n"
        "    time.sleep(0.05)\n"
        f"sys.path.insert(0, {str(Path(shim_module.__file__).parent)!r}); import shim\n"
        "shim.main(*sys.argv[1:])\n"
    )
    code = (
        "import sys; from pathlib import Path;"
        "from penstock.workloads.container.engines.oci import client, shim;"
        "shim.__file__ = sys.argv[2]; print('connects', flush=True);"
        "held = client._connected(Path(sys.argv[1]), ''); print('on', flush=True); input()"
    )
    words = (sys.executable, "-c", code, str(folder))
    with subprocess.Popen([*words, str(slow)], stdout=subprocess.DEVNULL) as first:
        eventually((tmp_path / "begun").exists)
        first.kill()
    pipe = subprocess.PIPE
    with subprocess.Popen([*words, shim_module.__file__], stdin=pipe, stdout=pipe) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == b"connects\n"
        (tmp_path / "go").touch()
        assert second.stdout.readline() == b"on\n"
        [found] = set(processes_with(str(folder))) - {second.pid}
        assert found in processes_with(str(slow))
        second.kill()


@pytest.mark.seed("003", "1.7")
@run_async
async def test_a_killed_shim_is_told_and_nothing_runs_on(root: Path, runtime: str) -> None:
    async with laboratory(root, runtime) as lab:
        plan, created = lab.shell("echo on; sleep 60"), lab.plan("echo", "later")
        attached = await lab.begin(plan)
        await first_output(attached)
        await lab.engine.create(created)
        waiting = asyncio.create_task(lab.engine.wait(plan.name))
        await asyncio.sleep(0)
        os.kill(shim_of(root), signal.SIGKILL)
        async with asyncio.timeout(10):
            ended = await waiting
            assert ended.code is None
            assert "exit code is unknown" in ended.error
            await lab.engine.remove(plan.name)
            assert traces(root, plan.name) == []
            with pytest.raises(EngineError, match="shim ended before"):
                await lab.engine.start(created.name)
            # The next one has a shim of its own.
            assert (await lab.run(lab.plan("true"))).exit.code == 0


@run_async
async def test_what_ran_when_worker_and_shim_were_killed_is_ended_by_the_next_worker(
    root: Path, runtime: str
) -> None:
    async with laboratory(root, runtime) as lab:
        name = killed_worker(root, runtime, lab, "echo on; sleep 60")
        os.kill(shim_of(root), signal.SIGKILL)
        async with asyncio.timeout(10):
            [found] = await lab.engine.find({OWNER_LABEL: lab.owner})
            assert found.state is ContainerState.EXITED
            assert (await lab.engine.wait(name)).code is None


@run_async
async def test_the_shim_ends_with_the_last_worker_and_container(root: Path, runtime: str) -> None:
    async with laboratory(root, runtime) as lab:
        await lab.run(lab.plan("true"))
        shim = os.pidfd_open(shim_of(root))
    try:
        assert await process_end(shim, 10)
    finally:
        os.close(shim)


@run_async
async def test_the_shim_of_a_folder_that_was_deleted_ends_with_its_containers(
    busybox: Path, tmp_path: Path, runtime: str
) -> None:
    root = tmp_path / "oci"
    ImageStore(root / "images").import_tree(busybox, IMAGE, env=("PATH=/bin",))
    engine = OciEngine(root, runtime=runtime)
    lab = Lab(engine, (await engine.image(IMAGE)).id)
    mark = f"6{random.randrange(10**8):08}"
    await first_output(await lab.begin(lab.shell(f"echo on; sleep {mark}")))
    shim = os.pidfd_open(shim_of(root))
    remove_tree(root)
    try:
        assert await process_end(shim, 20)
    finally:
        os.close(shim)
    assert await asyncio.to_thread(settled, lambda: processes_with(mark)) == []
    await engine.remove(lab.made[0])
    await engine.close()


@run_async
async def test_after_a_reboot_a_container_has_ended_and_nobody_knows_how(root: Path) -> None:
    async with laboratory(root) as lab:
        plan = lab.plan("true")
        await lab.engine.create(plan)
        (root / "live" / "run" / plan.name / "started").touch()
        os.kill(shim_of(root), signal.SIGKILL)
        async with asyncio.timeout(10):
            assert (await lab.engine.wait(plan.name)).code is None
        [found] = await lab.engine.find({OWNER_LABEL: lab.owner})
        assert found.state is ContainerState.EXITED


@run_async
async def test_what_the_runtime_says_is_passed_on(root: Path, runtime: str, tmp_path: Path) -> None:
    async with laboratory(root, runtime) as lab:
        plan = lab.plan("true", mounts=(Mount(tmp_path / "missing", "/input"),))
        await lab.engine.create(plan)
        with pytest.raises(EngineError, match=r"[Nn]o such file"):
            await lab.engine.start(plan.name)


@run_async
async def test_what_it_does_not_have_is_refused(root: Path) -> None:
    async with laboratory(root) as lab:
        with pytest.raises(EngineError, match="/nowhere"):
            await lab.engine.create(lab.plan("true", workdir="/nowhere"))
        with pytest.raises(Unsupported):
            await lab.engine.create(lab.plan("true", network="bridge"))
        with pytest.raises(Unsupported, match="podium"):
            await lab.engine.create(lab.plan("true", runtime="podium"))


@run_async
async def test_standard_output_can_be_opened_again_and_signals_are_as_usual(
    root: Path, runtime: str
) -> None:
    async with laboratory(root, runtime) as lab:
        ran = await lab.run(lab.shell("echo a > /dev/stdout; echo b > /dev/stderr; umask"))
        assert ran.stdout.split() == [b"a", b"0022"]
        assert ran.stderr == b"b\n"
        ran = await lab.run(lab.plan("grep", "SigIgn", "/proc/self/status"))
        # Those from 32 on are the C library's own.
        assert int(ran.stdout.split()[1], 16) & 0x7FFFFFFF == 0


@run_async
async def test_the_machines_own_devices_keep_their_owner(root: Path, runtime: str) -> None:
    async with laboratory(root, runtime) as lab:
        plan = lab.plan("true")
        await lab.engine.create(plan)
        await lab.engine.start(plan.name)
        await lab.engine.wait(plan.name)
        assert os.stat("/dev/null").st_uid == 0


@run_async
async def test_without_an_init_term_ends_a_program_that_does_not_heed_it(
    root: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "find_init", lambda: None)
    async with laboratory(root, runtime) as lab:
        deaf, heeding = (
            lab.plan("sleep", "60"),
            lab.shell("trap 'exit 3' TERM; echo; while :; do sleep 0.01; done"),
        )
        await lab.begin(deaf)
        await first_output(await lab.begin(heeding))
        for plan, code in ((deaf, 137), (heeding, 3)):
            await lab.engine.signal(plan.name, signal.SIGTERM)
            async with asyncio.timeout(10):
                assert (await lab.engine.wait(plan.name)).code == code


@run_async
async def test_an_image_in_use_stays(root: Path) -> None:
    async with laboratory(root) as lab:
        await lab.engine.create(lab.plan("true"))
        with pytest.raises(EngineError, match="used by"):
            await lab.engine.remove_image(IMAGE)
        assert (await lab.engine.image(IMAGE)).id == lab.image


@run_async
async def test_a_stop_at_any_moment_leaves_nothing(root: Path, runtime: str) -> None:
    """Removed, killed or cancelled some time between its creation and its end."""
    chance = random.Random(5)
    async with laboratory(root, runtime) as lab:
        for _ in range(12):
            plan = lab.shell("echo on; sleep 0.02; sleep 0.02 & wait")
            await lab.engine.create(plan)
            attached = await lab.engine.attach(plan.name, stdin=True)
            starting = asyncio.create_task(lab.engine.start(plan.name))
            await asyncio.sleep(chance.uniform(0, 0.08))
            match chance.randrange(3):
                case 0:
                    starting.cancel()
                case 1:
                    await lab.engine.kill(plan.name)
            await asyncio.wait([starting], timeout=0 if chance.random() < 0.5 else None)
            attached.close()
            starting.cancel()
            await asyncio.wait([starting])
            await lab.engine.remove(plan.name)
            assert traces(root, plan.name) == []


@run_async
async def test_what_a_dead_worker_did_not_finish_making_is_cleared(root: Path) -> None:
    for name in ("penstock-half", "penstock-trial-1"):
        half = root / "live" / "run" / name
        half.mkdir(parents=True)
        os.utime(half, (time.time() - 3600,) * 2)
    fresh = root / "live" / "run" / "penstock-being-made"
    fresh.mkdir()
    engine = OciEngine(root)
    await engine.facts()
    await engine.close()
    left = {path.name for path in (root / "live" / "run").iterdir()}
    fresh.rmdir()
    assert left == {"penstock-being-made"}


# -- what is missing is told ------------------------------------------------------


@run_async
async def test_without_root_or_a_runtime_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineUnavailable, match="apt-get install"):
        await OciEngine(tmp_path, runtime="no-such-runtime").facts()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineUnavailable, match="crun or runc"):
        await OciEngine(tmp_path).facts()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EngineUnavailable, match="needs root"):
        await OciEngine(tmp_path).facts()


@run_async
async def test_a_runtime_that_does_not_work_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_runtime("runc")
    broken = tmp_path / "bin" / "crun"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    engine = OciEngine(tmp_path / "root")
    facts = await engine.facts()
    await engine.close()
    assert facts.version.startswith("runc ")
    with pytest.raises(EngineUnavailable, match="No runtime works here"):
        await OciEngine(tmp_path / "root", runtime="crun").facts()


@run_async
async def test_a_pull_goes_through_skopeo(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "skopeo"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    engine = OciEngine(root)
    for said, error in (("manifest unknown", ImageNotFound), ("no route to host", PullFailed)):
        program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
        program.chmod(0o755)
        with pytest.raises(error, match=said):
            await engine.pull("place/tool:1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ImageNotFound, match="install skopeo and umoci"):
        await engine.pull("place/tool:1")
    await engine.close()
