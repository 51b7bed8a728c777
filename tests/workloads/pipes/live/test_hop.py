"""How many modules a token passes on its way through a node that only has layers."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import FrameType
from typing import Any

from tests.support.pipes.networks import Network, SmallModel, ask, asked, ranges, whole

from penstock.testing.aio import run_async
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.receiver import JobReceiver

TOKENS = 24
MOST = 15
"""Modules that one hop of one token may pass, of all in src/penstock."""


class Trace:
    """The modules that are called for each token, in threads that are started while it is on."""

    def __init__(self) -> None:
        self.tokens: list[set[str]] = []
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call":
            return
        name = frame.f_globals.get("__name__", "")
        if name.startswith("penstock."):
            if frame.f_code is JobReceiver.receive.__code__:
                self.tokens.append(set())
            if self.tokens:
                self.tokens[-1].add(name)

    def __enter__(self) -> Trace:
        threading.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]

    def of_every_token(self) -> list[str]:
        """Signs of life and looks at deadlines come now and then, and not with every token."""
        return sorted(set.intersection(*self.tokens[1:-1]))


class OwnThread:
    """A node with an event loop of its own, so that what it does can be told from others' work."""

    def __init__(self, node: Node) -> None:
        self._node, self._loop = node, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    async def start(self) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._node.start(), self._loop))

    async def stop(self) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._node.stop(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()


@run_async
async def test_a_hop_of_a_token_passes_few_modules(small: SmallModel) -> None:
    first, middle, last = ranges(0, 2, 4, 6)
    trace = Trace()
    async with Network(small) as network:
        node = await network.origin(first)
        await network.add("c", last)
        with trace:
            hop = OwnThread(Node(network.config("b", middle)))
            await hop.start()
        network.push_async_callback(hop.stop)
        await whole(node)
        await ask(node, asked(count=2))  # what is imported or made once, is
        trace.on = True
        await ask(node, asked(count=TOKENS))
        trace.on = False
    passed = trace.of_every_token()
    sys.stdout.write("\n".join(passed))
    assert 1 < len(passed) <= MOST, passed
