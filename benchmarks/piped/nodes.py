"""A network of so many nodes on this machine, each in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from harness import call, serving
from piped.asking import LAYERS, TEXTS, Asked, measured
from processes import free_port, resident_bytes

from penstock.workloads.llm.values import Completion, CompletionRequest, Sampling
from penstock.workloads.pipes.config import LayerRange, LpConfig
from penstock.workloads.pipes.node import TICK, Node
from penstock.workloads.pipes.routes import Route
from penstock.workloads.pipes.weights.source import architecture_of, open_source
from penstock.workloads.pipes.wire.identity import new_key
from penstock.workloads.pipes.wire.messages import Kind

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
HOST = "127.0.0.1"


# -- the network, seen from outside -------------------------------------------------------


def network(
    name: str,
    folder: Path,
    nodes: int,
    plan: dict[str, Any],
    *,
    delay: float = 0.0,
    is_limited: bool = False,
    **more: Any,
) -> dict[str, float]:
    """The origin has the first part, and the ends; the others have a part each. With a delay all
    links between them have it. If memory is limited, each has room for a little more than half of
    the layers, and the network decides which."""
    layers: list[Any] = [None] * nodes if is_limited else [(p,) for p in parts(LAYERS[name], nodes)]
    key, join, figures, pids = new_key(), "", dict[str, float](), list[int]()
    with ExitStack() as stack:
        links: list[dict[str, str]] = [{}] * nodes
        if delay:
            proxies = serving("piped.nodes:slow_links", delay, nodes)
            links = stack.enter_context(proxies).told
        for number in range(1, nodes):
            own = {**more, **links[number], **limits(folder, is_limited=is_limited)}
            told = config(name, folder, key, f"n{number}", layers[number], join, **own)
            node = stack.enter_context(serving("piped.nodes:node", told, environment=ONE_THREAD))
            join = join or links[number].get("advertise", node.told["address"])
            pids.append(node.pid)
            figures[f"weights_{number}"] = node.told["weights"]
        own = {**more, **links[0], **limits(folder, is_limited=is_limited, ends=True)}
        told = config(name, folder, key, "origin", layers[0], join, end_model=True, **own)
        figures |= call("piped.nodes:origin", told, pids, plan, environment=ONE_THREAD)
    return figures


def empty_bytes(name: str, folder: Path) -> int:
    """What a node takes that holds nothing: Python, torch, connections."""
    told = config(name, folder, new_key(), "empty", (), "")
    with serving("piped.nodes:node", told, environment=ONE_THREAD) as node:
        return resident_bytes(node.pid)


def parts(layers: int, nodes: int) -> list[LayerRange]:
    cuts = [round(layers * n / nodes) for n in range(nodes + 1)]
    return [LayerRange(a, b) for a, b in pairwise(cuts)]


def limits(folder: Path, *, is_limited: bool, ends: bool = False) -> dict[str, int]:
    """Memory for one layer more than half of them, for a cache, and to load a layer; where the
    ends are, for those too."""
    if not is_limited:
        return {}
    architecture = architecture_of(open_source(folder))
    layer, cache = 4 * max(architecture.layer_values), 64 << 20
    memory = (architecture.num_layers // 2 + 1) * layer + 2 * layer + cache
    return {"memory": memory + 4 * architecture.end_values * ends, "cache": cache}


def config(
    name: str,
    folder: Path,
    key: str,
    node_id: str,
    layers: tuple[LayerRange, ...] | None,
    join: str,
    **more: Any,
) -> str:
    """A node's configuration as JSON. Each token is computed, as by the others, unless `more`
    says that it may speculate."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "threads": 1,
        "keep": 0,
        "context": 1024,
        "prefill_chunk_size": 256,
        "speculation": False,
        "join": (join,) if join else (),
        **more,
    }
    made = LpConfig(model=name, source=folder, node_id=node_id, layers=layers, key=key, **settings)
    return msgspec.json.encode(made, enc_hook=str).decode()


def read_config(text: str) -> LpConfig:
    return msgspec.json.decode(text, type=LpConfig, dec_hook=lambda kind, told: kind(told))


# -- processes ----------------------------------------------------------------------------


