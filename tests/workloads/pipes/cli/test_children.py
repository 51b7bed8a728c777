"""Children: joined when they are there, started again when they die, ended with their parent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

import pytest

from penstock.app import nodes
from penstock.app.nodes import Children
from penstock.core.errors import Unavailable
from penstock.testing.aio import run_async

HERE = 'import sys, signal; print(\'{"what": "here", "address": "h:1"}\', flush=True);'
STAYS = HERE + "sys.stdin.read()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + STAYS


class Scripts(Children):
    """Each command is a program of Python."""

    async def spawn(self, name: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", *self._commands[name]), stdin=pipe, stdout=pipe, stderr=pipe
        )


class Joined:
    """Counts who was joined."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.news = asyncio.Event()

    def __call__(self, addresses: Iterable[str]) -> None:
        self.addresses += addresses
        self.news.set()

    async def times(self, count: int) -> None:
        while len(self.addresses) < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 20)


def started(program: str, drain: float = 5.0) -> tuple[Children, Joined]:
    children, joined = Scripts({"n": [program]}, {}, drain), Joined()
    children.start()
    children.attach(joined)
    return children, joined


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(nodes, "_LAST", 0.1)


@run_async
async def test_a_child_that_is_there_is_joined() -> None:
    children, joined = started(STAYS)
    await joined.times(1)
    assert joined.addresses == ["h:1"]
    await children.stop()


@run_async
async def test_whoever_is_there_already_is_joined_when_somebody_can_join() -> None:
    children, joined = started(STAYS)
    await joined.times(1)
    later = Joined()
    children.attach(later)
    assert later.addresses == ["h:1"]
    await children.stop()


@run_async
async def test_a_child_that_dies_is_started_again() -> None:
    children, joined = started(STAYS)
    await joined.times(1)
    first = children.pids["n"]
    os.kill(first, signal.SIGKILL)
    await joined.times(2)
    assert children.pids["n"] != first
    await children.stop()


@run_async
async def test_a_child_that_can_not_start_is_told_with_its_own_words() -> None:
    children, _ = started("import sys; sys.exit('penstock: the key is too short')")
    with pytest.raises(Unavailable, match="node n can't be started: the key is too short"):
        await asyncio.wait_for(children.wait(), 20)
    await children.stop()


@run_async
async def test_a_child_that_is_killed_at_each_start_is_given_up() -> None:
    children, _ = started("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(Unavailable, match="killed by SIGKILL"):
        await asyncio.wait_for(children.wait(), 20)
    await children.stop()


@run_async
async def test_a_child_that_does_not_listen_is_killed_in_the_end() -> None:
    children, joined = started(DEAF, drain=0.1)
    await joined.times(1)
    child = children.pids["n"]
    await children.stop()
    with suppress(ProcessLookupError):
        os.kill(child, 0)
        pytest.fail("it still runs")


@run_async
async def test_what_a_child_warns_of_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    program = "import sys; print('12:00:00 warning: it is hot', file=sys.stderr, flush=True);"
    with caplog.at_level(logging.INFO, "penstock.cli"):
        children, joined = started(
            program + "print('12:00:00 hello', file=sys.stderr, flush=True);" + STAYS
        )
        await joined.times(1)
        await children.stop()
    assert [record.getMessage() for record in caplog.records] == ["n: it is hot"]
