"""Members of a network that have its key and say what they like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from tests.support.pipes.networks import LAYERS, MODEL, Network, SmallModel, asked, until

from penstock.workloads.llm.values import Delta
from penstock.workloads.pipes import network_job
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.generation import Generation
from penstock.workloads.pipes.net.records import (
    NodeRecord,
    SegmentRecord,
    SegmentState,
    new_boot,
    state_of,
)
from penstock.workloads.pipes.network_job import NetworkJob, pack_steps, unpack_steps
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.wire.connection import Splitter
from penstock.workloads.pipes.wire.identity import Identity, parse
from penstock.workloads.pipes.wire.messages import (
    HELLO_LIMITS,
    Hello,
    Kind,
    Message,
    Open,
    Opened,
    decode,
    encode,
    kind_of,
    limits,
)

T = TypeVar("T", bound=Message)
LONG = 440
BESIDE = tuple(range(100, 140))
"""The prompt of the answer that goes on beside all this."""


class Stranger:
    """With layers of its own it answers every OPEN, and leaves each step to `on_step`."""

    def __init__(self, network: Network, node_id: str = "m") -> None:
        self.node_id = node_id
        self.on_step: Callable[[str, NetworkJob], None] = lambda sender, job: None
        self._network, self._boot = network, new_boot()
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._reading: set[asyncio.Task[None]] = set()
        self._heard: list[tuple[str, Kind, memoryview]] = []
        self._news = asyncio.Event()

    async def join(self, layers: LayerRange | None = None) -> None:
        """All nodes. Of these layers it says that it has them, as good as any and quicker."""
        for node in self._network.nodes.values():
            await self._dial(node)
        record = NodeRecord(
            node_id=self.node_id,
            boot=self._boot,
            version=1,
            model=MODEL,
            num_layers=LAYERS,
            segments=(self._segment(layers),) if layers is not None else (),
        )
        for node in self._network.nodes.values():
            self.say(node.node_id, Kind.STATE, state_of([record]))
            await until(lambda node=node: self.node_id in node.mesh.table, node)

    async def _dial(self, node: Node) -> None:
        context = Identity.make(self._network.key, self.node_id).client
        reader, writer = await asyncio.open_connection(
            *parse(node.address), ssl=context, server_hostname="x"
        )
        self._writers[node.node_id] = writer
        self.tell(node.node_id, Hello(node_id=self.node_id, boot=self._boot))
        reading = asyncio.ensure_future(self._read(node.node_id, reader))
        self._reading.add(reading)

    def _segment(self, layers: LayerRange) -> SegmentRecord:
        """As somebody tells it who has the same weights."""
        held = {
            layer: segment.fingerprint(layer)
            for node in self._network.nodes.values()
            for segment in node.record.segments
            for layer in range(segment.layers.start, segment.layers.end)
        }
        return SegmentRecord(
            model=MODEL,
            layers=layers,
            num_layers=LAYERS,
            fingerprints=tuple(held[n] for n in range(layers.start, layers.end)),
            state=SegmentState.READY,
            dtype="float32",
            layer_ms=0.001,
        )

    async def leave(self) -> None:
        for writer in self._writers.values():
            writer.transport.abort()
        await asyncio.gather(*self._reading, return_exceptions=True)

    # -- what it says ---------------------------------------------------------------

    def tell(self, to: str, message: Message) -> None:
        self.say(to, kind_of(message), encode(message))

    def step(self, to: str, job: NetworkJob) -> None:
        self.say(to, Kind.STEPS, b"".join(pack_steps([job])))

    def say(self, to: str, kind: int, payload: bytes, size: int | None = None) -> None:
        """A frame; with another size than it says of itself if one is given."""
        size = len(payload) if size is None else size
        self._writers[to].write(size.to_bytes(4, "little") + bytes([kind]) + payload)

    def hang_up(self, to: str) -> None:
        self._writers[to].close()

    # -- what it hears --------------------------------------------------------------

    async def hear(self, of: type[T], sender: str) -> T:
        """The first of a kind that a node tells."""
        async with asyncio.timeout(20):
            while True:
                for who, kind, payload in self._heard:
                    if (who, kind) == (sender, Kind[of.__name__.upper()]):
                        return decode(payload, of)
                self._news.clear()
                await self._news.wait()

    async def _read(self, sender: str, reader: asyncio.StreamReader) -> None:
        splitter = Splitter({**limits(), **HELLO_LIMITS})
        try:
            while data := await reader.read(1 << 16):
                for kind, payload in splitter.feed(data):
                    self._take(sender, kind, payload)
        except OSError:
            pass

    def _take(self, sender: str, kind: Kind, payload: memoryview) -> None:
        self._heard.append((sender, kind, payload))
        self._news.set()
        if kind is Kind.PING:
            self.say(sender, Kind.PONG, bytes(payload))
        elif kind is Kind.OPEN:
            self.tell(sender, Opened(job_id=decode(payload, Open).job_id, ok=True))
        elif kind is Kind.STEPS:
            for job in unpack_steps(payload):
                self.on_step(sender, job)


@asynccontextmanager
async def stranger(network: Network, layers: LayerRange | None = None) -> AsyncIterator[Stranger]:
    made = Stranger(network)
    try:
        await made.join(layers)
        yield made
    finally:
        await made.leave()


def rehashed(job: NetworkJob, at: int, value: int) -> bytes:
    """A step whose header has another byte at this place, and a hash that fits."""
    data = bytearray(b"".join(pack_steps([job])))
    begin = network_job._PREFIX.size
    data[begin + at] = value
    length = int.from_bytes(data[begin + 16 : begin + 18], "little")
    numbers = begin + int.from_bytes(data[4:8], "little")
    rest = bytes(data[begin + network_job.HASH_BYTES : begin + length])
    data[begin : begin + network_job.HASH_BYTES] = network_job._digest(rest, bytes(data[numbers:]))
    return bytes(data)


def slow(node: Node) -> None:
    """Have it say that it is, so that any other is preferred."""
    node._holding._layer_ms = dict.fromkeys(node._holding._layer_ms, 1000.0)
    node._news()


class Beside:
    """Somebody who asks the same again and again while other things happen."""

    def __init__(self, node: Node, small: SmallModel) -> None:
        self._node, self._right = node, small.text(BESIDE, LONG)
        self._pieces = 0
        self._said = asyncio.Event()

    @property
    def generation(self) -> tuple[bytes, Generation]:
        """The id of its job, and its way."""
        assert self._node.origin is not None
        [found] = [
            (job_id, generation)
            for job_id, generation in self._node.origin._generations.items()
            if tuple(generation.ids[: len(BESIDE)]) == BESIDE
        ]
        return found

    async def run(self) -> None:
        """Each time over the same nodes, which have kept what they know of it."""
        while True:
            await self._ask()

    async def _ask(self) -> None:
        text = ""
        async with aclosing(self._node.generate(asked(BESIDE, LONG))) as pieces:
            async for piece in pieces:
                if isinstance(piece, Delta):
                    text += piece.text
                    assert self._right.startswith(text)
                    self._pieces += 1
                    self._said.set()
        assert text == self._right

    async def goes_on(self, running: asyncio.Future[None]) -> None:
        """It is told more, and all of it is what the whole model says."""
        known = self._pieces
        async with asyncio.timeout(20):
            while self._pieces < known + 3:
                self._said.clear()
                said: asyncio.Future[Any] = asyncio.ensure_future(self._said.wait())
                await asyncio.wait({said, running}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()


@asynccontextmanager
async def beside(node: Node, small: SmallModel) -> AsyncIterator[Beside]:
    """An answer has begun; at the end it, or one more, still goes on as it should."""
    one = Beside(node, small)
    running = asyncio.ensure_future(one.run())
    try:
        await one.goes_on(running)
        yield one
        await one.goes_on(running)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