@asynccontextmanager
async def node(told: str) -> AsyncIterator[dict[str, Any]]:
    """A node that holds layers."""
    made = Node(read_config(told))
    await made.start()
    yield {"address": made.address, "weights": made.record.weights}
    await made.stop()


@asynccontextmanager
async def slow_links(delay: float, count: int) -> AsyncIterator[list[dict[str, str]]]:
    """One proxy for each node, which the others know it by: what it carries is late by so many
    seconds in both directions. Says what each node is to be told of its address."""
    links = []
    for _ in range(count):
        port = free_port()
        server = await asyncio.start_server(partial(_link, port, delay), HOST, 0)
        shown = server.sockets[0].getsockname()[1]
        links.append({"advertise": f"{HOST}:{shown}", "listen": f"{HOST}:{port}"})
    yield links


async def _link(
    port: int, delay: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            loop.call_later(delay, writer.write, data)
        loop.call_later(delay, writer.close)

    try:
        there, back = await asyncio.open_connection(HOST, port)
    except OSError:  # the node is not there yet
        writer.close()
        return
    for one in (writer, back):
        one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await asyncio.gather(carry(reader, back), carry(there, writer), return_exceptions=True)


async def origin(told: str, pids: list[int], plan: dict[str, Any]) -> dict[str, float]:
    """The origin, and what it is asked."""
    settings = read_config(told)
    made = Node(settings)
    await made.start()
    while not isinstance(made.find(frozenset()), Route):
        await made.changed(1.0)
    if settings.memory and any(one.room >= one.num_layers for one in made.records()):
        raise SystemExit("one node has memory for the whole model")
    assert made.origin is not None
    made.origin.text.ends = frozenset()  # answers are as long as was asked
    if settings.advertise:  # links that are slow
        figures = await answers(made, plan)
    else:
        asked = Origin(made, pids)
        await asked.answer(asked.prompt(8), 2)
        figures = {**await measured(asked, plan), "hops": hops(made)}
    await asyncio.sleep(2 * TICK)  # nodes that are idle give back what they computed with
    figures |= {f"resident_{number}": resident_bytes(pid) for number, pid in enumerate(pids, 1)}
    await made.stop()
    return figures


class Origin(Asked):
    def __init__(self, node: Node, pids: list[int]) -> None:
        super().__init__(pids)
        self._node, send = node, node.mesh.send

        def counted(node_id: str, kind: Kind, *buffers: bytes | memoryview) -> bool:
            if kind is Kind.STEPS:
                self.sent += sum(map(len, buffers))
            return send(node_id, kind, *buffers)

        node.mesh.send = counted  # type: ignore[method-assign]

    def read(self) -> tuple[float, float]:
        wall, others = super().read()
        return wall, others + time.process_time()

    async def answer(self, prompt: list[int], count: int) -> None:
        greedy = Sampling(temperature=0)
        ask = CompletionRequest(
            prompts=(tuple(prompt),), max_tokens=count, sampling=greedy, logprobs=0
        )
        said = [piece async for piece in self._node.generate(ask)][-1]
        assert isinstance(said, Completion)
        assert len(said.choice.logprobs or ()) == count


async def answers(node: Node, plan: dict[str, Any]) -> dict[str, float]:
    """Tokens/s and tokens a round trip, of texts that have much of what they answer in them and of
    some that have not."""
    found, steps = dict[str, float](), plan["answer"] - 1
    for kind, texts in TEXTS.items():
        rates, trips = [], []
        for text in texts:
            greedy = Sampling(temperature=0)
            ask = CompletionRequest(prompts=(text,), max_tokens=plan["answer"], sampling=greedy)
            first = last = 0.0
            async for piece in node.generate(ask):
                last = time.perf_counter()
                first = first or last
                if isinstance(piece, Completion):
                    [passes] = [hop.passes for hop in piece.hops if hop.layers == "ends"]
                    trips.append(steps / (passes - 1))
            rates.append(steps / (last - first))
        found |= {f"{kind}_rate": fmean(rates), f"{kind}_tokens_a_trip": fmean(trips)}
    return found


def hops(node: Node) -> int:
    """How often a token goes over the network."""
    way = node.find(frozenset())
    assert isinstance(way, Route)
    names = [node.node_id, *(hop.node_id for hop in way.hops), node.node_id]
    return sum(a != b for a, b in pairwise(names))
