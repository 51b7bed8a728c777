"""What a job, or another user, writes can't drive the terminal of whoever reads it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator

import msgspec
import pytest
from tests.support.cli.commands import Penstock

EVIL = "\x1b]0;owned\x07\x1b[2K\x1b[1A\x9b31m\u202egood\u2066\x1b[6n[/red]\r"
DRIVES = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
OURS = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[hl]|2K|1A)")
"""Colours, and what a progress bar needs."""
APPLICATION = f"""
    import penstock

    EVIL = {EVIL!r}
    app = penstock.App()

    @app.job("job.evil.fail")
    async def fail(text: str = "") -> None:
        penstock.current().log("begin\\t" + EVIL + "\\nnext")
        penstock.current().progress(0.5, EVIL)
        raise ValueError("boom " + EVIL)

    @app.job("job.evil.return")
    async def returns(text: str = "") -> str:
        return "value " + EVIL

    @app.job("job.evil.wait")
    async def waits(text: str = "") -> None:
        raise AssertionError
"""
RULES = """
default = "allow"
[[rules]]
id = "ask"
decision = "require_approval"
topics = ["job.evil.wait"]
"""


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    one = Penstock(tmp_path_factory.mktemp("evil"))
    (one.folder / "evil.py").write_text(textwrap.dedent(APPLICATION))
    (one.folder / "rules.toml").write_text(RULES)
    one.env["PENSTOCK_RULES"] = str(one.folder / "rules.toml")
    with one.up("--app", "evil:app"):
        one.submit("job.evil.fail", {"text": EVIL}, "--id", "fails", "--label", "a=\x9b\u202e")
        one("watch", "fails", code=1)
        one.submit("job.evil.return", {}, "--id", "returns", "--wait")
        one.submit("job.evil.wait", {"text": EVIL}, "--id", "rejected")
        one("reject", "rejected", "--reason", EVIL)
        yield one


def on_terminal(one: Penstock, *args: str) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    env = {**one.env, "TERM": "xterm"}
    del env["NO_COLOR"]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *args],
        cwd=one.folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 10_000):
                seen += chunk
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode in (0, 1, 6), seen
    return seen.decode()


COMMANDS = [
    ("ps", "boom"),
    ("show fails", "boom"),
    ("show rejected", "good"),
    ("logs fails", "begin\t"),
    ("watch fails", "boom"),
    ("dead", "boom"),
    ("result fails", "boom"),
    ("result returns", "value"),
    ("result returns --raw", "value"),
    ("result fails --json", "boom"),
    ("audit", "good"),
]


@pytest.mark.parametrize(("command", "tells"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_terminal_is_driven_by_nothing_that_others_wrote(
    command: str, tells: str, evil: Penstock
) -> None:
    seen = on_terminal(evil, *command.split())
    assert tells in seen
    assert DRIVES.findall(OURS.sub("", seen)) == []
    assert "\x1b[2K\x1b[1A\x9b" not in seen


def test_into_a_pipe_tables_are_as_harmless_and_logs_are_as_they_were_written(
    evil: Penstock,
) -> None:
    for command in ("ps", "show fails", "dead", "audit"):
        assert DRIVES.findall(evil.out(*command.split())) == []
    assert "\u202egood\u2066" in evil.out("logs", "fails")
    shown = msgspec.json.decode(evil.out("result", "returns"))
    assert shown == f"value {EVIL}"


def test_json_escapes_what_json_alone_would_leave(evil: Penstock) -> None:
    text = evil.out("show", "fails", "--json")
    assert DRIVES.findall(text) == []
    assert msgspec.json.decode(text)["result"]["error_message"].startswith("boom \x1b]0;")
