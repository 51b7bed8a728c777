"""A network of node processes, as a test sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.support.chaos.pipes_nodes import (
    MODEL,
    Ask,
    Born,
    Command,
    Ended,
    Event,
    Failed,
    Hang,
    Heard,
    Now,
    Start,
    Started,
    Stop,
    Stopped,
    Tell,
    Wrote,
)

from penstock.workloads.pipes.config import LayerRange, LpConfig
from penstock.workloads.pipes.wire.identity import new_key

PATIENCE = 45.0
T = TypeVar("T", bound=Event)
_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


@contextmanager
def nursery() -> Iterator[str]:
    """Where nodes are born: the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="pp-") as folder:
        path = str(Path(folder) / "nursery")
        environment = {
            **os.environ,
            # A process that is to be forked has one thread.
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("pipes_nodes.py")), path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            assert ready == b"ready\n", f"the nursery ended: {process.wait()}"
            yield path
        finally:
            process.stdin.close()
            process.wait()
            process.stdout.close()


class Asked:
    """One question, and all that came of it."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens = 0
        self.heard: list[str] = []
        self.ends: list[Ended | Failed] = []
        self.took = 0.0
        self._began = time.monotonic()

    def take(self, event: Wrote | Heard | Ended | Failed) -> None:
        if isinstance(event, Wrote):
            self.text += event.text
            self.tokens += event.tokens
        elif isinstance(event, Heard):
            self.heard.append(event.text)
        else:
            self.ends.append(event)
            self.took = time.monotonic() - self._began

    @property
    def end(self) -> Ended | Failed:
        """The only one."""
        [end] = self.ends
        return end


class NodeProcess:
    def __init__(self, node_id: str, pid: int, reader: Any, writer: Any) -> None:
        self.node_id, self.pid = node_id, pid
        self.address = ""
        self.events: list[Event] = []
        self.asked: dict[int, Asked] = {}
        self.gone = False
        self._reader, self._writer = reader, writer
        self._news = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def born(cls, nursery: str, node_id: str) -> NodeProcess:
        reader, writer = await asyncio.open_unix_connection(nursery, limit=1 << 24)
        born = _events.decode(await asyncio.wait_for(reader.readline(), PATIENCE))
        assert isinstance(born, Born)
        return cls(node_id, born.pid, reader, writer)

    def tell(self, command: Command) -> None:
        self._writer.write(msgspec.json.encode(command) + b"\n")

    async def start(self, config: LpConfig) -> None:
        self.tell(Start(msgspec.Raw(msgspec.json.encode(config, enc_hook=str))))
        self.address = (await self.said(Started)).address

    def ask(self, prompt: Sequence[int], count: int) -> Asked:
        number = len(self.asked)
        self.asked[number] = asked = Asked()
        self.tell(Ask(number, tuple(prompt), count))
        return asked

    def hang_up(self, asked: Asked) -> None:
        self.tell(Hang(next(n for n, one in self.asked.items() if one is asked)))

    async def now(self) -> Now:
        known = self._count(Now)
        self.tell(Tell())
        return await self.said(Now, lambda _: self._count(Now) > known)

    async def until(self, claim: Callable[[Now], object]) -> Now:
        """Until it says something of itself that is so."""
        end = time.monotonic() + PATIENCE
        while not claim(now := await self.now()):
            assert time.monotonic() < end, f"{self.node_id} never came to it: {now}"
            await asyncio.sleep(0.02)
        return now

    async def said(self, of: type[T], claim: Callable[[T], object] = lambda _: True) -> T:
        """The newest event of a kind of which something is so."""
        return await self.comes(
            lambda: next(
                (e for e in reversed(self.events) if isinstance(e, of) and claim(e)), None
            ),
            of.__name__,
        )

    async def comes(self, find: Callable[[], Any], what: str = "") -> Any:
        """What `find` gives, once it gives something."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while not (found := find()):
            assert not self.gone, f"{self.node_id} is gone, and never said {what}"
            self._news.clear()
            left = end - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                raise AssertionError(f"{self.node_id} never said {what}") from None
        return found

    async def wrote(self, asked: Asked, tokens: int) -> None:
        """Until an answer has so many tokens."""
        await self.comes(lambda: asked.tokens >= tokens or asked.ends, "that much")
        assert not asked.ends, asked.ends

    async def ended(self, asked: Asked) -> Ended | Failed:
        await self.comes(lambda: asked.ends, "how it ended")
        return asked.end

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """Until it is dead."""
        self.signal(signal.SIGKILL)
        await asyncio.wait_for(self._reading, PATIENCE)

    async def stop(self) -> None:
        self.tell(Stop())
        await self.said(Stopped)

    async def close(self) -> None:
        if not self.gone:
            self.signal(signal.SIGKILL)
        await self._reading
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    def _count(self, of: type[Event]) -> int:
        return sum(isinstance(event, of) for event in self.events)

    async def _read(self) -> None:
        try:
            while (line := await self._reader.readline()).endswith(b"\n"):
                event = _events.decode(line)
                self.events.append(event)
                if isinstance(event, Wrote | Heard | Ended | Failed):
                    self.asked[event.number].take(event)
                self._news.set()
        except ConnectionError:
            pass
        self.gone = True
        self._news.set()


class Processes(AsyncExitStack):
    """Ends with all of its nodes."""

    def __init__(self, nursery: str, source: Path, **defaults: Any) -> None:
        super().__init__()
        self.nodes: dict[str, NodeProcess] = {}
        self.key = new_key()
        self._nursery = nursery
        self._defaults: dict[str, Any] = {
            "model": MODEL,
            "source": source,
            "dtype": "float32",
            "threads": 1,
            "ping": 0.2,
            "silence": 10.0,
            "step_timeout": 20.0,
            "cache": 64 << 20,
            "context": 512,
            "drain": 5.0,
            "keep": 0.0,
            **defaults,
        }

    async def add(self, node_id: str, *layers: LayerRange | None, **more: Any) -> NodeProcess:
        """A node that has joined all that are there. `None` for layers is auto."""
        node = await self.born(node_id)
        await node.start(self.config(node_id, *layers, **more))
        self.nodes[node_id] = node
        return node

    async def born(self, node_id: str) -> NodeProcess:
        node = await NodeProcess.born(self._nursery, node_id)
        self.push_async_callback(node.close)
        return node

    def config(self, node_id: str, *layers: LayerRange | None, **more: Any) -> LpConfig:
        held = None if None in layers else tuple(one for one in layers if one is not None)
        addresses = tuple(one.address for one in self.nodes.values() if not one.gone)
        return LpConfig(
            node_id=node_id,
            key=self.key,
            **{"layers": held, "join": addresses, **self._defaults, **more},
        )

    async def origin(
        self, *layers: LayerRange | None, node_id: str = "a", **more: Any
    ) -> NodeProcess:
        return await self.add(node_id, *layers, end_model=True, **more)

    async def free(self) -> None:
        """Until no node has a job, or room that is used."""
        for node in self.nodes.values():
            if not node.gone:
                await node.until(lambda now: not (now.jobs or now.used or now.trips or now.lanes))
