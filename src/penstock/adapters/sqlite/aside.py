"""Long readings: each in a thread, with a connection of its own, of one state of the file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import apsw

from penstock.adapters.sqlite.database import storage_errors

T = TypeVar("T")
Read = Callable[..., Iterable[Any]]

_MOST_IDLE = 2
"""Connections kept open for the next long reading: opening one takes a while."""


class Aside:
    """Keeps connections for readings that others should not have to wait for."""

    def __init__(self, path: Path, connect: Callable[[], apsw.Connection]) -> None:
        self._path = path
        self._connect = connect
        self._idle: list[apsw.Connection] = []
        self._closed = False

    async def run(self, work: Callable[[Read], T]) -> T:
        """Read one state of the file at length."""
        return await asyncio.to_thread(self._run, work)

    def _run(self, work: Callable[[Read], T]) -> T:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            with storage_errors(self._path), one_state(connection) as read:
                result = work(read)
        except BaseException:
            connection.close()
            raise
        if self._closed or len(self._idle) >= _MOST_IDLE:
            connection.close()
        else:
            self._idle.append(connection)
        return result

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()


@contextmanager
def one_state(connection: apsw.Connection) -> Generator[Read]:
    """Whatever is read within sees the file as it was at the first reading."""
    connection.execute("BEGIN")
    try:
        yield connection.execute
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
