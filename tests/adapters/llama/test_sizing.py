"""How much of a machine a model gets."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.adapters.llama.machine import Machine, embedding_size_of, shown, size_of
from penstock.models.facts import GgufFacts
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.values import LlmCode, LlmFailure

GIB = 1 << 30
MACHINE = Machine(cores=4, memory=16 * GIB)


def facts(**more: Any) -> GgufFacts:
    usual = {"size": GIB, "train_context": 32768, "kv_bytes_per_token": 32 << 10}
    return GgufFacts(name="m", **{**usual, **more})


def test_a_model_gets_the_usual_context_in_every_slot() -> None:
    size = size_of(facts(), ModelConfig(), MACHINE)

    assert (size.slots, size.context, size.threads) == (8, 8192, 4)
    assert size.memory > GIB + 8 * 8192 * (32 << 10)


def test_no_context_is_longer_than_the_model_was_made_for() -> None:
    small = facts(train_context=512)

    assert size_of(small, ModelConfig(), MACHINE).context == 512
    assert size_of(small, ModelConfig(context=4096), MACHINE).context == 512
    assert embedding_size_of(small, ModelConfig(), MACHINE).context == 512


@pytest.mark.parametrize(("asked", "given"), [(1, 256), (256, 256), (1000, 1024)])
def test_a_context_is_what_the_engine_will_make_of_it(asked: int, given: int) -> None:
    assert size_of(facts(), ModelConfig(context=asked), MACHINE).context == given


@pytest.mark.parametrize(("asked", "given"), [(0, 4), (1, 1), (4, 4), (64, 4)])
def test_there_are_never_more_threads_than_cores(asked: int, given: int) -> None:
    assert size_of(facts(), ModelConfig(threads=asked), MACHINE).threads == given


def test_short_memory_shortens_the_context_and_then_takes_slots_away() -> None:
    less = size_of(facts(), ModelConfig(memory=2 * GIB), MACHINE)
    least = size_of(facts(), ModelConfig(memory=GIB + (220 << 20)), MACHINE)

    assert (less.slots, less.context) == (8, 2048)
    assert (least.slots, least.context) == (1, 512)


def test_a_context_that_was_asked_for_is_kept_and_slots_go() -> None:
    size = size_of(facts(), ModelConfig(memory=2 * GIB, context=8192), MACHINE)

    assert (size.slots, size.context) == (2, 8192)


def test_three_quarters_of_the_machine_are_for_models_unless_it_is_said() -> None:
    with pytest.raises(LlmFailure) as refused:
        size_of(facts(size=13 * GIB), ModelConfig(), MACHINE)

    assert refused.value.code is LlmCode.OUT_OF_MEMORY
    assert refused.value.facts["limit"] == 12 * GIB
    assert "12.0 GiB" in refused.value.message


def test_a_text_to_embed_fits_into_one_batch() -> None:
    size = embedding_size_of(facts(), ModelConfig(context=4096), MACHINE)

    assert size.batch == size.context == 4096
    with pytest.raises(LlmFailure):
        embedding_size_of(facts(), ModelConfig(memory=GIB), MACHINE)


def test_sizes_are_shown_as_people_say_them() -> None:
    assert shown(300 << 20) == "300 MiB"
    assert shown(3 * GIB // 2) == "1.5 GiB"
