"""`penstock node`: nodes as people start, watch and end them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.cli.commands import Penstock, said
from tests.support.pipes.networks import PROMPT, SmallModel, asked
from tests.support.pipes.terminals import Terminal
from tests.support.processes import children_of
from tests.support.waiting import eventually

SETTINGS = {
    "PENSTOCK_NODE__DTYPE": "float32",
    "PENSTOCK_NODE__THREADS": "1",
    "PENSTOCK_NODE__CACHE": str(16 << 20),
    "PENSTOCK_NODE__CONTEXT": "512",
    "PENSTOCK_NODE__HEARTBEAT": "0.2",
    "PENSTOCK_NODE__LEASE": "3",
}


def environment(small: SmallModel) -> dict[str, str]:
    return {**SETTINGS, "PENSTOCK_NODE__MODEL": str(small.folder), "TERM": "dumb"}


@pytest.fixture
def penstock(tmp_path: Path, small: SmallModel) -> Penstock:
    made = Penstock(tmp_path)
    made.env |= environment(small)
    return made


@contextmanager
def node(penstock: Penstock, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A node, once it is there."""
    process = penstock.start("node", *args, stderr=subprocess.STDOUT)
    try:
        penstock.banner = said(process, "ready; Ctrl-C stops it")
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def address(penstock: Penstock) -> str:
    (line,) = [line for line in penstock.banner.splitlines() if "listening  " in line]
    return line.split()[1]


class Pair(Penstock):
    """A layer node `b`, and an origin `a` that has joined it."""

    layers: subprocess.Popen[str]
    origin: subprocess.Popen[str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, small: SmallModel) -> Iterator[Pair]:
    shared = Pair(tmp_path_factory.mktemp("pair"))
    shared.env |= environment(small)
    with node(shared, "start", "--layers", "0-2", "--node-id", "b") as shared.layers:
        layers = shared.banner
        args = ("--end-model", "--node-id", "a", "--no-http", "--join", address(shared))
        with node(shared, "start", "--layers", "3-5", *args) as shared.origin:
            shared.banner = layers + shared.banner + said(shared.origin, "complete    tiny")
            yield shared


def test_a_node_tells_what_it_holds_and_how_it_is_joined(pair: Pair) -> None:
    key = pair.out("node", "key")
    told = " ".join(pair.banner.split())
    assert "layer node b, process" in told
    assert "layers 0-2 computes in float32, 1 thread" in told
    assert "penstock node start --model tiny --join 127.0.0.1:" in told
    assert "FILE has what 'penstock node key' prints here" in told
    assert key not in told


def test_an_origin_tells_how_to_talk_with_it_and_when_its_pipe_is_whole(pair: Pair) -> None:
    told = " ".join(pair.banner.split())
    assert "origin a, process" in told
    assert "layers 0, 3-5, text" in told
    assert "talk penstock chat" in told
    assert "submit penstock submit job.chat.tiny" in told
    assert "joined b 127.0.0.1:" in told
    assert "complete tiny a 0 → b 1-2 → a 3-5" in told


@pytest.mark.seed("000", "13.1")
def test_an_origin_answers_as_the_whole_model_does(pair: Pair, small: SmallModel) -> None:
    job = msgspec.to_builtins(asked())
    told = pair.json("submit", "job.chat.tiny", "--input", json.dumps(job), "--wait")
    result = told["value"]
    assert result["choices"][0]["text"] == small.text(PROMPT, 12)
    assert {hop["node"] for hop in result["hops"]} == {"a", "b"}


def test_a_conversation_goes_over_the_nodes(pair: Pair) -> None:
    done = pair("chat", "--stats", "--temperature", "0", "--max-tokens", "5", given="abc")
    assert done.stdout.strip()
    assert "5 answer tokens" in done.stderr
    assert "b, layers 1-2: " in done.stderr


@pytest.mark.seed("000", "18.13")
def test_the_status_draws_who_holds_what(pair: Pair) -> None:
    told = pair.out("node", "status")
    lines = told.splitlines()
    assert lines[0] == "tiny  6 layers, 2 nodes  complete"
    assert "route: a 0 → b 1-2 → a 3-5" in lines[1]
    assert any(line.startswith("b ") and line.split()[2:] == ["0-2", "ready"] for line in lines)


def test_the_status_is_the_same_whoever_is_asked(pair: Pair) -> None:
    def seen(*args: str) -> Any:
        view = pair.json("node", "status", *args)
        return view["pipes"][0]["complete"], [node["node_id"] for node in view["nodes"]]

    socket = f"unix:{pair.data / 'penstock.sock'}"
    assert seen() == (True, ["a", "b"])
    assert eventually(lambda: seen("--connect", socket)) == (True, ["a", "b"])


def test_the_status_of_a_foreign_network_is_refused(pair: Pair) -> None:
    key = "x" * 43
    where = pair.json("node", "status")["nodes"][0]["address"]
    told = pair.err("node", "status", "--join", where, "--network-key", key, code=8)
    assert where in told
    assert "is its key this one" in told


def test_the_status_can_be_watched(pair: Pair) -> None:
    with Terminal(pair.folder, pair.env, "pipe", "status", "--watch") as terminal:
        terminal.read_to("tiny  6 layers, 2 nodes  complete")
        terminal.read_to("tiny  6 layers, 2 nodes  complete")
        terminal.type("\x03")
        assert terminal.ended() == 130


