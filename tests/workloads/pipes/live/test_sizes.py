"""Passes that are larger than what another node would make."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.pipes.networks import Network, SmallModel, ask, asked, ranges, whole

from penstock.testing.aio import run_async

WIDE = {"hidden_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 2048}
LONG = tuple(20 + n % 300 for n in range(1900))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel.made(tmp_path_factory.mktemp("wide") / "wide", **WIDE)


@run_async
async def test_a_chunk_goes_to_a_node_that_takes_fewer_tokens_in_a_pass(
    wide: SmallModel, tmp_path: Path
) -> None:
    async with Network(wide, context=2048, step_timeout=5.0) as network:
        node = await network.origin(*ranges(0, 1), prefill_chunk_size=2000, pass_tokens=2000)
        await network.add("b", *ranges(1, 2), pass_tokens=16)
        await whole(node)
        result = await ask(node, asked(LONG, 4))
        assert result.choices[0].text == wide.text(LONG, 4)
        assert not node.refused
