"""Real `penstock` processes on a folder of their own."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from tests.support.waiting import eventually

from penstock.cli.program import run

APPLICATION = """
    import asyncio
    import logging
    import time
    from pathlib import Path

    import penstock

    app = penstock.App()

    @app.job("job.text.shout")
    async def shout(text: str) -> str:
        return text.upper() + "!"

    @app.job("job.text.fail")
    async def fail(why: str = "no reason") -> None:
        raise ValueError(why)

    @app.job("job.text.talk")
    async def talk(lines: int = 3) -> int:
        for n in range(lines):
            penstock.current().log(f"line {n}")
        penstock.current().log("careful", level="warning")
        return lines

    @app.job("job.text.print")
    def say(text: str) -> None:
        print(text)
        logging.getLogger("jobs").info("logged %s", text)
        logging.getLogger("jobs").warning("warned %s", text)

    @app.job("job.text.large")
    async def large(size: int) -> str:
        return "x" * size

    @app.job("job.wait.file")
    async def wait_for(path: str) -> str:
        ctx = penstock.current()
        ctx.progress(0.5, "half way")
        Path(path + ".started").touch()
        while not Path(path).exists():
            await asyncio.sleep(0.01)
        return "it came"

    @app.job("job.wait.stubborn")
    def stubborn(path: str) -> None:
        Path(path + ".started").touch()
        while not Path(path).exists():
            time.sleep(0.01)
"""


class Penstock:
    """The command, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        (folder / "jobs.py").write_text(textwrap.dedent(APPLICATION))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        self.env = {**kept, "PENSTOCK_DATA_DIR": str(self.data), "NO_COLOR": "1"}

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *args],
            cwd=self.folder,
            env=self.env,
            text=True,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=options.pop("stderr", subprocess.PIPE),
            **options,
        )

    def __call__(
        self, *args: str, code: int = 0, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that must end with this exit code.

        It runs in this process, which saves the start of another; `start` makes a real one.
        """
        done = in_process(args, self.folder, self.env, given)
        assert done.returncode == code, (args, done)
        assert "Traceback" not in done.stderr
        return done

    def out(self, *args: str, code: int = 0, given: str = "") -> str:
        return self(*args, code=code, given=given).stdout.strip()

    def err(self, *args: str, code: int, given: str = "") -> str:
        done = self(*args, code=code, given=given)
        assert done.stdout == ""
        return done.stderr

    def json(self, *args: str, code: int = 0) -> Any:
        return msgspec.json.decode(self.out(*args, "--json", code=code))

    def submit(self, topic: str, given: Any = None, *args: str) -> str:
        payload = msgspec.json.encode(given or {}).decode()
        return self.out("submit", topic, "--input", payload, *args)

    def held(self, name: str, topic: str = "job.wait.file") -> tuple[str, Path]:
        """A job that runs until a file is there; it has started when this returns."""
        gate = self.folder / name
        job_id = self.submit(topic, {"path": str(gate)})
        eventually(lambda: Path(f"{gate}.started").exists())
        return job_id, gate

    def state(self, job_id: str) -> str:
        return str(self.json("show", job_id)["state"])

    @contextmanager
    def up(self, *args: str) -> Iterator[subprocess.Popen[str]]:
        """A running engine, ready; it is killed at the end if it still runs."""
        process = self.start("up", *args, stderr=subprocess.STDOUT)
        try:
            self.banner = said(process, "ready")
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def in_process(
    args: Sequence[str], folder: Path, env: Mapping[str, str], given: str = ""
) -> subprocess.CompletedProcess[str]:
    """What `penstock` does with these words, in this folder and environment."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as stdin,
        mock.patch.multiple(sys, stdin=stdin, stdout=streams[0], stderr=streams[1]),
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        contextlib.chdir(folder),
    ):
        stdin.write(given)
        stdin.seek(0)
        code = run(args)
        for stream in streams:
            stream.flush()
    for name, module in sys.modules.copy().items():  # other threads import as well
        if str(getattr(module, "__file__", "")).startswith(f"{folder}/"):
            del sys.modules[name]
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(list(args), code, out, err)


def said(process: subprocess.Popen[str], text: str) -> str:
    """What it says, up to the line that has this text."""
    stream = process.stderr or process.stdout
    assert stream is not None
    lines = ""
    while text not in lines:
        line = stream.readline()
        assert line, f"it ended before it said {text!r}: {lines}"
        lines += line
    return lines


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
    """Send a signal and return what it says until its end."""
    process.send_signal(number)
    return process.communicate(timeout=30)[0]
