"""Keeps the safety kernel's rules those of their file, and the last good ones if it breaks."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from penstock.control.rules import load_rules, parse_rules, read_text, snapshot_of
from penstock.control.safety import RuleSet, SafetyKernel
from penstock.core.errors import Misconfigured
from penstock.ports.clock import Clock

log = logging.getLogger(__name__)

_Stamp: TypeAlias = tuple[int, ...]
_GONE: _Stamp = ()


class Rulebook:
    """A service that looks at the rule file every second, and reads it on request.

    A changed file is read when it has been still from one look to the next: half of a
    file can be valid TOML, and must not become the rules while the rest is being written.
    """

    def __init__(
        self, kernel: SafetyKernel, path: Path | None, clock: Clock, *, interval: float = 1.0
    ) -> None:
        self._kernel, self._path, self._clock, self._interval = kernel, path, clock, interval
        self._seen: _Stamp | None = None
        """The file that was taken or refused last."""
        self._moving: _Stamp | None = None
        """The file at the last look, if it is another one."""
        self._reading = asyncio.Lock()
        self.on_change: Callable[[], None] = _nothing
        """Called when other rules are in force."""
        self.loaded_at = clock.now()
        self.problem = ""
        """Why the file as it now is was not taken."""

    @property
    def source(self) -> str:
        return "" if self._path is None else str(self._path)

    def load(self) -> None:
        """Read the file before anything is judged. Raises Misconfigured."""
        if self._path is not None:
            self._kernel.use(load_rules(self._path))
            self.loaded_at = self._clock.now()

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._interval)
            await self.look()

    async def look(self) -> None:
        """See whether the file is another one; take it if it has been still."""
        if self._path is None:
            return
        stamp = _stamp(self._path)
        moved, self._moving = stamp != self._moving, stamp
        if stamp == self._seen or moved:
            return
        try:
            await self._read(self._path)
        except Misconfigured as error:
            if isinstance(error.__cause__, OSError):
                return  # it may be readable in a moment
        except _Moved:
            return
        self._seen = stamp

    async def reload(self) -> RuleSet:
        """Read the file now. Raises Misconfigured, and keeps the last good rules."""
        if self._path is None:
            raise Misconfigured(
                "there is no rule file: the built-in rules allow everything",
                hint="name one with --rules or the setting 'rules', and start again",
            )
        try:
            await self._read(self._path)
        except _Moved:
            raise Misconfigured(
                f"rules {self._path}: changed while it was read", hint="try again"
            ) from None
        return self._kernel.rules

    async def _read(self, path: Path) -> None:
        async with self._reading:
            try:
                rules = await asyncio.to_thread(_settled, path, self._kernel.rules.snapshot)
            except Misconfigured as error:
                self._refuse(str(error))
                raise
            if self.problem:
                log.info("rules %s: good again", path)
                self.problem = ""
            if rules is not None:
                self._kernel.use(rules)
                self.loaded_at = self._clock.now()
                log.info("rules %s: %d rules, now %s", path, len(rules.rules), rules.snapshot)
                self.on_change()

    def _refuse(self, problem: str) -> None:
        if problem != self.problem:
            log.error("%s; rules %s go on", problem, self._kernel.rules.snapshot)
        self.problem = problem


class _Moved(Exception):
    """The file changed while it was read."""


def _settled(path: Path, known: str) -> RuleSet | None:
    """The rules in a file; None if its text is the known one. Raises Misconfigured."""
    before = _stamp(path)
    text = read_text(path)
    rules = None if snapshot_of(text) == known else parse_rules(text, str(path))
    if _stamp(path) != before:
        raise _Moved
    return rules


def _stamp(path: Path) -> _Stamp:
    """What differs between two versions of a file, without reading it."""
    try:
        stat = os.stat(path)
    except OSError:
        return _GONE
    return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino, stat.st_dev)


def _nothing() -> None:
    pass
