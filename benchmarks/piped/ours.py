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
from measure import resident_bytes
from piped.models import LAYERS
from processes import HERE

from penstock.workloads.pipes.config import LayerRange, LpConfig
from penstock.workloads.pipes.wire.identity import new_key


def measure(name: str, folder: Path, nodes: int, how: str) -> dict[str, Any]:
    """The origin has the first part, and the ends; the others have a part each."""
    key, first, *others = new_key(), *parts(LAYERS[name], nodes)
    started: list[subprocess.Popen[bytes]] = []
    try:
        join: tuple[str, ...] = ()
        weights = []
        for number, layers in enumerate(others):
            told = config(name, folder, key, f"n{number + 1}", layers, join)
            process = run(
                "node.py", msgspec.json.encode(told, enc_hook=str).decode(), stdin=subprocess.PIPE
            )
            started.append(process)
            said = json.loads(line(process))
            join = join or (said["address"],)
            weights.append(said["weights"])
        told = config(name, folder, key, "origin", first, join, end_model=True)
        pids = json.dumps([process.pid for process in started])
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


def base(name: str, folder: Path) -> int:
    """What a node takes that holds nothing: Python, torch, connections."""
    told = config(name, folder, new_key(), "empty", None, ())
    encoded = msgspec.json.encode(told, enc_hook=str).decode()
    process = run("node.py", encoded, stdin=subprocess.PIPE)
    try:
        line(process)
        return resident_bytes(process.pid)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


def parts(layers: int, nodes: int) -> list[LayerRange]:
    cuts = [round(layers * n / nodes) for n in range(nodes + 1)]
    return [LayerRange(a, b) for a, b in pairwise(cuts)]


def config(
    name: str,
    folder: Path,
    key: str,
    node_id: str,
    layers: LayerRange | None,
    join: tuple[str, ...],
    **more: Any,
) -> LpConfig:
    return LpConfig(
        model=name,
        source=folder,
        node_id=node_id,
        layers=() if layers is None else (layers,),
        key=key,
        join=join,
        dtype="float32",
        threads=1,
        keep=0,
        context=1024,
        prefill_chunk_size=256,
        **more,
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
