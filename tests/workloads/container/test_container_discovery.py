"""Which engines are found, and what is said of those that don't work. None is needed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.fake_containers import FakeEngine

from penstock.core.errors import Misconfigured
from penstock.ports.clock import SystemClock
from penstock.testing.aio import run_async
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engines import discovery
from penstock.workloads.container.engines.discovery import Candidate, candidates, open_engine
from penstock.workloads.container.engines.docker import podman

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with nothing on it; sockets need short paths."""
    with tempfile.TemporaryDirectory(prefix="pen") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "bin").mkdir()
        (folder / "own" / "podman").mkdir(parents=True)
        system = {
            "docker": (f"{name}/docker.sock", f"{name}/var/docker.sock"),
            "podman": (f"{name}/podman.sock",),
        }
        (folder / "var").symlink_to(folder)
        monkeypatch.setattr(discovery, "SYSTEM", system)
        monkeypatch.setenv("XDG_RUNTIME_DIR", f"{name}/own")
        monkeypatch.setenv("PATH", f"{name}/bin")
        for variable in discovery.VARIABLES.values():
            monkeypatch.delenv(variable, raising=False)
        yield folder


@asynccontextmanager
async def listening(path: Path, handler: Handler) -> AsyncIterator[None]:
    server = await asyncio.start_unix_server(handler, path)
    try:
        yield
    finally:
        server.close()
        os.unlink(path)


def engine(name: str = "docker", *runtimes: str, **more: Any) -> Handler:
    """What answers as an engine does when it is asked who it is."""
    component = {"docker": "Engine", "podman": "Podman Engine"}[name]
    version = {"Version": "9.8.7", "ApiVersion": "1.41", "Components": [{"Name": component}]}
    known = runtimes or ("runc",)
    info = {
        "Runtimes": {name: {} for name in known},
        "DefaultRuntime": known[0],
        "DockerRootDir": "/var/lib/docker",
        "SecurityOptions": ["name=seccomp,profile=default"],
    } | more

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.startswith(b"GET"):
                body = json.dumps(version if b"/version" in line else info)
            elif line == b"\r\n":
                writer.write(_answer(body))
        writer.close()

    return answer


