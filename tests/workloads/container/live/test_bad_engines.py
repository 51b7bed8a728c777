"""Engines that go away or answer nonsense, and images that vanish."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.container.leftovers import cgroups_of, containers_of, leftovers, settled
from tests.support.container.lines import Line
from tests.support.container.serving import Served, code_of, new_id
from tests.support.container_engines import ask, private_docker, private_podman
from tests.workloads.container.live.conftest import GRACE

from penstock.testing.aio import run_async
from penstock.testing.container_engine import processes_with
from penstock.workloads.container.engines.oci.images import ImageStore


def test_an_image_that_is_deleted_before_the_job_starts_is_not_found(
    served: Served, mark: str, tmp_path: Path
) -> None:
    store = ImageStore(served.jobs_dir / "oci" / "images")
    (tmp_path / "tree" / "bin").mkdir(parents=True)
    (tmp_path / "tree" / mark).write_text(mark)  # so that it is an image of its own
    store.import_tree(tmp_path / "tree", "doomed:1", cmd=("/bin/sh",))
    busy = [served.begin(f"echo up; sleep 60; : {mark}") for _ in range(2)]
    name = new_id()
    assert served.submit(name, "true", mark, image="doomed:1")[0] == 202
    store.remove("doomed:1")
    before = time.monotonic()
    for one in busy:
        served.cancel(one)
    cancelled = time.monotonic() - before
    record = served.ended(name)
    assert time.monotonic() - before < 10, (cancelled, record)
    assert (code_of(record), record["exit_code"]) == ("IMAGE_NOT_FOUND", 125)
    assert "doomed:1" in record["error"]["message"]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="pb-") as folder:
        yield Path(folder)


@pytest.mark.seed("003", "6.10")
def test_an_engine_that_dies_in_the_middle_is_told_and_nothing_hangs(
    docker_socket: Path, short: Path, tmp_path: Path
) -> None:
    """`docker_socket` only says whether there is a Docker here; this one is the test's own."""
    mark = f"9{secrets.randbelow(10**12):012}"
    engine = short / "e"
    with private_docker(engine) as address:
        served = Served(tmp_path, f"unix://{address}", stop_grace=GRACE)
        served.program = (sys.executable, "-m", "tests.support.container.impatient")
        served.start()
        try:
            name = served.begin(f"echo up; sleep 50; : {mark}")
            (container,) = json.loads(ask(address, "GET", "/containers/json?all=1")[1])
            os.kill(int((engine / "pid").read_text()), signal.SIGKILL)
            record = served.ended(name)
            assert (code_of(record), record["exit_code"]) == ("ENGINE_UNAVAILABLE", None)
            assert record["stdout"] == "up\n"
            health = served.ask("GET", "/health")[1]
            assert (health["status"], health["engine"]["reachable"]) == ("degraded", False)
            assert served.submit("next", "true")[0] == 202
            time.sleep(0.2)
            waiting = served.ask("GET", "/jobs/next")[1]
            assert (waiting["state"], "engine" in waiting["waiting_for"]) == ("queued", True)
            assert served.ask("DELETE", "/jobs/next")[1]["state"] == "failed"
            assert served.stop() == 0
        finally:
            served.stop()
            end_what_docker_left(mark, engine)
    assert settled(lambda: leftovers(mark, served.jobs_dir)) == []
    assert settled(lambda: without_cgroups(container["Id"])) == []


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_an_engine_without_an_init_program_runs_jobs_all_the_same(
    engine: str, short: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"{engine}_socket")  # whether there is such an engine here
    missing = str(short / "no-such-init")
    if engine == "docker":
        running = private_docker(short / "e", f"--init-path={missing}")
    else:
        running = private_podman(short / "e", init=missing)
    with running as address:
        served = Served(tmp_path, f"unix://{address}", stop_grace=GRACE).start()
        try:
            record = served.shell("echo $$ well")
            assert (record["exit_code"], record["stdout"]) == (0, "1 well\n"), record["error"]
            name = served.begin("echo up; sleep 50")
            served.cancel(name)
        finally:
            served.stop()
        if engine == "docker":  # Podman does not say where it looks for one
            said = doctor(tmp_path, DOCKER_HOST=f"unix://{address}")
            assert "no init program" in said["containers: docker init"]["found"], said


