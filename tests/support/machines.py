"""Two machines on one: network namespaces that a cable joins."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
from tests.support.waiting import eventually

APPLICATION = """
    import asyncio
    import time
    from pathlib import Path

    import penstock

    app = penstock.App()

    @app.job("job.text.shout")
    def shout(text: str) -> str:
        return text.upper() + "!"

    @app.job("job.text.turn")
    def turn(text: str) -> str:
        return text[::-1]

    @app.job("job.wait", idempotent=True)
    async def wait(name: str) -> str:
        with open(name + ".starts", "a") as file:
            file.write("x")
        while not Path(name).exists():
            await asyncio.sleep(0.01)
        return "it came"

    @app.job("job.stubborn")
    def stubborn(name: str) -> None:
        with open(name + ".starts", "a") as file:
            file.write("x")
        while not Path(name).exists():
            time.sleep(0.01)
"""


@cache
def may_make_machines() -> bool:
    """Whether this user may make network namespaces, and has the tools."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("iptables") is None:
        return False
    name = f"pst-{token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class Machine:
    """A network namespace with a folder, and the processes that were started there."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        self.inside = ["ip", "netns", "exec", name]
        """What a command is started with that is to run there."""
        self.env: dict[str, str] = {}
        folder.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *args: str, log: str) -> subprocess.Popen[str]:
        """`penstock` with these words; what it says goes to a file."""
        with open(self.folder / log, "a") as out:
            process = subprocess.Popen(
                self._command(*args),
                cwd=self.folder,
                env=self._env(),
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def penstock(self, *args: str, code: int = 0) -> str:
        """A command that must end so; what it prints."""
        done = subprocess.run(
            self._command(*args),
            cwd=self.folder,
            env=self._env(),
            text=True,
            capture_output=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr, done
        return done.stdout.strip() if code == 0 else done.stderr.strip()

    def json(self, *args: str) -> Any:
        return msgspec.json.decode(self.penstock(*args, "--json"))

    def log(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def says(self, name: str, text: str) -> None:
        eventually(lambda: text in self.log(name), f"{text!r} in {self.log(name)}")

    def _command(self, *args: str) -> list[str]:
        return [*self.inside, sys.executable, "-m", "penstock.cli", *args]

    def _env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        data = {"PENSTOCK_DATA_DIR": str(self.folder / "data"), "NO_COLOR": "1"}
        return {**kept, **data, **self.env}

    def run(self, *words: str) -> None:
        subprocess.run([*self.inside, *words], check=True)

    def cut(self) -> None:
        """Nothing gets in or out any more, and nobody is told."""
        for chain in ("INPUT", "OUTPUT"):
            self.run("iptables", "-A", chain, "-j", "DROP")

    def mend(self) -> None:
        self.run("iptables", "-F")

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


class Machines:
    """The engine's machine and a worker's."""

    def __init__(self, here: Machine, there: Machine) -> None:
        self.here, self.there = here, there

    @property
    def address(self) -> str:
        return f"penstock://{self.here.address}:7480"

    def engine(self, *args: str) -> subprocess.Popen[str]:
        """Start it, and wait until it answers."""
        (self.here.folder / "up.log").unlink(missing_ok=True)
        options = ("--no-worker", "--no-http", "--link", f"{self.here.address}:7480")
        process = self.here.start("up", *options, *args, log="up.log")
        self.here.says("up.log", "ready")
        return process

    def token(self, *args: str) -> str:
        return self.here.penstock("worker", "token", "create", *args)

    def worker(self, *args: str, name: str = "w1") -> subprocess.Popen[str]:
        options = ("--connect", self.address, "--id", name, "--app", "tasks:app")
        return self.there.start("worker", *options, *args, log=f"{name}.log")

    def status(self, name: str = "w1") -> str:
        found = [one for one in self.here.json("worker", "list") if one["worker_id"] == name]
        return found[0]["status"] if found else ""

    def ready(self, name: str = "w1") -> None:
        eventually(lambda: self.status(name) == "ready", f"{name}: {self.there.log(f'{name}.log')}")

    def shout(self, text: str) -> str:
        given = msgspec.json.encode({"text": text}).decode()
        words = ("submit", "job.text.shout", "--input", given, "--wait", "--wait-timeout", "40s")
        return self.here.penstock(*words)

    def waiting_job(self, job_id: str) -> Path:
        """A job that has started on the other machine, and ends when the file is there."""
        gate = self.there.folder / job_id
        given = msgspec.json.encode({"name": str(gate)}).decode()
        self.here.penstock("submit", "job.wait", "--input", given, "--id", job_id)
        eventually(lambda: self.starts(job_id) == 1)
        return gate

    def starts(self, job_id: str) -> int:
        """How often a waiting job was begun."""
        file = self.there.folder / f"{job_id}.starts"
        return len(file.read_text()) if file.exists() else 0

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.here.json("show", job_id)
        return found

    def ends(self, job_id: str, state: str = "SUCCEEDED") -> dict[str, Any]:
        eventually(lambda: self.job(job_id)["state"] == state, f"{self.job(job_id)}")
        return self.job(job_id)

    def cut(self) -> None:
        self.there.cut()

    def mend(self) -> None:
        self.there.mend()


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    with some_machines(folder, "here", "there") as (here, there):
        (there.folder / "tasks.py").write_text(textwrap.dedent(APPLICATION))
        yield Machines(here, there)


@contextmanager
def some_machines(folder: Path, *names: str) -> Iterator[list[Machine]]:
    """Machines with the addresses 10.99.0.1, 10.99.0.2 …, on one switch."""
    tag = token_hex(3)
    switch = f"pst-{tag}-switch"
    made = [
        Machine(f"pst-{tag}-{name}", f"10.99.0.{number}", folder / name)
        for number, name in enumerate(names, 1)
    ]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, machine in enumerate(made):
            _plug_in(machine, switch, f"{tag}{number}")
        yield made
    finally:
        for machine in reversed(made):
            machine.close()
        for name in (*(machine.name for machine in made), switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _plug_in(machine: Machine, switch: str, cable: str) -> None:
    _ip("netns", "add", machine.name)
    near, far = f"pa{cable}", f"pb{cable}"
    _ip("link", "add", near, "type", "veth", "peer", "name", far)
    _ip("link", "set", near, "netns", machine.name)
    _ip("link", "set", far, "netns", switch)
    _ip("-n", switch, "link", "set", far, "master", "switch", "up")
    _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", near)
    for device in ("lo", near):
        _ip("-n", machine.name, "link", "set", device, "up")


def _ip(*words: str) -> Sequence[str]:
    subprocess.run(["ip", *words], check=True, capture_output=True)
    return words
