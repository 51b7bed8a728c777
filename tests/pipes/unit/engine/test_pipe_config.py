"""From settings to a node: which model, which key, which layers."""

from __future__ import annotations

import re
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.models import gguf

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
    given = {"data_dir": "data", "models_dir": "models", "pipe_key": KEY, **flags}
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
    assert pipe_config(settings(pipe_key="")) is None
    assert not Path("data").exists()


@pytest.mark.parametrize("name", ["SmolLM2", "SmolLM2-135M-Instruct", "smollm2-135m"])
def test_a_model_is_known_by_the_name_that_was_given(store: ModelStore, name: str) -> None:
    config = configured(pipe_model=name)
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
        config = configured(pipe_model=given)
        assert (config.model, config.source.parent) == (name, tmp_path.resolve())


def test_a_folder_among_the_models_is_found_by_its_name(store: ModelStore) -> None:
    (store.folder / "Gemma").mkdir()
    config = configured(pipe_model="Gemma")
    assert (config.model, config.source.name) == ("Gemma", "Gemma")


def test_a_folder_that_is_no_model_hides_none(store: ModelStore) -> None:
    Path("SmolLM2").mkdir()
    assert configured(pipe_model="SmolLM2").source.suffix == ".gguf"


def test_a_model_on_the_shelf_comes_before_a_folder_that_is_called_so(store: ModelStore) -> None:
    Path("SmolLM2-135M-Instruct").mkdir()
    Path("SmolLM2-135M-Instruct/config.json").write_text("{}")
    assert configured(pipe_model="SmolLM2-135M-Instruct").source.suffix == ".gguf"


def test_with_a_source_the_model_is_its_name(tmp_path: Path) -> None:
    (tmp_path / "snapshots@1").mkdir()
    config = configured(pipe_model="Big", pipe_source="snapshots@1")
    assert (config.model, config.source) == ("Big", (tmp_path / "snapshots@1").resolve())


@pytest.mark.parametrize(
    ("flags", "kind", "words"),
    [
        ({"pipe_model": "absent"}, NotFound, "no model 'absent'"),
        ({"pipe_model": "./absent"}, Misconfigured, "no file or folder"),
        ({"pipe_model": "x", "pipe_source": "absent"}, Misconfigured, "no file or folder"),
        ({"pipe_model": "./a b"}, InvalidRequest, "can't be called 'a b'"),
        ({"pipe_model": "a b", "pipe_source": "a b"}, InvalidRequest, "can't be called"),
        ({"pipe_model": "broken"}, Misconfigured, "broken"),
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


def test_every_field_of_a_node_can_be_set_and_defaults_are_the_node_s_own(
    store: ModelStore,
) -> None:
    plain = configured(pipe_model="SmolLM2")
    own = LpConfig(model="SmolLM2", source=plain.source, key=KEY)
    assert plain == own
    special = configured(
        pipe_model="SmolLM2",
        pipe_layers="0-4,10-14",
        pipe_end_model="true",
        pipe_local_layers="2",
        pipe_listen="0.0.0.0:7471",
        pipe_advertise="10.0.0.5:7471",
        pipe_join="10.0.0.6:7471,[::1]:7472",
        pipe_node_id="a",
        pipe_dtype="int8",
        pipe_threads="2",
        pipe_memory="2000",
        pipe_cache="1000",
        pipe_context="512",
        pipe_max_jobs="3",
        pipe_max_waiting="4",
        pipe_chunk="64",
        pipe_pass="128",
        pipe_keep="1",
        pipe_spot_check="0.5",
        pipe_print_times="true",
        pipe_ping="0.5",
        pipe_silence="2",
        pipe_step_timeout="10",
        pipe_open_timeout="20",
        pipe_drain="5",
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
    executors = make_executors(None, settings(pipe_model="SmolLM2", pipe_end_model="true"))
    (pipes,) = (one for one in executors if isinstance(one, PipesExecutor))
    assert pipes.topics == ("job.chat.SmolLM2",)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"pipe_layers": "14-0"}, "pipe_layers: '14-0' is the wrong way round"),
        ({"pipe_layers": "0-4,3-5"}, "pipe_layers: 0-4 and 3-5 overlap"),
        ({"pipe_listen": "nowhere"}, "pipe_listen: 'nowhere' is not HOST:PORT"),
        ({"pipe_join": "a:0"}, "pipe_join: 'a:0' names no port"),
        ({"pipe_advertise": "a"}, "pipe_advertise: 'a' is not HOST:PORT"),
        ({"pipe_dtype": "float8"}, "pipe_dtype: "),
        ({"pipe_end_model": "true"}, "pipe_end_model: needs pipe_model"),
        ({"pipe_source": "."}, "pipe_source: needs pipe_model"),
        ({"pipe_model": "m", "pipe_layers": "none"}, "pipe_layers: a node without layers"),
        ({"pipe_memory": "10", "pipe_cache": "11"}, "pipe_cache: is more than pipe_memory"),
        ({"pipe_ping": "5"}, r"pipe_silence: is not more than pipe_ping \(5\)"),
        ({"pipe_spot_check": "2"}, "pipe_spot_check"),
        ({"pipe_context": "3"}, "pipe_context"),
    ],
)
def test_a_setting_that_can_not_be_meant_is_refused_by_name(
    flags: dict[str, str], words: str
) -> None:
    assert re.search(words, refusal(**flags))


# -- the key ------------------------------------------------------------------------------


def test_a_key_is_made_once_and_only_its_owner_can_read_it() -> None:
    mine = settings(pipe_key="")
    key = network_key(mine)
    assert len(key) == 43
    assert network_key(mine) == key
    assert stat.S_IMODE(mine.pipe_key_file.stat().st_mode) == 0o600
    assert [path.name for path in mine.data_dir.iterdir()] == ["pipe.key"]


def test_of_two_that_make_a_key_at_once_both_have_the_same() -> None:
    mine, found = settings(pipe_key=""), []
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
    assert network_key(settings(pipe_key="@network.key")) == KEY
    with pytest.raises(Misconfigured, match=r"can't read the network's key in absent"):
        network_key(settings(pipe_key="@absent"))


def test_what_is_no_key_file_is_named() -> None:
    Path("data/pipe.key").mkdir(parents=True)
    with pytest.raises(Misconfigured, match=r"can't read the network's key in .*pipe\.key"):
        network_key(settings(pipe_key=""))


def test_a_place_that_takes_no_key_is_named() -> None:
    Path("file").write_text("")
    with pytest.raises(
        StoreFailed, match=r"can't keep the network's key in .*pipe\.key: Not a directory"
    ):
        network_key(settings(pipe_key="", data_dir="file/data"))
