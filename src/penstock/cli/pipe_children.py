"""Layer nodes as children of this process: they end with it, and one that dies is started again."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from penstock.core.errors import Unavailable

log = logging.getLogger("penstock.cli")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR, "critical": logging.ERROR}
_TRIES = 3
"""How often a child may be killed before it was ever there."""
_LAST = 5.0
"""Seconds beyond its drain after which a child that was asked to end is ended."""

Joined = Callable[[Iterable[str]], None]


class Children:
    """One process for each list of arguments, by name."""

    def __init__(
        self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], drain: float
    ) -> None:
        self._commands, self._environment, self._drain = commands, environment, drain
        self._children = {name: _Child(self, name) for name in commands}
        self._keeping: list[asyncio.Task[None]] = []
        self._join: Joined | None = None
        self._failed: asyncio.Future[None] | None = None

    @property
    def pids(self) -> Mapping[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def start(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        self._keeping = [asyncio.create_task(one.keep()) for one in self._children.values()]

    def attach(self, join: Joined) -> None:
        """Whoever is there, and whoever comes, is joined."""
        self._join = join
        join([child.address for child in self._children.values() if child.address])

    async def wait(self) -> None:
        """Until one of them can't be started; raises why."""
        assert self._failed is not None
        await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Ask all to end, and see to it."""
        for child in self._children.values():
            child.ask_to_end()
        _, late = await asyncio.wait(self._keeping, timeout=self._drain + _LAST)
        for child in self._children.values():
            child.kill()
        await asyncio.gather(*late, return_exceptions=True)
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()

    # -- what a child calls -------------------------------------------------------

    async def spawn(self, name: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli", "pipe", "node", *self._commands[name]),
            *("--json", "--with-parent"),
            env=dict(self._environment),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            # Ctrl-C is for this process alone, which asks them to end when it is time.
            start_new_session=True,
        )

    def is_there(self, address: str) -> None:
        if self._join is not None:
            self._join([address])

    def can_not_start(self, name: str, why: str) -> None:
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(Unavailable(f"node {name} can't be started: {why}"))


class _Child:
    def __init__(self, children: Children, name: str) -> None:
        self._children, self._name = children, name
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False
        self._last = ""
        self.address = ""
        """Where it listens, while it is there."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def is_ending(self) -> bool:
        return self._ending

    def ask_to_end(self) -> None:
        self._ending = True
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def keep(self) -> None:
        """Run it until it is asked to end."""
        pause, tries, was_there = _FIRST_PAUSE, 0, False
        while not self.is_ending():
            code = await self._run()
            lived, self.address = bool(self.address), ""
            was_there |= lived
            if self.is_ending():
                return
            why = self._last if code > 0 and self._last else _ended(code)
            tries += 1
            if not was_there and (code > 0 or tries == _TRIES):
                self._children.can_not_start(self._name, why)
                return
            log.warning("%s ended: %s; it is started again", self._name, why)
            pause = _FIRST_PAUSE if lived else min(pause * 2, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _run(self) -> int:
        self._process = process = await self._children.spawn(self._name)
        if self._ending:
            self.kill()
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(self._listen(process.stdout), self._relay(process.stderr))
        return await process.wait()

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            with suppress(msgspec.DecodeError):
                told = msgspec.json.decode(line)
                if told.get("what") == "here":
                    self.address = told["address"]
                    self._children.is_there(self.address)

    async def _relay(self, lines: asyncio.StreamReader) -> None:
        """Pass on what it warns of."""
        async for line in lines:
            text = line.decode("utf-8", "replace").rstrip()
            said = text.removeprefix("penstock: ") if text.startswith("penstock: ") else text[9:]
            level, colon, rest = said.partition(": ")
            if colon and level in _LEVELS:
                log.log(_LEVELS[level], "%s: %s", self._name, rest)
            else:
                log.debug("%s: %s", self._name, said)
            if text.startswith("penstock: ") or (colon and level in _LEVELS):
                self._last = rest if level in _LEVELS else said


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
