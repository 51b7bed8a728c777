"""From settings to a node: which model, which key, which layers."""

from __future__ import annotations

import re
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.support.models import gguf

from penstock.app.application import make_executors
from penstock.config import Settings, load
from penstock.core.errors import InvalidRequest, Misconfigured, NotFound, StoreFailed
from penstock.models.store import ModelStore
from penstock.workloads.pipes.config import LayerRange, LpConfig
from penstock.workloads.pipes.executor import PipesExecutor
from penstock.workloads.pipes.setup import network_key, pipe_config

KEY = "A" * 43


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings(**flags: Any) -> Settings:
    given = {"data_dir": "data", "models__dir": "models", "node__key": KEY, **flags}
    return load(environ={}, flags=given)


def configured(**flags: Any) -> LpConfig:
    config = pipe_config(settings(**flags))
    assert config is not None
    return config


@pytest.fixture
def store() -> ModelStore:
    folder = Path("models")
    folder.mkdir()
    (folder / "SmolLM2-135M-Instruct.gguf").write_bytes(gguf())
    return ModelStore(folder)


def refusal(**flags: Any) -> str:
    with pytest.raises(Misconfigured) as refused:
        settings(**flags)
    return str(refused.value)


# -- the model ----------------------------------------------------------------------------


def test_without_a_model_there_is_no_node_and_no_key_is_made() -> None:
    assert pipe_config(settings(node__key="")) is None
    assert not Path("data").exists()


@pytest.mark.parametrize("name", ["SmolLM2", "SmolLM2-135M-Instruct", "smollm2-135m"])
def test_a_model_is_known_by_the_name_that_was_given(store: ModelStore, name: str) -> None:
    config = configured(node__model=name)
    assert config.model == name
    assert config.source == (store.folder / "SmolLM2-135M-Instruct.gguf").resolve()


def test_a_file_and_a_folder_lend_their_names(tmp_path: Path) -> None:
    (tmp_path / "Llama-3.2-1B.gguf").write_bytes(gguf())
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B" / "config.json").write_text("{}")
    for given, name in (
        ("Llama-3.2-1B.gguf", "Llama-3.2-1B"),
        (str(tmp_path / "Llama-3.2-1B.gguf"), "Llama-3.2-1B"),
        ("./Qwen3-0.6B", "Qwen3-0.6B"),
        ("Qwen3-0.6B", "Qwen3-0.6B"),
    ):
        config = configured(node__model=given)
        assert (config.model, config.source.parent) == (name, tmp_path.resolve())


def test_a_folder_among_the_models_is_found_by_its_name(store: ModelStore) -> None:
    (store.folder / "Gemma").mkdir()
    config = configured(node__model="Gemma")
    assert (config.model, config.source.name) == ("Gemma", "Gemma")


def test_a_folder_that_is_no_model_hides_none(store: ModelStore) -> None:
    Path("SmolLM2").mkdir()
    assert configured(node__model="SmolLM2").source.suffix == ".gguf"


def test_a_model_on_the_shelf_comes_before_a_folder_that_is_called_so(store: ModelStore) -> None:
    Path("SmolLM2-135M-Instruct").mkdir()
    Path("SmolLM2-135M-Instruct/config.json").write_text("{}")
    assert configured(node__model="SmolLM2-135M-Instruct").source.suffix == ".gguf"


def test_with_a_source_the_model_is_its_name(tmp_path: Path) -> None:
    (tmp_path / "snapshots@1").mkdir()
    config = configured(node__model="Big", node__source="snapshots@1")
    assert (config.model, config.source) == ("Big", (tmp_path / "snapshots@1").resolve())


