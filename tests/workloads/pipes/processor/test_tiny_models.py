"""Real layers, ends and samplers round the ring: greedy answers are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.pipes.random_models import generated, tiny
from tests.support.pipes.sums import Ring
from tests.support.pipes.walking import ends_of

from penstock.workloads.llm.values import Sampling
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import Hop
from penstock.workloads.pipes.llm_model import LlmModel
from penstock.workloads.pipes.model.cache import KvPool
from penstock.workloads.pipes.text.sampler import Sampler
from penstock.workloads.pipes.weights.source import architecture_of

LAYERS = 5
ROUTES = {
    "one": [Hop("A", 0, 5)],
    "two": [Hop("A", 0, 1), Hop("B", 1, 5)],
    "three": [Hop("A", 0, 2), Hop("B", 2, 3), Hop("C", 3, 5)],
    "there and back": [Hop("A", 0, 1), Hop("B", 1, 2), Hop("C", 2, 4), Hop("A", 4, 5)],
    "five": [Hop(node, at, at + 1) for at, node in enumerate("BCBCB")],
}


class ModelRing(Ring):
    hidden = 32

    def __init__(self, source: Any, **options: Any) -> None:
        self.source = source
        architecture = architecture_of(source)
        self.whole = LlmModel.load(architecture, source, LayerRange(0, LAYERS), "float32")
        self.pool = KvPool(self.whole.layouts, 256, 1 << 26, torch.float32)
        super().__init__(LAYERS, {key: [(0, LAYERS)] for key in "ABC"}, **options)

    def make_segment(self, start: int, end: int) -> Any:
        return self.whole

    def make_ends(self) -> Any:
        return ends_of(self.source)

    def make_cache(self, layers: Sequence[int]) -> Any:
        return self.pool.reserve(layers, 128) if layers else None


def greedy() -> Sampler:
    return Sampler(Sampling(temperature=0), seed=1)


@pytest.mark.seed("000", "18.6")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("route", ROUTES)
def test_answers_of_jobs_computed_together_are_those_of_transformers(
    family: str, route: str
) -> None:
    model, source = tiny(family)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1], [11, 13, 17, 19, 23, 29, 31]]
    ring = ModelRing(source, prefill_chunk_size=4, pass_tokens=12)
    told = [ring.begin(ROUTES[route], prompt, 8, sampler=greedy())[1] for prompt in prompts]
    ring.run()
    assert told == [generated(model, prompt, 8) for prompt in prompts]
    assert all(not node.failures and not node.refused for node in ring.nodes.values())
