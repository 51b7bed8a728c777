"""Equal numbers have equal fingerprints, and no others."""

from __future__ import annotations

import pytest
import torch

from penstock.workloads.pipes.weights.source import fingerprint


def layer() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {
        "norm": torch.rand(8, generator=made).bfloat16().float(),
        "up": torch.rand(16, 8, generator=made).bfloat16().float(),
    }


def test_it_is_32_hex_digits_and_the_same_each_time() -> None:
    assert fingerprint(layer()) == fingerprint(layer())
    assert len(fingerprint(layer())) == 32
    int(fingerprint(layer()), 16)


def test_it_does_not_depend_on_how_equal_values_are_stored() -> None:
    short = {name: tensor.bfloat16() for name, tensor in layer().items()}
    turned = {name: tensor.t().contiguous().t() for name, tensor in layer().items()}
    backwards = dict(reversed(layer().items()))
    assert (
        fingerprint(short) == fingerprint(turned) == fingerprint(backwards) == fingerprint(layer())
    )


@pytest.mark.seed("000", "18.12")
def test_one_changed_value_changes_it() -> None:
    changed = layer()
    changed["up"][15, 7] = torch.nextafter(changed["up"][15, 7], torch.tensor(9.0))
    assert fingerprint(changed) != fingerprint(layer())


def test_names_and_shapes_count() -> None:
    renamed = {name.replace("up", "down"): tensor for name, tensor in layer().items()}
    reshaped = {name: tensor.reshape(8, -1) for name, tensor in layer().items()}
    fewer = {"up": layer()["up"]}
    found = {fingerprint(one) for one in (layer(), renamed, reshaped, fewer, {})}
    assert len(found) == 5


def test_a_tensor_of_several_pieces_counts_to_its_end() -> None:
    large = torch.zeros((1 << 20) + 3)
    before = fingerprint({"w": large})
    large[-1] = 1
    assert fingerprint({"w": large}) != before
