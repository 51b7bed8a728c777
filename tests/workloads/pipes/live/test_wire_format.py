"""Hidden states in fewer bits: only on request, with the error told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tests.support.pipes.networks import (
    PROMPT,
    Network,
    SmallModel,
    ask,
    asked,
    whole,
)

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import HopTime
from penstock.workloads.pipes.network_job import encoded, from_bytes, row_bytes, width_of
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.wire.messages import Kind


def sent_by(node: Node) -> list[int]:
    """Sizes of the frames of steps that leave it."""
    sizes: list[int] = []
    send = node.mesh.send

    def counting(node_id: str, kind: Kind, *buffers: Any) -> bool:
        if kind is Kind.STEPS:
            sizes.append(sum(map(len, buffers)))
        return send(node_id, kind, *buffers)

    node.mesh.send = counting  # type: ignore[method-assign]
    return sizes


async def answered(small: SmallModel, wire: str, *cuts: int) -> tuple[str, list[HopTime], int]:
    async with Network(small) as network:
        node = await network.split(*cuts, wire=wire, speculation=False)
        sizes = sent_by(node)
        result = await ask(node, asked(count=8))
        return result.choices[0].text, list(result.hops), sizes[0]


@pytest.mark.parametrize("cuts", [(0, 3, 6), (0, 2, 4, 6)], ids=str)
@run_async
async def test_fewer_bits_go_over_each_link_and_the_answer_says_so(
    small: SmallModel, cuts: tuple[int, ...]
) -> None:
    text, hops, exact = await answered(small, "exact", *cuts)
    assert text == small.text(PROMPT, 8)
    assert not any(hop.wire or hop.wire_error or hop.lossy for hop in hops)
    for wire, share, most in (("16bit", 0.6, 1e-3), ("8bit", 0.4, 1e-2)):
        _, hops, size = await answered(small, wire, *cuts)
        assert size < share * exact
        layers = [hop for hop in hops if hop.layers != "ends"]
        assert {hop.wire for hop in layers} == {wire}
        assert all(0 < hop.wire_error < most for hop in layers)
        assert f"sent in {wire}, error" in layers[0].lossy


@run_async
async def test_a_job_of_few_bits_changes_nothing_for_another_in_the_same_pass(
    small: SmallModel,
) -> None:
    """Two origins share nodes; one of them wants few bits."""
    async with Network(small, speculation=False) as network:
        exact = await network.split(0, 2, 6)
        await network.origin(node_id="z", wire="8bit", local_layers=0)
        z = network.nodes["z"]
        await whole(z)
        one, other = await asyncio.gather(ask(exact, asked(count=16)), ask(z, asked(count=16)))
    assert one.choices[0].text == small.text(PROMPT, 16)
    assert any(hop.wire == "8bit" for hop in other.hops)
    assert not any(hop.wire for hop in one.hops)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 576, 2048])
def test_rows_of_eight_bits_are_as_wide_as_they_were(width: int) -> None:
    states = torch.randn(3, width) * 10
    rows, error = encoded(states, "8bit")
    assert rows.shape == (3, row_bytes(width))
    assert width_of(rows.shape[1]) == width
    assert error < 0.01
    torch.testing.assert_close(from_bytes(rows, width), states, rtol=0, atol=0.2)


def test_a_number_that_is_large_costs_only_its_block_precision() -> None:
    states = torch.randn(1, 256)
    states[0, 3] = 1e6
    rows, _ = encoded(states, "8bit")
    torch.testing.assert_close(from_bytes(rows, 256)[0, 64:], states[0, 64:], rtol=0, atol=0.02)
    sent, error = encoded(states, "16bit")
    assert sent.dtype is torch.bfloat16
    assert error < 0.01


def test_what_has_sixteen_bits_already_is_sent_as_it_is() -> None:
    states = torch.randn(2, 8, dtype=torch.bfloat16)
    assert encoded(states, "16bit") == (states, 0.0)
