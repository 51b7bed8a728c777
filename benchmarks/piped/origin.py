"""The origin, with what is asked of it: `origin.py CONFIG PIDS HOW`; figures as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec
import uvloop
from piped.models import prompt
from piped.plan import PLANS, TEXTS, Plan, Spans
from processes import process_seconds, resident_bytes

from penstock.workloads.llm.values import Completion, CompletionRequest, Sampling
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.node import TICK, Node
from penstock.workloads.pipes.routes import Route
from penstock.workloads.pipes.wire.messages import Kind


class Clocks:
    """Wall and processor seconds of all nodes together."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids

    def read(self) -> tuple[float, float]:
        others = sum(map(process_seconds, self._pids))
        return time.perf_counter(), time.process_time() + others


def asked(ids: list[int], count: int) -> CompletionRequest:
    return CompletionRequest(
        prompts=(tuple(ids),), max_tokens=count, sampling=Sampling(temperature=0), logprobs=0
    )


async def one(node: Node, ids: list[int], count: int) -> tuple[float, float, Completion]:
    """When its first and its last token came."""
    first = last = 0.0
    said: Completion | None = None
    async for piece in node.generate(asked(ids, count)):
        last = time.perf_counter()
        first = first or last
        said = piece if isinstance(piece, Completion) else said
    assert said is not None
    return first, last, said


async def answers(node: Node, plan: Plan) -> dict[str, Any]:
    """Tokens/s and tokens a round trip, of texts that have much of what they answer in them and of
    some that have not."""
    found: dict[str, Any] = {}
    for kind, texts in TEXTS.items():
        rates, trips = [], []
        for text in texts:
            ask = CompletionRequest(
                prompts=(text,), max_tokens=plan.answer, sampling=Sampling(temperature=0)
            )
            first = last = 0.0
            async for piece in node.generate(ask):
                last = time.perf_counter()
                first = first or last
                if isinstance(piece, Completion):
                    [passes] = [hop.passes for hop in piece.hops if hop.layers == "ends"]
                    trips.append((plan.answer - 1) / (passes - 1))
                    found.setdefault("texts", []).append(piece.choice.text)
            rates.append((plan.answer - 1) / (last - first))
        found[f"{kind}_rate"] = fmean(rates)
        found[f"{kind}_tokens_a_trip"] = fmean(trips)
    return found


async def measured(node: Node, plan: Plan, clocks: Clocks) -> dict[str, Any]:
    ids = prompt(plan.prompt)
    await one(node, prompt(8), 2)
    spans = Spans()
    found: dict[str, Any] = {}
    sent = counted(node)
    for _ in range(plan.turns):
        began, cpu = clocks.read()
        before = sent["bytes"]
        await one(node, ids, 1)
        first, first_cpu = clocks.read()
        prefill = sent["bytes"]
        _, _, said = await one(node, ids, plan.tokens)
        whole, whole_cpu = clocks.read()
        spans.add((first - began, first_cpu - cpu), (whole - first, whole_cpu - first_cpu))
        steps = plan.tokens - 1
        found["bytes"] = (sent["bytes"] - prefill - (prefill - before)) / steps
    found |= {**spans.figures(plan.tokens), "hops": hops(node)}
    found["text"] = [one_of.token for one_of in said.choice.logprobs or ()]
    for length in plan.first:
        firsts = []
        for _ in range(plan.turns):
            began, cpu = clocks.read()
            first, _, _ = await one(node, prompt(length, 1), 1)
            firsts.append((first - began, clocks.read()[1] - cpu))
        found[f"first_{length}_ms"] = min(each[0] for each in firsts) * 1000
        found[f"first_{length}_cpu_ms"] = min(each[1] for each in firsts) * 1000
    for count in plan.at_once:
        rates = []
        for _ in range(plan.turns):
            began, cpu = clocks.read()
            jobs = (one(node, prompt(plan.prompt, 2 + n), plan.together) for n in range(count))
            await asyncio.gather(*jobs)
            ended, spent = clocks.read()
            made = count * plan.together
            rates.append((made / (ended - began), (spent - cpu) / made * 1000))
        found[f"together_{count}"] = max(rate for rate, _ in rates)
        found[f"together_{count}_cpu_ms"] = min(cost for _, cost in rates)
    return found


def counted(node: Node) -> dict[str, int]:
    """Bytes of the steps that leave this node, before they are encrypted."""
    total = {"bytes": 0}
    send = node.mesh.send

    def counting(node_id: str, kind: Kind, *buffers: bytes | memoryview) -> bool:
        if kind is Kind.STEPS:
            total["bytes"] += sum(map(len, buffers))
        return send(node_id, kind, *buffers)

    node.mesh.send = counting  # type: ignore[method-assign]
    return total


def hops(node: Node) -> int:
    """How often a token goes over the network."""
    way = node.find(frozenset())
    assert isinstance(way, Route)
    names = [node.node_id, *(hop.node_id for hop in way.hops), node.node_id]
    return sum(a != b for a, b in pairwise(names))


async def main(config: LpConfig, pids: list[int], how: str) -> None:
    node = Node(config)
    await node.start()
    while not isinstance(node.find(frozenset()), Route):
        await node.changed(1.0)
    if config.memory and any(one.room >= one.num_layers for one in node.records()):
        raise SystemExit("one node has memory for the whole model")
    assert node.origin is not None
    node.origin.text.ends = frozenset()  # answers are as long as was asked
    plan = PLANS[how]
    if config.advertise:  # links that are slow
        figures = await answers(node, plan)
    else:
        figures = await measured(node, plan, Clocks(pids))
    await asyncio.sleep(2 * TICK)  # nodes that are idle give back what they computed with
    for number, pid in enumerate(pids):
        figures[f"resident_{number}"] = resident_bytes(pid)
    print(json.dumps(figures), flush=True)
    await node.stop()


if __name__ == "__main__":
    uvloop.run(
        main(
            msgspec.json.decode(sys.argv[1], type=LpConfig, dec_hook=lambda kind, told: kind(told)),
            json.loads(sys.argv[2]),
            sys.argv[3],
        )
    )
