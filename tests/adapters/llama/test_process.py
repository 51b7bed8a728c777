"""How a process for a model is started."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.adapters.llama import child, process
from penstock.adapters.llama.machine import Size
from penstock.adapters.llama.process import EngineProcess, EngineSpec
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import LlmFailure

SIZE = Size(slots=1, context=256, threads=1, memory=1)


def spec(*, spin: bool) -> EngineSpec:
    return EngineSpec(model="m", path="m", size=SIZE, spin=spin)


@pytest.mark.seed("004", "13.12")
def test_threads_sleep_while_they_wait_unless_spinning_is_wished_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    asleep = process._environment(spec(spin=False))
    awake = process._environment(spec(spin=True))

    assert (asleep["OMP_WAIT_POLICY"], asleep["GOMP_SPINCOUNT"]) == ("passive", "0")
    assert awake["OMP_WAIT_POLICY"] == "active"


def test_a_socket_has_a_short_path_even_where_temporary_files_have_a_long_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = process._folder()
    folder.rmdir()

    assert len(str(folder / "llama.sock")) <= 104


def test_old_folders_that_nobody_uses_are_tidied_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="pe-") as place, socket.socket(socket.AF_UNIX) as live:
        empty, used, dead = (Path(place, f"penstock-llm-{n}") for n in ("empty", "used", "dead"))
        for folder in (empty, used, dead):
            folder.mkdir()
        live.bind(str(used / "llama.sock"))
        live.listen()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(dead / "llama.sock"))
        (dead / "prefix").touch()
        Path(place, "penstock-llm-link").symlink_to(used)
        process._tidy(Path(place))
        assert empty.exists()
        monkeypatch.setattr(process, "_OLD", -1.0)
        process._tidy(Path(place))

        assert not empty.exists()
        assert not dead.exists()
        assert (used / "llama.sock").exists()


def test_the_engine_s_keys_are_not_the_child_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "secret")

    assert "PENSTOCK_TOKEN" not in process._environment(spec(spin=False))


def params_of(**more: Any) -> Any:
    """What llama.cpp is told of a spec."""

    def empty() -> Any:
        parts = {name: SimpleNamespace() for name in ("model", "mmproj", "cpuparams")}
        return SimpleNamespace(**parts, cpuparams_batch=SimpleNamespace(), tensor_split=[0.0] * 8)

    spec = EngineSpec(model="m", path="m.gguf", projector="eyes.gguf", size=SIZE, **more)
    plan = process.plan_of(spec, "/x/llama.sock", "key")
    return child._params(SimpleNamespace(CommonParams=empty), plan)


def test_as_much_as_the_build_supports_is_computed_on_gpus_unless_it_is_set() -> None:
    params = params_of()
    assert (params.n_gpu_layers, params.mmproj_use_gpu) == (-1, True)
    assert params.tensor_split == [0.0] * 8

    params = params_of(gpu_layers=12, tensor_split=(3.0, 1.0), projector_gpu=False)
    assert (params.n_gpu_layers, params.mmproj_use_gpu) == (12, False)
    assert params.tensor_split == [3.0, 1.0, *[0.0] * 6]


def test_memory_that_cannot_be_read_is_none() -> None:
    assert process.resident(2**30) == 0


CHILDREN = {
    "says nothing we know": "print('hello from a .pth file', flush=True); raise SystemExit(1)",
    "says half a line": "print('hello', end='', flush=True); raise SystemExit(1)",
    "leaves a process behind": (
        "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nelse:\n    os._exit(1)"
    ),
}


@pytest.mark.parametrize("case", CHILDREN)
@run_async
async def test_a_child_that_ends_before_it_is_ready_is_told_and_can_be_closed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILDREN[case])
    monkeypatch.setattr(child, "__file__", str(script))
    one = EngineProcess(spec(spin=False))
    async with asyncio.timeout(30):
        with pytest.raises(LlmFailure, match="status 1"):
            await one.start(lambda *_: None, 60.0)
        await one.close()


@run_async
async def test_what_is_printed_before_the_child_speaks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "print('hello', end='', flush=True)\n"
        "from penstock.adapters.llama.child import _tell\n"
        "_tell(1, event='ready')\n"
        "input(), input()"
    )
    monkeypatch.setattr(child, "__file__", str(script))
    one = EngineProcess(spec(spin=False))
    async with asyncio.timeout(30):
        await one.start(lambda *_: None, 60.0)
        await one.close()
