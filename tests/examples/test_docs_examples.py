"""What the pages show is run, in order, in a folder and with a data directory of its own.

Python blocks of a page share one interpreter; an `output` block after one is what it must
print. In `console` blocks the lines after a `$` are commands, the others what they print: where
none are shown, a command prints nothing. Three dots stand for something that is not shown, but
not for a stack trace. A command ends with code 0, unless `# exit N` at its end says otherwise.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_runtime
from tests.docs.conftest import PAGES, ROOT, blocks_of
from tests.support.models import smollm2

DRIVER = """\
import contextlib, io, json, sys, traceback, types


def run(block, page):
    printed, failure = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(block["text"], block["place"], "exec", dont_inherit=True), page)
    except BaseException:
        failure = traceback.format_exc()
    return {"printed": printed.getvalue(), "failure": failure}


page = sys.modules["__main__"] = types.ModuleType("__main__")
for line in sys.stdin:
    print(json.dumps(run(json.loads(line), page.__dict__)), file=sys.__stdout__, flush=True)
"""

_TRACE = "Traceback (most recent call last)"
EXAMPLES = ROOT / "examples"
RUN = {"python", "console"}
SLOW = {
    "docs/how-to/containers.md",
    "docs/how-to/pipes.md",
    "docs/how-to/workers-on-other-machines.md",
}
"""Pages that start processes which take a while, the more so while other tests run."""
ON_MACHINES = {"docs/how-to/scale-out.md"}
"""Pages that have a test of their own, on several machines."""
NEEDS = {
    "docs/how-to/django.md": ("django", "gunicorn"),
    "docs/how-to/fastapi.md": ("fastapi", "uvicorn"),
    "docs/how-to/flask.md": ("flask", "gunicorn"),
    "docs/how-to/mcp.md": ("mcp",),
}
"""Frameworks that a page is about, of the extra `test-all`."""

NOT_RUN = {
    "README.md: $ pip install .": (
        "the first installs into your environment, the second has a test of its own"
    ),
    "README.md: $ penstock --data containers run --memory 64m --timeout 10s"
    " alpine:latest -- echo hello": (
        "it needs an engine with this image; docs/how-to/containers.md makes one and runs the same"
    ),
    "docs/how-to/news.md: $ NEWS_HOME=~/news penstock up --app examples.news.app:app": (
        "it would fetch from the network, and needs an engine that stays"
    ),
    "docs/how-to/tracing.md: $ pip install 'penstock[otel]'": "it needs a collector",
    "docs/how-to/workers-on-other-machines.md: $ cat penstock.toml": (
        "it needs certificates that you have"
    ),
}
"""Every example that is not run, and why; a new one has to be added here."""


class Reader:
    """Follows a page as a careful reader would, in a folder of their own."""

    def __init__(self, folder: Path, inside: Sequence[str] = ()) -> None:
        """`inside` is what commands are started with, as on another machine."""
        self._inside = inside
        self.folder = folder / "work"
        self.folder.mkdir()
        (self.folder / "examples").symlink_to(EXAMPLES)
        self._environ = {
            **os.environ,
            "COLUMNS": "160",
            "HOME": str(folder),
            "NO_COLOR": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PENSTOCK_DATA_DIR": str(folder / "data"),
            "PENSTOCK_MODELS__DIR": str(smollm2().parent),
            # Whoever reads it lets a node measure what is best; here others measure too.
            "PENSTOCK_NODE__DTYPE": "float32",
            "PENSTOCK_NODE__THREADS": "1",
            # By its entry point as well, but not in an environment that was made before it had one.
            "PYTEST_PLUGINS": "penstock.testing.plugin",
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT / "src")]),
            "TERM": "dumb",
        }
        self._python: subprocess.Popen[str] | None = None
        self._background: list[tuple[subprocess.Popen[bytes], Path]] = []

    def follow(self, block: Any) -> str:
        """Do what a block says, and return what it printed."""
        if block.mark == "file":
            path = self.folder / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            return ""
        if block.kind == "python":
            return self._run_python(block)
        self._run_console(block)
        return ""

    def _run_python(self, block: Any) -> str:
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-c", DRIVER],
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        json.dump({"text": block.text, "place": block.place}, self._python.stdin)
        self._python.stdin.write("\n")
        self._python.stdin.flush()
        answer = json.loads(self._python.stdout.readline())
        assert not answer["failure"], f"{block.place}\n{answer['failure']}"
        return str(answer["printed"])

    def _run_console(self, block: Any) -> None:
        for command, shown in commands(block.text):
            if block.mark == "background":
                self._start(command, shown, block.place)
                continue
            ended = subprocess.run(
                [*self._inside, "bash", "-o", "pipefail", "-c", command],
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=50,
            )
            place = f"{block.place}\n$ {command}"
            assert ended.returncode == exit_of(command), f"{place}\n{ended}"
            assert_like(ended.stdout, shown, place)

    def _start(self, command: str, shown: str, place: str) -> None:
        log = self.folder.parent / f"background-{len(self._background)}.log"
        with log.open("wb") as file:
            started = subprocess.Popen(
                [*self._inside, "bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._background.append((started, log))
        deadline = time.monotonic() + 40
        while not like(log.read_text(), shown):
            said = f"{place}\n$ {command}\n{log.read_text()}"
            assert started.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.05)

    def close(self) -> None:
        if self._python is not None:
            assert self._python.stdin is not None
            self._python.stdin.close()
            self._python.wait(20)
            assert self._python.stdout is not None
            self._python.stdout.close()
        ended = [started.poll() for started, _ in self._background]
        for started, _ in reversed(self._background):
            with suppress(ProcessLookupError):
                started.terminate()
            started.wait(20)
        failed = [code for code in ended if code is not None and code > 0]
        assert failed == [], f"commands in the background ended with {failed}"


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and what is shown below it."""
    assert text.startswith("$ "), f"a console block begins with a command: {text!r}"
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        lines = part.splitlines()
        command = [lines.pop(0)]
        while lines and (command[-1].endswith("\\") or lines[0].startswith("> ")):
            command.append(lines.pop(0).removeprefix("> "))
        yield "\n".join(command), "\n".join(lines)


