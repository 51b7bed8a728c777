"""What a process that holds layers has in memory, and which files it opens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.pipes.files import small_tokenizer
from tests.support.pipes.random_models import RandomSource, tiny

from penstock.workloads.pipes.model.architecture import Architecture
from penstock.workloads.pipes.weights.prepared import prepare
from penstock.workloads.pipes.weights.safetensors import INDEX

MIB = 1 << 20


def run(script: str, *arguments: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


RESIDENT = """
import json, sys
from pathlib import Path
import torch
from penstock.workloads.pipes.weights.source import open_source

def resident():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))

source = open_source(Path(sys.argv[1]))
held, found = {}, [resident()]
for upto in map(int, sys.argv[2:]):
    for n in range(len(held), upto):
        held[n] = source.layer(n)
    found.append(resident())
print(json.dumps(found))
"""


def larger(folder: Path) -> Path:
    """Eight layers of 5 MiB, and ends of 64 MiB: what is read too much would be seen."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_hidden_layers": 8,
        "vocab_size": 1 << 15,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = Architecture(config).build(torch.float32)
    tensors = {name: torch.zeros(one.shape) for name, one in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_resident_memory_grows_with_the_layers_of_a_folder_and_not_with_the_model(
    tmp_path: Path,
) -> None:
    size = 4 * (4 * 256 * 256 + 3 * 256 * 1408 + 2 * 256)
    _grows(larger(tmp_path / "m"), (1, 4, 8), size)


def test_resident_memory_grows_with_the_layers_of_a_gguf_and_not_with_the_model(
    model_file: Path,
) -> None:
    _grows(model_file, (1, 10, 30), 4 * 3_540_096)


def _grows(path: Path, counts: tuple[int, ...], size: int) -> None:
    before, *after = run(RESIDENT, path, *counts)
    # What is needed to read any layer is needed once, and stays with the allocator.
    assert after[0] - before < 2 * size + 4 * MIB
    for count, found in zip(counts[1:], after[1:], strict=True):
        assert found - after[0] == pytest.approx((count - 1) * size, rel=0.1, abs=size)


GIVEN_BACK = """
import json
from pathlib import Path
import torch
from penstock.workloads.pipes.weights.memory import give_back

def resident():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))

# Sizes that glibc takes from its heap: each second one stays, so that nothing at the end is free.
pieces = [torch.ones(1 << 14) for _ in range(2000)]
full = resident()
del pieces[::2]
held = resident()
give_back()
print(json.dumps([full, held, resident()]))
"""


def test_what_was_freed_between_things_that_stay_is_given_back() -> None:
    full, held, after = run(GIVEN_BACK)
    assert held > full - 10 * MIB  # or there is nothing to do for it
    assert after < full - 50 * MIB


LOADED = """
import json, sys
from pathlib import Path
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.llm_model import LlmModel
from penstock.workloads.pipes.weights.source import architecture_of, open_source

source = open_source(Path(sys.argv[1]))
model = LlmModel.load(architecture_of(source), source, LayerRange(1, 3), "float32")
print(json.dumps([len(model.fingerprints), sorted(sys.modules)]))
"""


def test_a_layer_node_needs_its_layers_and_nothing_of_the_text(tmp_path: Path) -> None:
    class Worded(RandomSource):
        def tokenizer(self) -> Any:
            return small_tokenizer()

    prepare(Worded(tiny("llama")[0]), tmp_path / "m")
    needed = {"config.json", INDEX, "layer-001.safetensors", "layer-002.safetensors"}
    for file in [one for one in (tmp_path / "m").iterdir() if one.name not in needed]:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    layers, modules = run(LOADED, tmp_path / "m")
    assert layers == 2
    assert not {name for name in modules if name.startswith("penstock.workloads.pipes.text")}
