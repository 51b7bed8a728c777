"""A way to an engine on which everything can get lost, without a word to either end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class BlackHole:
    """Forwards connections to an address: a path, or a port of this machine.

    After `swallow`, connections stay open and are accepted, and what is sent is lost. After
    `heal`, new connections are forwarded again; the old ones stay dead.
    """

    def __init__(self, target: Path | int) -> None:
        self.target = target
        self._number = 0
        self._is_open = True
        self.accepted = 0
        """Connections so far."""
        self.port = 0
        self.path: Path | None = None
        self._writers: list[asyncio.StreamWriter] = []

    def swallow(self) -> None:
        self._number += 1
        self._is_open = False

    def heal(self) -> None:
        self._is_open = True

    async def serve(self, here: Path | int) -> asyncio.Server:
        if isinstance(here, Path):
            self.path = here
            return await asyncio.start_unix_server(self._accept, here)
        server = await asyncio.start_server(self._accept, "127.0.0.1", here)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        number = self._number
        self._writers.append(writer)

        def is_alive() -> bool:
            return self._is_open and number == self._number

        if not is_alive():
            number = -1
            with suppress(asyncio.CancelledError):
                await _copy(reader, None, is_alive)
            return
        if isinstance(self.target, Path):
            back, forth = await asyncio.open_unix_connection(self.target)
        else:
            back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers.append(forth)
        both = _copy(reader, forth, is_alive), _copy(back, writer, is_alive)
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*both)

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def _copy(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter | None,
    is_alive: Callable[[], bool],
) -> None:
    """Until the end, of which the other side hears only while the way is alive."""
    try:
        while data := await reader.read(1 << 16):
            if writer is not None and is_alive():
                writer.write(data)
    except ConnectionError:
        pass
    if writer is not None and is_alive():
        writer.close()


@contextmanager
def black_hole(target: Path | int, here: Path | int = 0) -> Iterator[BlackHole]:
    """In a thread of its own, at a path or at a free port."""
    hole, loop = BlackHole(target), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(hole.serve(here), loop).result(10)

    async def stop() -> None:
        server.close()
        hole.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield hole
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