def exit_of(command: str) -> int:
    """The code that a command is said to end with."""
    said = re.search(r"# exit (\d+)$", command)
    return int(said[1]) if said else 0


def like(printed: str, shown: str) -> bool:
    """Whether what was printed is what is shown, apart from spaces and what dots hide."""
    if _TRACE in printed and _TRACE not in shown:
        return False
    if shown.strip() in ("...", "…"):
        return bool(printed.strip())
    parts = re.split(r"\s*(?:\.\.\.|…)\s*", " ".join(shown.split()))
    pattern = ".*".join(re.escape(part) for part in parts)
    return re.fullmatch(rf"\s*{pattern}\s*", " ".join(printed.split()), re.S) is not None


def assert_like(printed: str, shown: str, place: str) -> None:
    assert like(printed, shown), f"{place}\n--- shown ---\n{shown}\n--- printed ---\n{printed}"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.close()


def runnable() -> Iterator[Any]:
    for path in PAGES:
        blocks = blocks_of(path)
        name = path.relative_to(ROOT).as_posix()
        if name in ON_MACHINES:
            continue
        if any(block.kind in RUN and block.mark != "not run" for block in blocks):
            marks = [pytest.mark.timeout(150)] if name in SLOW else []
            yield pytest.param(blocks, id=name, marks=marks)


@pytest.mark.seed("003", "9.14")
@pytest.mark.parametrize("blocks", [*runnable()])
def test_what_the_page_shows_works(blocks: list[Any], reader: Reader) -> None:
    if blocks[0].page == "docs/how-to/containers.md":
        needs_runtime("runc")
    for module in NEEDS.get(blocks[0].page, ()):
        pytest.importorskip(module)
    printed: str | None = None
    for block in blocks:
        if block.mark == "not run":
            printed = None
        elif block.kind == "output":
            assert printed is not None, f"{block.place}: there is nothing that could print it"
            assert_like(printed, block.text, block.place)
        elif block.kind in RUN or block.mark == "file":
            printed = reader.follow(block)


def test_an_example_that_breaks_is_noticed() -> None:
    trace = f"{_TRACE}:\n  ...\nKeyError: 'a'"
    assert not like(trace, "")
    assert not like(trace, "...")
    assert not like("hello", "")
    assert not like("", "...")
    assert like("", "")
    assert like("hello", "...")
    assert like("one two three", "one ... three")
    assert exit_of("penstock show nobody  # exit 3") == 3
    assert exit_of("penstock ps  # exit codes are checked") == 0


def test_what_is_not_run_is_listed_with_its_reason(all_blocks: list[Any]) -> None:
    found = {}
    for block in all_blocks:
        if block.mark == "not run":
            assert block.value, f"{block.place}: say why it is not run"
            first = block.text.splitlines()[0].partition("#")[0].strip()
            found[f"{block.page}: {first}"] = block.value
    assert found == NOT_RUN


def test_every_block_says_what_it_is(all_blocks: list[Any]) -> None:
    # `py` is the code of another system, shown for comparison.
    known = RUN | {"output", "py", "sql", "sh", "toml", "mermaid", "text", "ini", "json", "yaml"}
    assert [block.place for block in all_blocks if block.kind not in known] == []
