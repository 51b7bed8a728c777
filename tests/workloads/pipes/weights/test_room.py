"""How many layers fit."""

from __future__ import annotations

import pytest
from tests.support.pipes.random_models import RandomSource, tiny
from tests.support.pipes.walking import ends_of

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.llm_model import LlmModel
from penstock.workloads.pipes.model.linear import held_bytes
from penstock.workloads.pipes.weights.memory import machine_memory
from penstock.workloads.pipes.weights.room import Room, room
from penstock.workloads.pipes.weights.source import architecture_of

GIB = 1 << 30


@pytest.fixture(scope="module")
def source() -> RandomSource:
    return tiny("llama")[1]


def layers(source: RandomSource, dtype: str = "float32", **asked: int) -> int:
    return room(architecture_of(source), dtype, **asked).layers


def values_of(source: RandomSource) -> int:
    return sum(one.numel() for one in source.layer(0).values())


def ends_bytes(source: RandomSource) -> int:
    return sum(one.nbytes for one in source.ends().values())


def test_all_layers_fit_into_plenty(source: RandomSource) -> None:
    assert layers(source, memory=GIB) == 5


def test_none_fits_into_nothing(source: RandomSource) -> None:
    assert layers(source, memory=1) == 0


def test_each_layer_more_needs_its_weights(source: RandomSource) -> None:
    values = values_of(source)
    loading, cache = 8 * values, 1000
    for count in (1, 2, 4):
        enough = loading + cache + count * 4 * values
        assert layers(source, memory=enough, cache=cache) == count
        assert layers(source, memory=enough - 1, cache=cache) == count - 1


def test_smaller_numbers_let_more_fit(source: RandomSource) -> None:
    values = values_of(source)
    memory = 8 * values + 8 * values
    found = [layers(source, dtype, memory=memory, cache=1) for dtype in ("float32", "bfloat16")]
    assert found == [1, 3]
    assert layers(source, "int8", memory=memory, cache=1) == 5


def test_a_cache_for_one_job_at_least_is_counted_with_each_layer(source: RandomSource) -> None:
    token = 2 * 2 * 8 * 4
    each = 4 * values_of(source) + 4 * 100 * token
    memory = 8 * values_of(source) + 3 * each
    assert layers(source, memory=memory, context=100) == 3
    assert layers(source, memory=memory - 1, context=100) == 2


def test_ends_take_their_part(source: RandomSource) -> None:
    model = architecture_of(source)
    memory = 8 * values_of(source) + 3 * 4 * values_of(source) + 1
    without = room(model, "float32", memory=memory, cache=1)
    beside = room(model, "float32", memory=memory, cache=1, ends=True)
    assert (without.ends, beside.ends) == (0, ends_bytes(source))
    assert beside.layers < without.layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_sizes_are_those_that_loaded_models_have(family: str, dtype: str) -> None:
    size = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}
    source = tiny(family, num_hidden_layers=1, **size)[1]
    model = architecture_of(source)
    found = room(model, dtype, ends=True)
    layer = LlmModel.load(model, source, LayerRange(0, 1), dtype).weight_bytes
    # Here the scales of eight bits are left out, and norms are of eight bits too.
    assert layer == pytest.approx(found.layer, rel=0.05)
    if dtype != "int8":  # a table that is scaled or not the head too stays as it is
        assert held_bytes(ends_of(source, dtype).model) == pytest.approx(found.ends, rel=0.05)


def test_caches_have_a_quarter_of_what_is_left_and_no_more_than_4_gib() -> None:
    assert Room(10 * GIB, 1, 0, 5).cache(6 * GIB) == GIB
    assert Room(100 * GIB, 1, 0, 5).cache(6 * GIB) == 4 * GIB
    assert Room(GIB, 1, 0, 5).cache(6 * GIB) == 0


def test_without_a_word_three_quarters_of_the_machine_are_taken(source: RandomSource) -> None:
    found = room(architecture_of(source), "float32")
    assert found.memory == machine_memory() * 3 // 4
