"""What a machine can compute with is found out in a child, however the child ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes import measure
from penstock.workloads.pipes.measure import SAFER, Choice, Measurement, Trial, try_out

TRIAL = Trial(((8, 8),), ("float32", "bfloat16"), (1, 2), 1.0)
STUB = """
import os, signal, sys, time, types
sys.modules["torch"] = types.ModuleType("torch")  # it is not what is tested, and slow to import
from penstock.workloads.pipes import measure

def tried(trial, dtype, environment):
    yield measure.Measurement(dtype, 1, 1.0, 1.0, environment)
    {then}
    yield measure.Measurement(dtype, 2, 1.0, 1.0, environment)

measure.tried = tried
{first}
measure.main()
"""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment has what is to be found out."""
    for name in SAFER:
        monkeypatch.delenv(name, raising=False)


def tried(then: str = "pass", first: str = "", patience: float = 30.0) -> list[Measurement]:
    script = STUB.format(then=then, first=first)
    return try_out(TRIAL, patience, (sys.executable, "-c", script))


def threads(found: list[Measurement], dtype: str) -> list[tuple[int, dict[str, str]]]:
    return [(one.threads, one.environment) for one in found if one.dtype == dtype]


def test_what_a_machine_can_is_told_for_each_precision() -> None:
    found = tried()
    assert threads(found, "float32") == threads(found, "bfloat16") == [(1, {}), (2, {})]


def test_a_missing_instruction_is_tried_once_more_without_the_newest_ones() -> None:
    dying = 'if dtype == "bfloat16" and "ONEDNN_MAX_CPU_ISA" not in os.environ: '
    found = tried(dying + "os.kill(os.getpid(), signal.SIGILL)")
    assert threads(found, "float32") == [(1, {}), (2, {})]
    assert threads(found, "bfloat16") == [(1, {}), (1, SAFER), (2, SAFER)]


def test_a_precision_that_always_dies_is_left_out() -> None:
    found = tried('if dtype == "bfloat16": os.kill(os.getpid(), signal.SIGSEGV)')
    assert threads(found, "float32") == [(1, {}), (2, {})]
    assert (2, {}) not in threads(found, "bfloat16")
    assert (2, SAFER) not in threads(found, "bfloat16")


def test_the_users_own_setting_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    found = tried('if dtype == "bfloat16": os.kill(os.getpid(), signal.SIGILL)')
    assert threads(found, "bfloat16") == [(1, {})]


def test_a_precision_that_hangs_is_given_up() -> None:
    found = tried('if dtype == "float32": time.sleep(600)')
    assert threads(found, "float32") == [(1, {})]
    assert threads(found, "bfloat16") == [(1, {}), (2, {})]


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    first = (
        f"open({str(file)!r}, 'w').write(str(os.getpid())); print('half a li', end='', flush=True)"
    )
    assert tried(first=first + "; time.sleep(600)", patience=3.0) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_a_machine_where_nothing_is_found_in_time_computes_in_what_works_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "try_out", lambda *_: [])
    linears = ((32, 32), (48, 32))
    assert measure.measured(linears, threads=3) == Choice("float32", 3, 0.0)
    assert measure.measured(linears) == Choice("float32", 1, 0.0)


def test_a_precision_that_was_asked_for_and_cant_be_computed_with_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "try_out", lambda *_: [])
    with pytest.raises(LlmFailure, match="this machine can't compute in bfloat16") as caught:
        measure.measured(((32, 32),), dtype="bfloat16")
    assert caught.value.code is LlmCode.NOT_SUPPORTED


@pytest.mark.seed("000", "17.9")
def test_this_machine_can_compute_with_what_is_chosen() -> None:
    linears = ((32, 32), (48, 32))
    choice = measure.measured(linears, threads=1)
    assert choice.dtype in ("float32", "bfloat16")
    assert choice.threads == 1
    assert choice.layer_ms > 0
    assert choice.environment in ({}, SAFER)