def test_a_node_that_is_asked_to_end_drains_and_is_missed(pair: Pair) -> None:
    """And the origin, whose job then waits in vain, ends at once when it is told twice."""
    pair.layers.send_signal(signal.SIGTERM)
    assert pair.layers.communicate(timeout=30)[0].splitlines()[-1].endswith(" stopped")
    assert pair.layers.returncode == 0
    assert "lost        b  it left" in said(pair.origin, "incomplete  tiny")
    pair.submit("job.chat.tiny", msgspec.to_builtins(asked()))
    eventually(lambda: pair.json("ps", "--state", "running"))
    pair.origin.send_signal(signal.SIGTERM)
    said(pair.origin, "once more to stop at once")
    pair.origin.send_signal(signal.SIGTERM)
    assert "stopped at once" in pair.origin.communicate(timeout=30)[0]
    assert pair.origin.returncode == 130


def test_a_node_can_be_a_worker_of_an_engine(penstock: Penstock, small: SmallModel) -> None:
    model = penstock.env.pop("PENSTOCK_NODE__MODEL")
    where = ("--connect", f"unix:{penstock.data / 'penstock.sock'}")
    with (
        penstock.up("--no-http", "--no-worker"),
        node(
            penstock, "start", "--model", model, "--end-model", "--node-id", "a", *where
        ) as worker,
    ):
        said(worker, "complete    tiny")
        given = json.dumps(msgspec.to_builtins(asked()))
        told = penstock.json("submit", "job.chat.tiny", "--input", given, "--wait")
        assert told["value"]["choices"][0]["text"] == small.text(PROMPT, 12)


@pytest.mark.seed("000", "18.13")
def test_a_network_of_one_command_mends_itself_and_ends_together(
    penstock: Penstock, small: SmallModel
) -> None:
    args = ("up", "--nodes", "2", "--node-id", "n", "--no-http")
    with node(penstock, *args) as process:
        assert "children    n-2 (" in penstock.banner
        said(process, "complete    tiny")
        (child,) = children_of(process.pid)
        os.kill(child, signal.SIGKILL)
        told = said(process, "  complete    tiny")
        assert "n-2 ended: killed by SIGKILL; it is started again" in told
        assert "lost        n-2" in told
        given = json.dumps(msgspec.to_builtins(asked()))
        told = penstock.json("submit", "job.chat.tiny", "--input", given, "--wait")
        assert told["value"]["choices"][0]["text"] == small.text(PROMPT, 12)
        (child,) = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0].splitlines()[-1].endswith(" stopped")
        assert process.returncode == 0
        assert not runs(child)
    assert not list((penstock.data / "pipes").iterdir())


def test_no_child_outlives_a_network_that_is_killed(penstock: Penstock) -> None:
    process = penstock.start("node", "up", "--nodes", "3", "--no-http")
    try:
        children = eventually(lambda: len(found := children_of(process.pid)) == 2 and found)
    finally:
        process.kill()
        process.communicate()
    eventually(lambda: not any(map(runs, children)))


def test_a_key_that_is_none_is_refused(penstock: Penstock) -> None:
    assert "key" in penstock.err("node", "start", "--network-key", "short", code=2)


def test_a_layer_node_can_live_on_its_own_layers_files(penstock: Penstock) -> None:
    told = penstock.out("node", "prepare", penstock.env["PENSTOCK_NODE__MODEL"], "prepared")
    assert told.startswith("prepared: 6 layers, ")
    for layer in range(3):
        (penstock.folder / "prepared" / f"layer-{layer:03}.safetensors").unlink()
    with node(penstock, "start", "--model", "tiny", "--source", "prepared", "--layers", "3-5"):
        assert "layers      3-5" in penstock.banner


def runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.timeout(180)
def test_a_spool_is_served_by_a_split_model(penstock: Penstock, small: SmallModel) -> None:
    folder = penstock.folder / "spool"
    with node(penstock, "start", "--layers", "0-2", "--node-id", "b"):
        args = ("spool", "serve", str(folder), "--split-model", str(small.folder))
        penstock.env |= {"PENSTOCK_NODE__LAYERS": "3-5", "PENSTOCK_NODE__NODE_ID": "a"}
        server = penstock.start(*args, "--join", address(penstock), stderr=subprocess.STDOUT)
        try:
            banner = said(server, "ready; Ctrl-C stops it")
            assert "penstock pipes" in banner
            ask = ("--raw", "--max-tokens", "12", "--temperature", "0", "--wait")
            told = penstock.out("spool", "submit", str(folder), "ab cd ef", *ask)
            assert told.strip()
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=30)
        assert server.returncode == 0


def test_options_of_a_split_spool_that_do_not_go_together_are_refused(penstock: Penstock) -> None:
    serve = ("spool", "serve", str(penstock.folder / "spool"))
    refused = penstock(*serve, "--split-model", "tiny", "--model", "x", code=2)
    assert "--split-model" in refused.stderr
    assert "--join" in penstock(*serve, "--join", "127.0.0.1:1", code=2).stderr
