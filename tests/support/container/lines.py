"""A line to an engine's socket that a test can cut and mend."""

from __future__ import annotations

import asyncio
from pathlib import Path


class Line:
    """Listens at `address` and passes everything on to `target`, in both directions."""

    def __init__(self, address: Path, target: Path) -> None:
        self.address, self._target = address, target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Line:
        await self.mend()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.cut()

    async def mend(self) -> None:
        self._server = await asyncio.start_unix_server(self._meet, self.address)

    async def cut(self) -> None:
        """Whoever talks is broken off, and nobody can begin to."""
        if self._server is not None:
            self._server.close()
            self.address.unlink()
            self._server = None
        while self._passing:  # one that was let in just now has its writers in a moment
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.wait(self._passing, timeout=0.01)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        beyond, to_engine = await asyncio.open_unix_connection(self._target)
        both = {writer, to_engine}
        self._writers |= both
        try:
            await asyncio.gather(_pass(reader, to_engine), _pass(beyond, writer))
        finally:
            for one in both:
                one.close()
            self._writers -= both
            self._passing.discard(task)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()
