"""Preparing a model where there is no room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.chaos.disks import tmpfs
from tests.support.pipes.files import small_tokenizer
from tests.support.pipes.random_models import RandomSource, tiny

from penstock.workloads.llm.values import LlmFailure
from penstock.workloads.pipes.weights.prepared import prepare


class Worded(RandomSource):
    def tokenizer(self) -> Any:
        return small_tokenizer()


@pytest.mark.parametrize("kib", [64, 172, 192])
def test_a_full_disk_is_told_and_nothing_is_left_on_it(kib: int, tmp_path: Path) -> None:
    """Full with a layer, with the ends, with the words."""
    with tmpfs(tmp_path / "disk", f"size={kib}k") as disk:
        with pytest.raises(LlmFailure, match=r"m can't be written: .*(space|28)"):
            prepare(Worded(tiny("llama")[0]), disk / "m")
        assert list(disk.iterdir()) == []
