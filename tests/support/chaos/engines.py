"""Several engines on one PostgreSQL database, each with a data directory of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support.cli.commands import Penstock, said
from tests.support.waiting import eventually

import penstock

APPLICATION = """
    import time
    from pathlib import Path

    import penstock

    app = penstock.App()

    @app.job("job.text.shout", idempotent=True)
    async def shout(text: str) -> str:
        return text.upper() + "!"

    @app.job("job.wait.file")
    def wait_for(path: str) -> str:
        with Path(path + ".started").open("a") as started:
            started.write("x")
        while not Path(path).exists():
            time.sleep(0.01)
        return "it came"

    @app.job("job.text.long")
    async def long(size: int) -> str:
        return "x" * size
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class Cluster:
    """Engines by name, each with a data directory of its own, on one database."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._processes = ExitStack()
        self.engines: dict[str, subprocess.Popen[str]] = {}
        self.commands: dict[str, Penstock] = {}

    def command(self, name: str, **settings: str) -> Penstock:
        if name not in self.commands:
            folder = self._folder / name
            folder.mkdir()
            made = Penstock(folder)
            (folder / "jobs.py").write_text(_dedented(APPLICATION))
            made.env["PENSTOCK_STORE"] = self._url
            made.env["PENSTOCK_STORAGE__BLOBS"] = str(self._folder / "blobs")
            made.env["PENSTOCK_TIMEOUTS__LEASE"] = "4"
            made.env["PENSTOCK_TIMEOUTS__KILL_GRACE"] = "1"
            made.env |= settings
            self.commands[name] = made
        return self.commands[name]

    def start(self, name: str, *args: str) -> str:
        """What it says when it is ready."""
        process = self.command(name).start(
            "up", *(args or ("--app", "jobs:app")), stderr=subprocess.STDOUT
        )
        self._processes.callback(_ended, process)
        self.engines[name] = process
        return said(process, "ready")

    def worker(self, name: str, *args: str) -> subprocess.Popen[str]:
        process = self.command(name).start(
            *("worker", "start", "--app", "jobs:app", *args), stderr=subprocess.STDOUT
        )
        self._processes.callback(_ended, process)
        eventually(lambda: self.command(name).json("worker", "list"))
        return process

    def owner(self) -> str:
        told: str = next(iter(self.commands.values())).json("db", "status")["owner"]
        return next(
            (n for n, p in self.engines.items() if told.endswith(f":{p.pid}")), "nobody known"
        )

    def close(self) -> None:
        self._processes.close()


def _dedented(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())


def _ended(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.communicate()


@contextmanager
def ended_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        _ended(process)


@contextmanager
def submitting(where: Penstock, *reported: type[Exception]) -> Iterator[list[str]]:
    """A client that submits one job after another, and sees no error but those it tries again."""
    ids: list[str] = []
    errors: list[Exception] = []
    stop = threading.Event()

    def submit() -> None:
        try:
            with penstock.connect(f"unix:{where.data / 'penstock.sock'}") as client:
                while not stop.is_set():
                    with suppress(*reported):
                        ids.append(client.submit("job.text.shout", {"text": f"t{len(ids)}"}).job_id)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        yield ids
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()
        assert not errors, errors


def all_succeed(where: Penstock, ids: list[str]) -> None:
    assert len(set(ids)) == len(ids) > 10
    with penstock.connect(f"unix:{where.data / 'penstock.sock'}") as client:
        handles = [client.get(job_id) for job_id in ids]
        results = penstock.gather(*handles, timeout=60)
    assert results == [f"T{n}!" for n in range(len(ids))]
