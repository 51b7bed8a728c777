"""What a job has said so far, readable while it runs: `partial.txt` and `progress.json`.

Neither is flushed or needed: a job that is quick never has them, and a disk that has no room for
them is no reason to fail.
"""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import msgspec

from penstock.core.errors import PenstockError
from penstock.ports.clock import Clock
from penstock.workloads.llm.values import Piece
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk import replace_file
from penstock.workloads.spool.ending import PARTIAL, PROGRESS
from penstock.workloads.spool.serving.threads import Threads

EVERY = 0.25
"""Seconds between two looks that a reader can have."""
_FIRST = 0.1
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Partial:
    """Of one job; `tell` takes each piece as it comes, `close` before the job ends."""

    def __init__(self, folder: Path, max_tokens: int, clock: Clock, threads: Threads) -> None:
        self._folder, self._max_tokens = folder, max_tokens
        self._clock, self._threads = clock, threads
        self._began = clock.monotonic()
        self._due = self._began + _FIRST
        self._first: float | None = None
        self._tokens = 0
        self._unsaid: list[str] = []
        self._writing: asyncio.Task[None] | None = None

    def tell(self, piece: Piece) -> None:
        now = self._clock.monotonic()
        self._first = now if self._first is None else self._first
        self._tokens += 1
        if piece.text:
            self._unsaid.append(piece.text)
        if now >= self._due and (self._writing is None or self._writing.done()):
            self._due = now + EVERY
            text, self._unsaid = "".join(self._unsaid), []
            first = self._writing is None
            self._writing = asyncio.ensure_future(
                self._threads.do(_write, self._folder, text, self._progress(now), first=first)
            )

    async def close(self) -> None:
        """Nothing is written any more."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    def _progress(self, now: float) -> bytes:
        since = now if self._first is None else self._first
        speed = (self._tokens - 1) / max(now - since, 1e-3)
        left = max(0, self._max_tokens - self._tokens)
        return msgspec.json.encode(
            {
                "tokens": self._tokens,
                "tokens_per_second": round(speed, 2),
                "max_tokens": self._max_tokens,
                "eta_s": round(left / speed, 2) if speed else None,
            }
        )


def _write(folder: Path, text: str, progress: bytes, *, first: bool) -> None:
    """Whatever a client has put in the way is replaced: nothing is written through it."""
    said = text.encode(errors="replace")
    try:
        if first:
            replace_file(folder, PARTIAL, said, Sync.NONE)
        else:
            _append(folder / PARTIAL, said)
        replace_file(folder, PROGRESS, progress, Sync.NONE)
    except (OSError, PenstockError):
        pass


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, _APPEND)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.write(file, data)
    finally:
        os.close(file)
