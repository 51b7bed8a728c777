"""Nodes of Language Pipes on this machine, each in a process of its own.

A node finds a model in its folder of models and never asks the internet for it; which layers it
has follows from the room that it is given, and from who came before it.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

from piped.models import LAYERS
from piped.ours import parts
from processes import free_port, running, start

MODEL = "bench/model"
HOST = "127.0.0.1"
_READY = 300.0
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