def _answer(body: str, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def saying(words: bytes) -> Handler:
    """What says that to anybody, and hangs up."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        writer.close()

    return say


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@contextmanager
def without_privilege() -> Iterator[None]:
    """Root may do anything: be somebody else for a moment."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def program(place: Path, name: str, text: str = "#!/bin/sh\nexit 1\n") -> Path:
    path = place / "bin" / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def everything(place: Path) -> list[Path]:
    return sorted(place.rglob("*"))


async def found(place: Path) -> dict[str, Candidate]:
    return {one.name: one for one in await candidates(place / "oci")}


async def refusal(place: Path, **config: Any) -> Misconfigured:
    with pytest.raises(Misconfigured) as refused:
        await open_engine(WorkerConfig(jobs_dir=place / "jobs", **config))
    return refused.value


# -- a machine with nothing on it ---------------------------------------------------


@run_async
async def test_on_a_bare_machine_each_engine_is_named_with_what_to_install(place: Path) -> None:
    seen = await found(place)
    assert list(seen) == ["docker", "podman", "oci/crun", "oci/runc", "gvisor"]
    for one in seen.values():
        assert not one.works
        assert one.facts is None
        assert one.problem
        assert "apt-get install" in one.advice
    assert "not installed" in seen["docker"].problem
    assert f"{place}/docker.sock" in seen["docker"].problem
    assert seen["docker"].problem.count("docker.sock") == 2, "one file is looked at once"
    assert f"{place}/own/podman/podman.sock" in seen["podman"].problem


@run_async
async def test_looking_leaves_nothing_behind(place: Path) -> None:
    for name in ("crun", "runc", "runsc"):
        program(place, name)
    before = everything(place)
    await candidates(place / "oci")
    assert everything(place) == before


@run_async
async def test_without_an_engine_a_worker_is_told_why_of_each(place: Path) -> None:
    error = await refusal(place)
    for word in ("docker: ", "podman: ", "oci: ", "crun", "runc"):
        assert word in error.message
    for package in ("docker.io", "podman", "crun", "runc"):
        assert f"apt-get install {package}" in error.hint


@pytest.mark.parametrize(
    ("name", "daemon", "start"),
    [
        ("docker", "dockerd", "systemctl start docker"),
        ("podman", "podman", "podman system service"),
    ],
)
@run_async
async def test_what_is_installed_and_does_not_run_is_to_be_started(
    place: Path, name: str, daemon: str, start: str
) -> None:
    program(place, daemon)
    one = (await found(place))[name]
    assert "installed, but does not run" in one.problem
    assert start in one.advice
    assert start in (await refusal(place, engine=name)).hint


@run_async
async def test_a_word_that_is_no_engine_is_refused_with_those_that_are(place: Path) -> None:
    for word in ("dokcer", "", "tcp://127.0.0.1:2375", "/run/docker.sock"):
        error = await refusal(place, engine=word)
        assert repr(word) in error.message
        assert "auto, docker, podman, oci, or unix://" in error.hint


# -- sockets --------------------------------------------------------------------------


@run_async
async def test_an_engine_is_found_where_it_listens(place: Path) -> None:
    async with listening(place / "docker.sock", engine("docker", "runc", "crun")):
        docker = (await found(place))["docker"]
        assert docker.works
        assert docker.where == f"{place}/docker.sock"
        assert docker.facts is not None
        assert (docker.facts.version, docker.facts.runtimes) == ("9.8.7", ("runc", "crun"))
        assert docker.problem == docker.advice == ""
        opened = await open_engine(WorkerConfig(jobs_dir=place))
        assert opened.name == "docker"
        await opened.close()


@run_async
async def test_the_engine_of_a_user_without_privilege_is_found(place: Path) -> None:
    async with (
        listening(place / "own" / "docker.sock", engine()),
        listening(place / "own" / "podman" / "podman.sock", engine("podman")),
    ):
        seen = await found(place)
        assert seen["docker"].where == f"{place}/own/docker.sock"
        assert seen["podman"].where == f"{place}/own/podman/podman.sock"


@pytest.mark.seed("003", "10.13")
@run_async
async def test_the_first_that_works_is_taken(place: Path) -> None:
    async with listening(place / "podman.sock", engine("podman")):
        for broken in (None, saying(b"rubbish"), engine("podman")):
            if broken is None:
                opened = await open_engine(WorkerConfig(jobs_dir=place))
            else:
                async with listening(place / "docker.sock", broken):
                    opened = await open_engine(WorkerConfig(jobs_dir=place))
            assert opened.name == "podman"
            await opened.close()
        async with listening(place / "docker.sock", engine()):
            opened = await open_engine(WorkerConfig(jobs_dir=place))
            assert opened.name == "docker"
            await opened.close()
            opened = await open_engine(WorkerConfig(jobs_dir=place, engine="podman"))
            assert opened.name == "podman"
            await opened.close()


@run_async
async def test_podman_behind_dockers_socket_is_called_podman(place: Path) -> None:
    async with listening(place / "docker.sock", engine("podman")):
        seen = await found(place)
        assert not seen["docker"].works
        assert f"{place}/docker.sock is podman's" in seen["docker"].problem
        assert seen["podman"].works
        assert seen["podman"].where == f"{place}/docker.sock"
        for address in ("auto", "podman", f"unix://{place}/docker.sock"):
            opened = await open_engine(WorkerConfig(jobs_dir=place, engine=address))
            assert opened.name == "podman"
            await opened.close()
        assert "podman's" in (await refusal(place, engine="docker")).message


@pytest.mark.parametrize("name", ["docker", "podman"])
@run_async
async def test_the_variable_of_its_tools_names_an_engine_and_no_other(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(discovery.VARIABLES[name], f"unix://{place}/named.sock")
    async with listening(place / f"{name}.sock", engine(name)):
        assert f"{place}/named.sock" in (await refusal(place, engine=name)).message
        async with listening(place / "named.sock", engine(name)):
            assert (await found(place))[name].where == f"{place}/named.sock"


@run_async
async def test_an_engine_on_another_machine_is_refused_in_words(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    docker = (await found(place))["docker"]
    assert "tcp://10.0.0.1:2375" in docker.problem
    assert "unset DOCKER_HOST" in docker.advice
    async with listening(place / "d.sock", engine()):
        opened = await open_engine(WorkerConfig(jobs_dir=place, engine=f"unix://{place}/d.sock"))
        await opened.close()


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\x00\xff\xfe rubbish \r\n\r\n",
        b"220 mail ready\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        _answer("<html>hello</html>", "text/html"),
        _answer("[1, 2, 3]"),
        _answer('{"Version": 7, "ApiVersion": null}'),
        _answer('{"Version": "1", "ApiVersion": "newest"}'),
        b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://localhost/\r\nContent-Length: 0\r\n\r\n",
    ],
)
@run_async
async def test_what_speaks_rubbish_is_no_engine(place: Path, words: bytes) -> None:
    async with listening(place / "docker.sock", saying(words)):
        docker = (await found(place))["docker"]
        assert not docker.works
        assert f"{place}/docker.sock does not work" in docker.problem
        error = await refusal(place, engine=f"unix://{place}/docker.sock")
        assert "does not work" in error.message


@run_async
async def test_what_says_nothing_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PATIENCE", 0.1)
    async with listening(place / "docker.sock", silence):
        docker = (await found(place))["docker"]
        assert "does not answer within 0.1 s" in docker.problem
        assert docker.advice


@run_async
async def test_a_socket_that_takes_no_more_callers_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
        full.bind(f"{place}/docker.sock")
        full.listen(0)
        first.connect(f"{place}/docker.sock")
        assert not (await found(place))["docker"].works


@run_async
async def test_a_socket_that_nobody_listens_at_is_left_over(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{place}/docker.sock")
    docker = (await found(place))["docker"]
    assert f"nothing listens at {place}/docker.sock" in docker.problem
    assert "start" in docker.advice


@run_async
async def test_a_file_or_a_folder_is_no_socket(place: Path) -> None:
    (place / "docker.sock").write_text("hello")
    (place / "podman.sock").mkdir()
    seen = await found(place)
    assert f"{place}/docker.sock is not a socket" in seen["docker"].problem
    assert f"{place}/podman.sock is not a socket" in seen["podman"].problem


@run_async
async def test_a_path_that_is_too_long_or_strange_is_an_error_in_words(place: Path) -> None:
    for path in (f"{place}/{'x' * 200}.sock", "", f"{place}/a\0b", f"{place}/docker.sock/more"):
        error = await refusal(place, engine=f"unix://{path}")
        assert error.message.startswith("the engine does not work: unix://")


@run_async
async def test_a_socket_that_one_may_not_use_says_who_may(place: Path) -> None:
    async with listening(place / "docker.sock", engine()):
        (place / "docker.sock").chmod(0o660)
        if os.geteuid() == 0:
            os.chown(place / "docker.sock", 0, 1)
        else:
            (place / "docker.sock").chmod(0)
        with without_privilege():
            docker = (await found(place))["docker"]
        assert f"may not use {place}/docker.sock" in docker.problem
        assert "run as root, or join the group" in docker.advice


@run_async
async def test_a_socket_in_a_folder_that_one_may_not_enter_needs_root(place: Path) -> None:
    async with listening(place / "own" / "docker.sock", engine()):
        (place / "own").chmod(0)
        with without_privilege():
            error = await refusal(place, engine=f"unix://{place}/own/docker.sock")
        (place / "own").chmod(0o755)
        assert "may not use" in error.message
        assert error.hint == "run as root"


# -- runtimes -------------------------------------------------------------------------


@run_async
async def test_an_engine_without_the_runtime_asked_for_is_passed_over(place: Path) -> None:
    async with (
        listening(place / "docker.sock", engine("docker", "runc", "io.runc.v2")),
        listening(place / "podman.sock", engine("podman", "crun")),
    ):
        opened = await open_engine(WorkerConfig(jobs_dir=place, runtime="crun"))
        assert opened.name == "podman"
        await opened.close()
        error = await refusal(place, runtime="runsc")
        assert "has no runtime 'runsc'; it has runc, io.runc.v2" in error.message
        for address in ("docker", f"unix://{place}/docker.sock"):
            error = await refusal(place, runtime="crun", engine=address)
            assert "has no runtime 'crun'" in error.message
            opened = await open_engine(WorkerConfig(jobs_dir=place, runtime="runc", engine=address))
            await opened.close()


@run_async
async def test_gvisor_may_be_dockers(place: Path) -> None:
    async with listening(place / "docker.sock", engine("docker", "runc", "runsc")):
        gvisor = (await found(place))["gvisor"]
        assert gvisor.works
        assert gvisor.where == f"{place}/docker.sock"


@run_async
async def test_a_runtime_needs_root(place: Path) -> None:
    for name in ("crun", "runc"):
        program(place, name)
    with without_privilege():
        seen = await found(place)
        error = await refusal(place, engine="oci")
    for name in ("crun", "runc"):
        assert f"{name} needs root" in seen[f"oci/{name}"].problem
        assert "root" in seen[f"oci/{name}"].advice
        assert f"{name} needs root" in error.message


@run_async
async def test_a_runtime_that_fails_is_not_taken_for_one_that_works(place: Path) -> None:
    program(place, "crun")
    program(place, "runc", "no program")
    reason = "does not work" if os.geteuid() == 0 else "needs root"
    seen = await found(place)
    error = await refusal(place, engine="oci")
    for name in ("crun", "runc"):
        assert f"{name} {reason}" in seen[f"oci/{name}"].problem
        assert f"{name} {reason}" in error.message


@run_async
async def test_a_runtime_that_nobody_knows_is_not_looked_for_elsewhere(place: Path) -> None:
    error = await refusal(place, engine="oci", runtime="kata")
    assert "no program kata in PATH" in error.message
    assert "apt-get" not in error.hint


def test_what_auto_tries_is_what_can_be_chosen() -> None:
    assert discovery.ORDER == ("docker", "podman", "oci")


@pytest.mark.parametrize("options", [["name=seccomp,profile=unconfined"], ["name=cgroupns"], None])
@run_async
async def test_an_engine_without_seccomp_is_used_only_where_the_settings_accept_it(
    place: Path, options: list[str] | None
) -> None:
    config = WorkerConfig(engine=f"unix://{place}/docker.sock")
    async with listening(place / "docker.sock", engine(SecurityOptions=options)):
        with pytest.raises(Misconfigured, match="without a seccomp profile") as refused:
            await open_engine(config)
        assert "unconfined: true" in refused.value.hint
        docker = (await candidates(place))[0]
        assert (docker.works, "seccomp" in docker.problem) == (False, True)
        await (await open_engine(replace(config, unconfined=True))).close()


@pytest.mark.parametrize("profile", ["default", "builtin", "/etc/docker/seccomp.json"])
@run_async
async def test_an_engine_with_some_seccomp_profile_is_used(place: Path, profile: str) -> None:
    options = ["name=apparmor", f"name=seccomp,profile={profile}"]
    async with listening(place / "docker.sock", engine(SecurityOptions=options)):
        await (await open_engine(WorkerConfig(engine="docker"))).close()


@run_async
async def test_an_engine_without_an_init_program_works_and_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(podman, "INIT_FOLDERS", (str(place),))
    docker_without = engine(InitCommit={"ID": "N/A", "Expected": "de40ad0"})
    async with (
        listening(place / "docker.sock", docker_without),
        listening(place / "podman.sock", engine("podman")),
    ):
        for one in (await candidates(place))[:2]:
            assert (one.works, "no init program" in one.problem) == (True, True), one
            assert "init" in one.advice or "catatonit" in one.advice
        (place / podman.INIT).touch()
        assert (await candidates(place))[1].problem == ""


@run_async
async def test_an_engine_of_a_plug_in_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = EntryPoint("mine", f"{__name__}:plugged_in", discovery.GROUP)
    monkeypatch.setattr(discovery, "entry_points", lambda group: [entry])
    engine = await open_engine(WorkerConfig(engine="mine", jobs_dir=tmp_path))
    assert isinstance(engine, FakeEngine)
    with pytest.raises(Misconfigured, match="no engine 'yours'") as caught:
        await open_engine(WorkerConfig(engine="yours", jobs_dir=tmp_path))
    assert "mine" in (caught.value.hint or "")


def plugged_in(config: WorkerConfig) -> FakeEngine:
    return FakeEngine(SystemClock())
