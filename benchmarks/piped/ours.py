"""A network of so many nodes on this machine, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from piped.models import LAYERS
from processes import HERE, resident_bytes

from penstock.workloads.pipes.config import LayerRange, LpConfig
from penstock.workloads.pipes.weights.source import architecture_of, open_source
from penstock.workloads.pipes.wire.identity import new_key


def measure(
    name: str,
    folder: Path,
    nodes: int,
    how: str,
    delay: float = 0.0,
    *,
    is_limited: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """The origin has the first part, and the ends; the others have a part each. With a delay all
    links between them have it. If memory is limited, each has room for a little more than half of
    the layers, and the network decides which."""
    key, first, *others = new_key(), *parts(LAYERS[name], nodes, is_auto=is_limited)
    started: list[subprocess.Popen[bytes]] = []
    try:
        join: tuple[str, ...] = ()
        weights = []
        links = slow_links(delay, nodes, started)
        for number, layers in enumerate(others):
            link = {**links[number + 1], **limits(folder, is_limited=is_limited)}
            told = config(name, folder, key, f"n{number + 1}", layers, join, **more, **link)
            process = run(
                "node.py", msgspec.json.encode(told, enc_hook=str).decode(), stdin=subprocess.PIPE
            )
            started.append(process)
            said = json.loads(line(process))
            join = join or (link.get("advertise", said["address"]),)
            weights.append(said["weights"])
        more |= {**links[0], **limits(folder, is_limited=is_limited, ends=True)}
        told = config(name, folder, key, "origin", first, join, end_model=True, **more)
        pids = json.dumps([process.pid for process in started[delay > 0 :]])
        process = run("origin.py", msgspec.json.encode(told, enc_hook=str).decode(), pids, how)
        started.append(process)
        figures: dict[str, Any] = json.loads(line(process))
        return {**figures, **{f"weights_{n}": size for n, size in enumerate(weights)}}
    finally:
        for process in reversed(started):
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def slow_links(
    delay: float, nodes: int, started: list[subprocess.Popen[bytes]]
) -> list[dict[str, str]]:
    """What each node is to be told of its address."""
    if not delay:
        return [{}] * nodes
    process = run("delay.py", str(delay), str(nodes), stdin=subprocess.PIPE)
    started.append(process)
    return [
        {"advertise": f"127.0.0.1:{shown}", "listen": f"127.0.0.1:{port}"}
        for shown, port in json.loads(line(process))
    ]


def base(name: str, folder: Path) -> int:
    """What a node takes that holds nothing: Python, torch, connections."""
    told = config(name, folder, new_key(), "empty", (), ())
    encoded = msgspec.json.encode(told, enc_hook=str).decode()
    process = run("node.py", encoded, stdin=subprocess.PIPE)
    try:
        line(process)
        return resident_bytes(process.pid)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


def parts(layers: int, nodes: int, *, is_auto: bool = False) -> list[tuple[LayerRange, ...] | None]:
    if is_auto:
        return [None] * nodes
    cuts = [round(layers * n / nodes) for n in range(nodes + 1)]
    return [(LayerRange(a, b),) for a, b in pairwise(cuts)]


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
    join: tuple[str, ...],
    **more: Any,
) -> LpConfig:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "threads": 1,
        "keep": 0,
        "context": 1024,
        "prefill_chunk_size": 256,
        # Each token is computed, as by the others.
        "speculation": False,
        **more,
    }
    return LpConfig(
        model=name,
        source=folder,
        node_id=node_id,
        layers=layers,
        key=key,
        join=join,
        **settings,
    )


def run(script: str, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "piped" / script), *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
    )


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        raise SystemExit(f"a node ended with {process.wait()} before it was ready")
    return said
