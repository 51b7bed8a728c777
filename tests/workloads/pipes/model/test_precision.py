"""Weights of eight and of sixteen bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.pipes.random_models import FAMILIES, tiny
from tests.support.pipes.walking import Split
from torch import nn

from penstock.workloads.pipes.model.linear import held_bytes, swap_ends, swapped

ROOT = str(Path(__file__).parents[4])
PROMPT = [5, 17, 40, 3, 88, 21, 9, 60, 33, 71, 12, 50]


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_come_near_to_what_float32_computes(family: str) -> None:
    _, source = tiny(family)
    exact, rounded = Split(source), Split(source, (2,), dtype="int8")
    expected, found = (one.step((one.job(), PROMPT, 0))[0] for one in (exact, rounded))
    assert alike(found, expected) > 0.98


def test_eight_bits_give_a_job_the_same_numbers_whoever_is_beside_it() -> None:
    _, source = tiny("llama")
    split = Split(source, dtype="int8")
    alone = split.step((split.job(), PROMPT, 0))[0]
    beside = split.step((split.job(), PROMPT, 0), (split.job(), PROMPT[::-1], 0))[0]
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-5)


def test_eight_bits_take_a_quarter_of_the_memory() -> None:
    _, source = tiny("llama", hidden_size=256, intermediate_size=512)
    exact, rounded = Split(source), Split(source, dtype="int8")
    assert rounded.segments[0].weight_bytes < 0.3 * exact.segments[0].weight_bytes
    assert held_bytes(rounded.ends.model) < 0.7 * held_bytes(exact.ends.model)  # not its table
    _, tied = tiny("llama", hidden_size=256, tie_word_embeddings=True)
    sizes = [held_bytes(Split(tied, dtype=dtype).ends.model) for dtype in ("float32", "int8")]
    assert sizes[1] < 0.3 * sizes[0]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("size", [(960, 576), (4096, 1024), (64, 200)])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_a_linear_of_any_layout_multiplies(dtype: str, size: tuple[int, int], tokens: int) -> None:
    made = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(size, generator=made), torch.randn(size[0], generator=made)
    x = torch.randn(tokens, size[1], generator=made)
    expected = x @ weight.t() + bias
    made_of = nn.Linear(size[1], size[0])
    made_of.weight, made_of.bias = nn.Parameter(weight), nn.Parameter(bias)
    multiply = swapped(nn.Sequential(made_of), dtype).requires_grad_(False)
    # Processors without instructions for eight bits have weights of seven: see Int8.
    eight_bits = 0.9999 if torch.cpu._is_vnni_supported() else 0.9998
    limit = eight_bits if dtype == "int8" else 0.9999999
    with torch.inference_mode():
        assert alike(multiply(x[None])[0], expected) > limit


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_are_looked_up_in_a_table_that_is_the_head_too(dtype: str) -> None:
    model, _ = tiny("llama", tie_word_embeddings=True)
    weight = model.get_input_embeddings().weight.detach().clone()
    swap_ends(model, dtype)
    found = model.get_input_embeddings()(torch.tensor([3, 3, 39])).detach()
    step = float(weight.abs().max()) / (127 if torch.cpu._is_vnni_supported() else 63)
    error = 0.51 * step if dtype == "int8" else 0.0
    torch.testing.assert_close(found, weight[[3, 3, 39]], rtol=0, atol=error)


def test_a_row_of_nothing_stays_nothing_in_eight_bits() -> None:
    zeros = nn.Linear(8, 4, bias=False)
    nn.init.zeros_(zeros.weight)
    multiply = swapped(nn.Sequential(zeros), "int8")
    assert torch.equal(multiply(torch.zeros(2, 8)), torch.zeros(2, 4))


CHILD = """
import sys, torch
from tests.support.pipes.walking import Split
torch.set_num_threads(1)
given = torch.load(sys.argv[1])
class Given:
    generation, path = {}, ""
    def __init__(self, config, layers, ends):
        self.config, self.layers, self.found = config, layers, ends
    def layer(self, n): return self.layers[n]
    def ends(self): return self.found
results = {}
for family, parts in given["models"].items():
    split = Split(Given(*parts), (2,), dtype="bfloat16")
    job, prompt = split.job(), given["prompt"]
    first = split.step((job, prompt[:7], 0))[0]
    rest = split.step((job, prompt[7:], 7), (split.job(), prompt[:3], 0))[0]
    results[family] = torch.cat((first, rest))
torch.save(results, sys.argv[2])
"""


def test_sixteen_bits_come_near_to_what_float32_computes(tmp_path: Path) -> None:
    """In a process of its own: what oneDNN does with them kills some machines' processes."""
    sources = {family: tiny(family)[1] for family in FAMILIES}
    models = {
        family: (dict(one.config), [dict(one.layer(n)) for n in range(5)], dict(one.ends()))
        for family, one in sources.items()
    }
    torch.save({"models": models, "prompt": PROMPT}, tmp_path / "given")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "given"), str(tmp_path / "results")],
        env={**os.environ, "PYTHONPATH": ROOT, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "results")
    for family, source in sources.items():
        split = Split(source)
        expected = split.step((split.job(), PROMPT, 0))[0]
        assert alike(found[family], expected) > 0.98, family


def alike(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The cosine between them: 1 is the same direction."""
    pair = (one.flatten().double() for one in (found, expected))
    return float(torch.cosine_similarity(*pair, dim=0))
