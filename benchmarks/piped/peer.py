"""Language Pipes, by an interpreter that has it.

Its nodes are processes of their own, and are asked as its users ask them: over its API, in a
stream. An answer's last token is never in its stream, only the word that it is at its end; so a
rate is the time of a whole answer without that of an answer of one token, as it is of the other
sides. It computes in bfloat16 whatever it is given.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from piped.peer_nodes import HOST, MODEL, Lost, network
from piped.plan import PLANS, Plan, Spans
from processes import HERE, process_seconds

_SILENCE = 90.0
"""It forgets a job after 60 s in which nothing happened to it, and never says so."""
_ATTEMPTS = 3


def measure(python: str, name: str, folder: Path, nodes: int, how: str) -> dict[str, Any]:
    """A path of the interpreter is that from the repository, where benchmarks are run."""
    if os.sep in python:
        python = str(HERE.parent / python)
    for attempt in range(_ATTEMPTS):
        try:
            with (
                tempfile.TemporaryDirectory() as home,
                network(python, name, folder, nodes, Path(home)) as (port, pids),
            ):
                asked = Asked(folder, port, pids)
                return asyncio.run(measured(asked, PLANS[how]))
        except Lost as lost:
            print(f"attempt {attempt + 1}: {lost}", file=sys.stderr)
    raise SystemExit(f"no answers from Language Pipes in {_ATTEMPTS} attempts")


class Asked:
    def __init__(self, folder: Path, port: int, pids: list[int]) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = sorted(self._tokenizer.get_vocab().items(), key=lambda each: each[1])
        # Words that are one token each, whatever stands beside them.
        self._words = [f" {token[1:]}" for token, _ in tokens if re.fullmatch("Ġ[a-z]{3,8}", token)]
        self._port, self._pids = port, pids

    def read(self) -> tuple[float, float]:
        """Wall and processor seconds of all nodes together, of their ended threads as well:
        each of their messages has a thread of its own."""
        return time.perf_counter(), sum(map(process_seconds, self._pids))

    def prompt(self, length: int, number: int = 0) -> str:
        words = (
            self._words[(number * 7919 + place * 31) % len(self._words)] for place in range(length)
        )
        text = "".join(words)
        assert len(self._tokenizer.encode(text)) == length
        return text

    async def one(self, text: str, count: int) -> None:
        """Until the end of an answer of so many tokens."""
        told = [line for line in await self._answer(text, count, True) if line]
        if told[-1:] != ["[DONE]"] or '"error"' in "".join(told[-2:]):
            raise Lost(f"an answer ended with {told[-2:]}")
        if len(told) < count + 2:  # the role or a token each, the finish, the end
            raise Lost(f"an answer had {len(told)} pieces where {count} tokens were asked for")

    async def checked(self, length: int, count: int) -> None:
        """That the prompt and the answer have as many tokens as they should."""
        said = json.loads("".join(await self._answer(self.prompt(length), count, False)) or "{}")
        usage = said.get("usage", said)
        if usage.get("prompt_tokens") != length or usage.get("completion_tokens") != count:
            raise Lost(f"{length} and {count} tokens were asked for: {usage}")

    async def _answer(self, text: str, count: int, stream: bool) -> list[str]:
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": count,
                "temperature": 0,
                "stream": stream,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            writer.write(head.encode() + body)
            async with asyncio.timeout(_SILENCE):
                status = await reader.readline()
                await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in status:
                raise Lost(f"refused: {status.decode().strip()}")
            return await self._lines(reader, "data: " if stream else "")
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise Lost(f"nothing came any more: {error!r}") from error
        finally:
            writer.close()

    async def _lines(self, reader: asyncio.StreamReader, begins: str) -> list[str]:
        """Comments that only keep the connection are no sign of life."""
        found: list[str] = []
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_SILENCE) as patience:
            while line := (await reader.readline()).decode():
                if line.startswith(begins):
                    found.append(line.removeprefix(begins).strip())
                    patience.reschedule(loop.time() + _SILENCE)
        return found


async def measured(asked: Asked, plan: Plan) -> dict[str, Any]:
    await formed(asked)
    text = asked.prompt(plan.prompt)
    spans = Spans()
    for _ in range(plan.turns):
        began, cpu = asked.read()
        await asked.one(text, 1)
        first, first_cpu = asked.read()
        await asked.one(text, plan.tokens)
        whole, whole_cpu = asked.read()
        spans.add((first - began, first_cpu - cpu), (whole - first, whole_cpu - first_cpu))
    found: dict[str, Any] = dict(spans.figures(plan.tokens))
    for length in plan.first:
        text, firsts = asked.prompt(length, 1), []
        for _ in range(plan.turns):
            began, cpu = asked.read()
            await asked.one(text, 1)
            ended, spent = asked.read()
            firsts.append((ended - began, spent - cpu))
        found[f"first_{length}_ms"] = min(each[0] for each in firsts) * 1000
        found[f"first_{length}_cpu_ms"] = min(each[1] for each in firsts) * 1000
    for count in plan.at_once:
        texts = [asked.prompt(plan.prompt, 2 + number) for number in range(count)]
        rates = []
        for _ in range(plan.turns):
            began, cpu = asked.read()
            await asyncio.gather(*(asked.one(each, plan.together) for each in texts))
            ended, spent = asked.read()
            made = count * plan.together
            rates.append((made / (ended - began), (spent - cpu) / made * 1000))
        found[f"together_{count}"] = max(rate for rate, _ in rates)
        found[f"together_{count}_cpu_ms"] = min(cost for _, cost in rates)
    return found


async def formed(asked: Asked) -> None:
    """Its nodes hear of each other every few seconds; until then it refuses."""
    until = time.monotonic() + 60
    while True:
        try:
            return await asked.checked(8, 2)
        except Lost:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)