@pytest.mark.parametrize(
    ("flags", "kind", "words"),
    [
        ({"node__model": "absent"}, NotFound, "no model 'absent'"),
        ({"node__model": "./absent"}, Misconfigured, "no file or folder"),
        ({"node__model": "x", "node__source": "absent"}, Misconfigured, "no file or folder"),
        ({"node__model": "./a b"}, InvalidRequest, "can't be called 'a b'"),
        ({"node__model": "a b", "node__source": "a b"}, InvalidRequest, "can't be called"),
        ({"node__model": "broken"}, Misconfigured, "broken"),
    ],
)
def test_a_model_that_is_not_there_or_has_no_name_is_refused(
    store: ModelStore, flags: dict[str, str], kind: type[Exception], words: str
) -> None:
    Path("a b").mkdir()
    (store.folder / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(kind, match=words):
        pipe_config(settings(**flags))


# -- the rest of it -----------------------------------------------------------------------


@pytest.mark.seed("000", "9.2")
def test_every_field_of_a_node_can_be_set_and_defaults_are_the_node_s_own(
    store: ModelStore,
) -> None:
    plain = configured(node__model="SmolLM2")
    own = LpConfig(model="SmolLM2", source=plain.source, key=KEY)
    assert plain == own
    special = configured(
        node__model="SmolLM2",
        node__layers="0-4,10-14",
        node__end_model="true",
        node__local_layers="2",
        node__listen="0.0.0.0:7471",
        node__advertise="10.0.0.5:7471",
        node__join="10.0.0.6:7471,[::1]:7472",
        node__node_id="a",
        node__device="cuda:1",
        node__dtype="int8",
        node__threads="2",
        node__memory="2000",
        node__cache="1000",
        node__context="512",
        node__max_jobs="3",
        node__max_waiting="4",
        node__prefill_chunk_size="64",
        node__pass_tokens="128",
        node__keep_cache="1",
        node__wire="8bit",
        node__speculation="false",
        node__print_times="true",
        node__heartbeat="0.5",
        node__lease="2",
        node__step_timeout="10",
        node__wait_timeout="20",
        node__drain="5",
    )
    same = [
        field.name
        for field in structs.fields(LpConfig)
        if getattr(special, field.name) == getattr(own, field.name)
    ]
    assert same == ["model", "source", "key"]
    assert special.layers == (LayerRange(0, 5), LayerRange(10, 15))
    assert special.join == ("10.0.0.6:7471", "[::1]:7472")


def test_the_executor_of_an_engine_is_given_the_node(store: ModelStore) -> None:
    executors = make_executors(None, settings(node__model="SmolLM2", node__end_model="true"))
    (pipes,) = (one for one in executors if isinstance(one, PipesExecutor))
    assert pipes.topics == ("job.chat.SmolLM2",)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"node__layers": "14-0"}, "node.layers: '14-0' is the wrong way round"),
        ({"node__layers": "0-4,3-5"}, "node.layers: 0-4 and 3-5 overlap"),
        ({"node__listen": "nowhere"}, "node.listen: 'nowhere' is not HOST:PORT"),
        ({"node__join": "a:0"}, "node.join: 'a:0' names no port"),
        ({"node__advertise": "a"}, "node.advertise: 'a' is not HOST:PORT"),
        ({"node__dtype": "float8"}, "node.dtype: "),
        ({"node__end_model": "true"}, "node.end_model: needs node.model"),
        ({"node__source": "."}, "node.source: needs node.model"),
        ({"node__model": "m", "node__layers": "none"}, "node.layers: a node without layers"),
        ({"node__memory": "10", "node__cache": "11"}, "node.cache: is more than node.memory"),
        ({"node__heartbeat": "5"}, r"node.lease: is not more than node.heartbeat \(5\)"),
        ({"node__context": "3"}, "node.context"),
    ],
)
def test_a_setting_that_can_not_be_meant_is_refused_by_name(
    flags: dict[str, str], words: str
) -> None:
    assert re.search(words, refusal(**flags))


# -- the key ------------------------------------------------------------------------------


def test_a_key_is_made_once_and_only_its_owner_can_read_it() -> None:
    mine = settings(node__key="")
    key = network_key(mine)
    assert len(key) == 43
    assert network_key(mine) == key
    assert stat.S_IMODE(mine.pipe_key_file.stat().st_mode) == 0o600
    assert [path.name for path in mine.data_dir.iterdir()] == ["pipe.key"]


def test_of_two_that_make_a_key_at_once_both_have_the_same() -> None:
    mine, found = settings(node__key=""), []
    gate = threading.Barrier(8)

    def make() -> None:
        gate.wait()
        found.append(network_key(mine))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert [path.name for path in mine.data_dir.iterdir()] == ["pipe.key"]


def test_a_key_can_lie_in_a_file() -> None:
    Path("network.key").write_text(f"{KEY}\n")
    assert network_key(settings(node__key="@network.key")) == KEY
    with pytest.raises(Misconfigured, match=r"can't read the network's key in absent"):
        network_key(settings(node__key="@absent"))


def test_what_is_no_key_file_is_named() -> None:
    Path("data/pipe.key").mkdir(parents=True)
    with pytest.raises(Misconfigured, match=r"can't read the network's key in .*pipe\.key"):
        network_key(settings(node__key=""))


def test_a_place_that_takes_no_key_is_named() -> None:
    Path("file").write_text("")
    with pytest.raises(
        StoreFailed, match=r"can't keep the network's key in .*pipe\.key: Not a directory"
    ):
        network_key(settings(node__key="", data_dir="file/data"))
