"""Language Pipes, by an interpreter that has it.

Its nodes are processes of their own, and are asked as its users ask them: over its API, in a
stream. An answer's last token is never in its stream, only the word that it is at its end; so a
rate is the time of a whole answer without that of an answer of one token, as it is of the other
sides. It computes in bfloat16 whatever it is given.

A node finds a model in its folder of models and never asks the internet for it; which layers it
has follows from the room that it is given, and from who came before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from piped.asking import LAYERS, Asked, measured
from piped.nodes import HOST, parts
from processes import HERE, free_port, running, start

MODEL = "bench/model"
_READY = 300.0
_SILENCE = 90.0
"""It forgets a job after 60 s in which nothing happened to it, and never says so."""
_ATTEMPTS = 3
_RUN = (
    "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"  # it ends with us, however we end
    "from language_pipes.cli import main; main()"
)
_TRY = (
    "import torch; w = torch.ones(64, 64, dtype=torch.bfloat16)\n"
    "for rows in (1, 32): torch.nn.functional.linear(w[:rows], w)"
)
_SAFER = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""For machines that claim AMX and don't have it: bfloat16 is their end otherwise."""


class Lost(Exception):
    """A node or an answer did not come."""


@contextlib.contextmanager
def network(
    python: str, name: str, folder: Path, nodes: int, home: Path
) -> Iterator[tuple[int, list[int]]]:
    """Each has as many layers as a node of ours; the first has the ends, and answers."""
    lay_out(folder, home / "models" / MODEL / "data")
    size, key, api, first = layer_bytes(folder), secrets.token_hex(16), free_port(), free_port()
    environment = {
        **safer(python),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": HOST,
        "LP_MODEL_DIR": str(home / "models"),
    }
    with contextlib.ExitStack() as stack:
        pids = []
        for number, layers in enumerate(parts(LAYERS[name], nodes)):
            own = home / f"node{number}"
            own.mkdir()
            # Half a layer more is no layer more.
            room = (len(layers) + 0.5) * size / 2**30
            told = config(own.name, key, room, first, api if number == 0 else None)
            (own / "node.toml").write_text(told)
            process = start(
                [python, "-I", "-c", _RUN, "-c", str(own / "node.toml"), "run"],
                own / "said",
                {**environment, "LP_APP_DIR": str(own), "HOME": str(own)},
            )
            pids += stack.enter_context(running([process]))
            # The next one takes what is left, so it must see what this one took.
            got = wait_for(process, own / "said", r"Layers (\d+-\d+) for \S+ successfully loaded")
            if got != str(layers):
                raise Lost(f"{own.name} took the layers {got}, not {layers}")
            if number == 0:
                wait_for(process, own / "said", r"(End Model) for \S+ loaded successfully")
        yield api, pids


def config(node_id: str, key: str, room: float, first: int, api: int | None) -> str:
    """Encrypted, as ours are. `api` is the first one's: others join it at the port `first`.

    The limits of jobs are beyond what is asked: above them it drops a message and waits for ever.
    """
    told = [
        f'node_id = "{node_id}"',
        f'network_ip = "{HOST}"',
        f'network_key = "{key}"',
        "max_node_jobs = 64",
        "max_api_jobs = 64",
        f"peer_port = {free_port() if api is None else first}",
    ]
    if api is not None:
        told += [f"job_port = {api}", f'end_models = ["{MODEL}"]']
    told += ["[[layer_models]]", f'model_id = "{MODEL}"', 'device = "cpu"', f"memory = {room:.9f}"]
    if api is None:
        told += ["[[bootstrap_nodes]]", f'address = "{HOST}"', f"port = {first}"]
    return "\n".join(told)


