"""A command at a terminal, typed at and read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

PATIENCE = 30.0
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """`penstock` with these arguments; the whole screen's text is `seen`."""

    def __init__(
        self, folder: Path, env: Mapping[str, str], *args: str, columns: int = 100
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *args],
            cwd=folder,
            env={**env, "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # So that Ctrl-C is the terminal's own doing.
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0))[0],  # type: ignore[func-returns-value]
        )
        os.close(theirs)
        self._raw = ""
        self._read = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    @property
    def seen(self) -> str:
        return _CODES.sub("", self._raw)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_to(self, text: str) -> str:
        """What is shown from here on, up to this text."""
        while (at := self.seen.find(text, self._read)) < 0:
            assert self._more(), f"it ended before it said {text!r}: {self.seen}"
        begun, self._read = self._read, at + len(text)
        return self.seen[begun : self._read]

    def interrupt(self, text: str) -> str:
        """Press Ctrl-C, and read up to this text.

        Once more if nothing but its echo comes of it: Python misses a signal that comes just before
        it begins to wait.
        """
        for _ in range(3):
            self.type("\x03")
            while self.seen.find(text, self._read) < 0:
                if not select.select([self._ours], [], [], PATIENCE / 3)[0] or not self._more():
                    break
            else:
                break
        return self.read_to(text)

    def ended(self) -> int:
        """The exit code, once all is read."""
        while self._more():
            pass
        return self.process.wait(PATIENCE)

    def _more(self) -> bool:
        readable, _, _ = select.select([self._ours], [], [], PATIENCE)
        assert readable, f"nothing came: {self.seen}"
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the other side is closed
            return False
        self._raw += data.decode("utf-8", "replace")
        return bool(data)
