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
        inside = ["ip", "netns", "exec", self.name]
        return [*inside, sys.executable, "-m", "penstock.cli", *args]

    def _env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        return {**kept, "PENSTOCK_DATA_DIR": str(self.folder / "data"), "NO_COLOR": "1"}

    def run(self, *words: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.name, *words], check=True)

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
        """Nothing gets through any more, and nobody is told."""
        for chain in ("INPUT", "OUTPUT"):
            self.there.run("iptables", "-A", chain, "-j", "DROP")

    def mend(self) -> None:
        self.there.run("iptables", "-F")


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    tag, cable = token_hex(3), token_hex(3)
    names = [f"pst-{tag}-{end}" for end in "ab"]
    here = Machine(names[0], "10.99.0.1", folder / "here")
    there = Machine(names[1], "10.99.0.2", folder / "there")
    (there.folder / "tasks.py").write_text(textwrap.dedent(APPLICATION))
    try:
        for machine in (here, there):
            _ip("netns", "add", machine.name)
        _ip("link", "add", f"pa{cable}", "type", "veth", "peer", "name", f"pb{cable}")
        for machine, end in ((here, f"pa{cable}"), (there, f"pb{cable}")):
            _ip("link", "set", end, "netns", machine.name)
            inside = ("-n", machine.name)
            _ip(*inside, "addr", "add", f"{machine.address}/24", "dev", end)
            for device in ("lo", end):
                _ip(*inside, "link", "set", device, "up")
        yield Machines(here, there)
    finally:
        for machine in (there, here):
            machine.close()
            subprocess.run(["ip", "netns", "del", machine.name], capture_output=True, check=False)


def _ip(*words: str) -> Sequence[str]:
    subprocess.run(["ip", *words], check=True, capture_output=True)
    return words