def lay_out(folder: Path, to: Path) -> None:
    """The model where it looks for it; a prompt is what is asked, and no token ends an answer."""
    to.mkdir(parents=True)
    for file in folder.iterdir():
        (to / file.name).symlink_to(file.resolve())
    for name, without in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        told = {**json.loads((folder / name).read_text()), without: None}
        (to / name).unlink()
        (to / name).write_text(json.dumps(told))
    (to / "chat_template.jinja").unlink(missing_ok=True)
    (to / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def layer_bytes(folder: Path) -> int:
    """Of one layer, in bfloat16."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    ours = (told for name, told in header.items() if name.startswith("model.layers.0."))
    return sum(2 * prod(told["shape"]) for told in ours)


def safer(python: str) -> dict[str, str]:
    """What its processes need so as not to die of their first multiplication."""
    tried = subprocess.run([python, "-I", "-c", _TRY], stderr=subprocess.DEVNULL)
    return _SAFER if tried.returncode < 0 else {}


def wait_for(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    until = time.monotonic() + _READY
    while time.monotonic() < until:
        said = log.read_text()
        if found := re.search(pattern, said):
            return found[1]
        if process.poll() is not None:
            raise Lost(f"a node ended with {process.returncode}:\n{said[-2000:]}")
        time.sleep(0.1)
    raise Lost(f"a node was not ready in time:\n{said[-2000:]}")


# -- asking -------------------------------------------------------------------------------


async def measure(
    python: str, name: str, folder: Path, nodes: int, plan: dict[str, Any]
) -> dict[str, float]:
    """A path of the interpreter is that from the repository, where benchmarks are run."""
    if os.sep in python:
        python = str(HERE.parent / python)
    for attempt in range(_ATTEMPTS):
        try:
            with (
                tempfile.TemporaryDirectory() as home,
                network(python, name, folder, nodes, Path(home)) as (port, pids),
            ):
                asked = Api(folder, port, pids)
                await formed(asked)
                return await measured(asked, plan)
        except Lost as lost:
            print(f"attempt {attempt + 1}: {lost}", file=sys.stderr)
    raise SystemExit(f"no answers from Language Pipes in {_ATTEMPTS} attempts")


class Api(Asked):
    def __init__(self, folder: Path, port: int, pids: list[int]) -> None:
        from transformers import AutoTokenizer

        super().__init__(pids)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = sorted(self._tokenizer.get_vocab().items(), key=lambda each: each[1])
        # Words that are one token each, whatever stands beside them.
        self._words = [f" {token[1:]}" for token, _ in tokens if re.fullmatch("Ġ[a-z]{3,8}", token)]
        self._port = port

    def prompt(self, length: int, number: int = 0) -> str:
        words = (
            self._words[(number * 7919 + place * 31) % len(self._words)] for place in range(length)
        )
        text = "".join(words)
        assert len(self._tokenizer.encode(text)) == length
        return text

    async def answer(self, text: str, count: int) -> None:
        """Until the end of an answer of so many tokens."""
        told = [line for line in await self._ask(text, count, True) if line]
        if told[-1:] != ["[DONE]"] or '"error"' in "".join(told[-2:]):
            raise Lost(f"an answer ended with {told[-2:]}")
        if len(told) < count + 2:  # the role or a token each, the finish, the end
            raise Lost(f"an answer had {len(told)} pieces where {count} tokens were asked for")

    async def checked(self, length: int, count: int) -> None:
        """That the prompt and the answer have as many tokens as they should."""
        said = json.loads("".join(await self._ask(self.prompt(length), count, False)) or "{}")
        usage = said.get("usage", said)
        if usage.get("prompt_tokens") != length or usage.get("completion_tokens") != count:
            raise Lost(f"{length} and {count} tokens were asked for: {usage}")

    async def _ask(self, text: str, count: int, stream: bool) -> list[str]:
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


async def formed(asked: Api) -> None:
    """Its nodes hear of each other every few seconds; until then it refuses."""
    until = time.monotonic() + 60
    while True:
        try:
            return await asked.checked(8, 2)
        except Lost:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)
