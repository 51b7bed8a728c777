"""Records a real terminal session as an SVG picture.

`python tools/terminal_recording.py docs/images/session.svg` starts an engine in an empty folder,
runs the commands below in a pseudo-terminal, and draws what they print. README.md shows it.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 108
SUBMIT = "penstock submit job.slow.count --app tasks:app --input '{\"to\": 20}' --id report"


class Session:
    """One recorded terminal: what was typed and what was printed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._background: list[subprocess.Popen[bytes]] = []
        self._console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
        self._environ = {
            **os.environ,
            "COLUMNS": str(WIDTH),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PENSTOCK_DATA_DIR": str(folder / "data"),
            "TERM": "xterm-256color",
        }

    def comment(self, text: str) -> None:
        self._console.print(Text(f"# {text}", "bright_black"))

    def run(self, command: str) -> None:
        """Run a command to its end, and record what it prints."""
        self._type(command)
        printed = self._printed_by(command)
        self._console.print(Text.from_ansi(printed.strip("\r\n")))

    def start(self, command: str, *, shown: bool = True) -> subprocess.Popen[bytes]:
        """Start a command in the background. What it prints is not recorded."""
        if shown:
            self._type(f"{command} &")
        started = subprocess.Popen(
            command.split(),
            cwd=self._folder,
            env=self._environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._background.append(started)
        return started

    def kill(self, started: subprocess.Popen[bytes], *, typed: str) -> None:
        self._type(typed)
        started.kill()

    def wait_for(self, command: str, pattern: str, seconds: float = 30) -> None:
        """Repeat a command, unrecorded, until it prints the pattern."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, printed := self._printed_by(command)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{command} did not print {pattern!r}: {printed}")
            time.sleep(0.2)

    def svg(self, title: str) -> str:
        drawn = self._console.export_svg(title=title, theme=MONOKAI, unique_id="penstock")
        # Rich links fonts on a server; the picture must load nothing.
        drawn = re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.S)
        return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"

    def close(self) -> None:
        for started in reversed(self._background):
            started.terminate()
            started.wait(20)

    def _type(self, command: str) -> None:
        self._console.print(Text.assemble(("$ ", "green"), (command, "bold")))

    def _printed_by(self, command: str) -> str:
        ours, theirs = pty.openpty()
        child = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        chunks = []
        try:
            while chunk := os.read(ours, 4096):
                chunks.append(chunk)
        except OSError:  # Linux reports the end of a pseudo-terminal as an error.
            pass
        os.close(ours)
        child.wait()
        return b"".join(chunks).decode().replace("\r\n", "\n")


def record(folder: Path) -> str:
    """A worker is killed in the middle of a job; a second one finishes the job."""
    (folder / "tasks.py").write_text((ROOT / "examples" / "tasks.py").read_text("utf-8"), "utf-8")
    session = Session(folder)
    try:
        session.start("penstock up --no-worker --no-http", shown=False)
        session.wait_for("penstock worker list --json", r"\[")
        anna = session.start("penstock worker start --app tasks:app --id anna")
        session.wait_for("penstock worker list", "anna")
        session.run(SUBMIT)
        session.wait_for("penstock show report", "RUNNING")
        session.comment("The worker dies in the middle of the job; another one joins.")
        session.kill(anna, typed="kill -9 %1")
        session.start("penstock worker start --app tasks:app --id bert")
        session.wait_for("penstock show report", "ended SUCCEEDED")
        session.run("penstock show report")
        return session.svg("penstock")
    finally:
        session.close()


def main(target: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        drawn = record(Path(folder))
    Path(target).write_text(drawn, "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