def doctor(folder: Path, **environ: str) -> dict[str, Any]:
    """What `penstock doctor` found, by name."""
    done = subprocess.run(
        [Path(sys.executable).with_name("penstock"), "--data", folder / "d", "doctor", "--json"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return {check["what"]: check for check in json.loads(done.stdout)}


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_an_init_program_comes_first_where_the_engine_has_one(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    socket = request.getfixturevalue(f"{engine}_socket")
    served = Served(tmp_path, f"unix://{socket}", stop_grace=GRACE).start()
    try:
        assert served.shell("[ $$ != 1 ] && echo well")["stdout"] == "well\n"
    finally:
        served.stop()


def end_what_docker_left(mark: str, engine: Path) -> None:
    """What a Docker that was killed leaves running is its test's to end."""
    for pid in {*processes_with(mark), *processes_with(str(engine))}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def without_cgroups(name: str) -> list[str]:
    """Those that can't be removed yet: what was in them is dead, but not gone."""
    for folder in cgroups_of({name}):
        with suppress(OSError):
            os.rmdir(folder)
    return cgroups_of({name})


NONSENSE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\nnonsense!",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"\0" * 1000,
    b"",
)


async def talk_nonsense(address: Path, words: bytes) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(words)
        writer.close()

    return await asyncio.start_unix_server(answer, address)


@pytest.mark.parametrize("words", NONSENSE)
@run_async
async def test_a_worker_does_not_start_on_what_is_no_engine(
    short: Path, tmp_path: Path, words: bytes
) -> None:
    server = await talk_nonsense(short / "s", words)
    process = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("penstock"), "--data", tmp_path / "data"),
        *("container", "serve", "--port", "0", "--engine", f"unix://{short / 's'}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    server.close()
    assert process.returncode not in (0, None)
    assert b"Traceback" not in said
    assert b"engine" in said


@pytest.mark.seed("003", "10.12")
@run_async
async def test_an_engine_that_begins_to_answer_nonsense_is_told_and_comes_back(
    docker_socket: Path, short: Path, tmp_path: Path
) -> None:
    mark = f"9{secrets.randbelow(10**12):012}"
    address = short / "s"
    async with Line(address, docker_socket) as line:
        served = Served(tmp_path, f"unix://{address}", stop_grace=GRACE)
        await asyncio.to_thread(served.start)

        def left() -> list[str]:
            there = containers_of(docker_socket, served.jobs_dir)
            return leftovers(mark, served.jobs_dir) + there

        try:
            assert (await asyncio.to_thread(served.run, "a", "echo", mark))["exit_code"] == 0
            assert await asyncio.to_thread(settled, left) == []
            await line.cut()
            server = await talk_nonsense(address, NONSENSE[0])
            assert (await asyncio.to_thread(served.submit, "b", "echo", mark))[0] == 202
            await asyncio.to_thread(served.ask, "GET", "/jobs/b?wait=1")
            health = (await asyncio.to_thread(served.ask, "GET", "/health"))[1]
            assert (health["status"], health["engine"]["reachable"]) == ("degraded", False)
            server.close()
            address.unlink()
            await line.mend()
            record = await asyncio.to_thread(served.ended, "b")
            assert code_of(record) in ("ENGINE_UNAVAILABLE", "finished"), record["error"]
            assert (await asyncio.to_thread(served.run, "c", "echo", mark))["stdout"] == f"{mark}\n"
            assert await asyncio.to_thread(settled, left) == []
        finally:
            await asyncio.to_thread(served.stop)
