"""Each mistake in a node's options is named before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.exits import Exit
from penstock.cli.node_serve import settings_of
from penstock.cli.program import run
from penstock.config import load


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PENSTOCK_MODELS__DIR", str(tmp_path / "models"))
    monkeypatch.delenv("PENSTOCK_NODE__KEY", raising=False)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ("start", 2, "no model: give --model"),
        ("start --model nowhere", 3, "nowhere"),
        ("start --model ./nowhere.gguf", 2, "there is no file or folder nowhere.gguf"),
        ("start --model x --layers 5-2", 2, "'5-2' is the wrong way round: write 2-5"),
        ("start --model x --layers 0-4,3-9", 2, "0-4 and 3-9 overlap"),
        ("start --model x --layers some", 2, "write auto, none, or 0-14,20-29"),
        ("start --model x --listen 7500", 2, "'7500' is not HOST:PORT"),
        ("start --model x --join host", 2, "'host' is not HOST:PORT"),
        ("start --model x --join host:0", 2, "'host:0' names no port to connect to"),
        ("start --model x --advertise host:0", 2, "'host:0' names no port to connect to"),
        ("start --model x --dtype float8", 2, "'float8' is not one of"),
        ("start --model x --threads 0", 2, "0 is not in the range x>=1"),
        ("start --model x --memory lots", 2, "'lots' is not a size"),
        ("start --model x --context 5", 2, "5 is not in the range x>=16"),
        ("start --model x --keep long", 2, "'long' is not a duration"),
        ("start --model x --layers none", 2, "a node without layers and without node.end_model"),
        ("start --model x --memory 1MiB --cache 2MiB", 2, "node.cache: is more than node.memory"),
        ("start --model x --http 127.0.0.1:0", 2, "a node without --end-model has no HTTP"),
        ("up --model x --nodes 0", 2, "0 is not in the range 1<=x<=64"),
        ("up --model x --connect unix:/x", 2, "--connect can't be used here"),
        ("prepare nowhere folder", 3, "nowhere"),
        ("prepare x .", 2, "FOLDER: . exists already"),
        ("status --watch", 2, "--watch needs a terminal"),
        ("status", 8, "no node and no engine of"),
        ("status --join host:1", 2, "the network's key is not known in"),
        ("start --model x --join host:1", 2, "the network's key is not known in"),
        ("stat", 2, "did you mean st"),
    ],
)
def test_a_mistake_is_named(
    args: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["node", *args.split()]) == code
    assert words in capsys.readouterr().err


def test_options_become_settings() -> None:
    said = {"model": "x", "local_layers": 0, "join": (), "print_times": False, "json": True}
    assert settings_of(said) == {"node__model": "x", "node__local_layers": 0}


def test_every_option_of_a_node_is_a_setting() -> None:
    values = {
        "model": "x",
        "source": Path("y"),
        "layers": "0-4",
        "end_model": True,
        "join": ("a:1",),
        "listen": "a:1",
        "advertise": "a:1",
        "key": "k",
        "node_id": "n",
        "dtype": "int8",
        "threads": 1,
        "memory": 3,
        "cache": 2,
        "context": 99,
        "prefill_chunk_size": 7,
        "local_layers": 2,
        "keep": 1.0,
        "print_times": True,
        "drain": 2.0,
    }
    settings = load(environ={}, flags=settings_of(values))
    assert (settings.node.prefill_chunk_size, settings.node.dtype.value) == (7, "int8")
    assert (settings.node.join, settings.node.keep_cache) == (("a:1",), 1.0)


def test_the_key_is_made_once_and_for_its_owner_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["node", "key"]) == Exit.OK
    first = capsys.readouterr().out
    assert run(["node", "key"]) == Exit.OK
    assert capsys.readouterr().out == first
    file = tmp_path / "data" / "pipe.key"
    assert file.stat().st_mode & 0o777 == 0o600
    assert run(["node", "key", "--new"]) == Exit.OK
    assert capsys.readouterr().out == file.read_text() != first


def test_a_key_of_the_settings_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE__KEY", "k" * 43)
    assert run(["node", "key", "--new"]) == Exit.USAGE
    assert "the setting node.key has it" in capsys.readouterr().err
    assert run(["node", "key"]) == Exit.OK
    assert capsys.readouterr().out == "k" * 43 + "\n"
