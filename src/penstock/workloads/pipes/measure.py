"""Which precision and how many threads are fastest on this machine, by trying.

It is tried in a process of its own, as trying may end it: there are machines that claim
instructions they don't have, and a multiplication in bfloat16 is then the end (SIGILL). oneDNN
can be told to leave the newest ones out; a node must have that in its environment before it
multiplies anything.

    python -m penstock.workloads.pipes.measure < what to try > what was found, line by line

The child imports torch once, which takes longer than all the trying, and forks for each precision
before anything was computed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import AUTO

if TYPE_CHECKING:
    from torch import Tensor

SAFER = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Leaves out AMX, which machines are known to claim and not to have."""
CHUNK = 64
PROMPT, ANSWER = 512, 128
"""Tokens of the job that is reckoned with."""
_THREADS_GAIN, _DTYPE_GAIN = 0.9, 0.8
"""The share of the time in which another has to be done to be a gain: measuring is not exact."""
_VALUES = 24_000_000
"""Weights to multiply by in turn: more than caches hold, as a whole model's are."""
_COPIES = 32
"""Of a small layer that is not reached, and need not be."""
_SECONDS = 0.08
"""For one case; each is done at least once."""
_PATIENCE = 30.0
_COMMAND = (sys.executable, "-m", "penstock.workloads.pipes.measure")


class Choice(msgspec.Struct, frozen=True):
    dtype: str
    threads: int
    layer_ms: float
    """One token through one layer's multiplications; 0 if it is not known."""
    environment: dict[str, str] = {}
    """To be set before anything is computed."""


class Trial(msgspec.Struct, frozen=True):
    """What a child is to try. Linears are (out, in)."""

    linears: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]
    threads: tuple[int, ...]
    seconds: float
    """After which the trial of one precision is given up."""


class Measurement(msgspec.Struct, frozen=True):
    dtype: str
    threads: int
    row_ms: float
    """One token through one layer."""
    chunk_ms: float
    """The same for CHUNK tokens."""
    environment: dict[str, str] = {}

    @property
    def job_ms(self) -> float:
        return ANSWER * self.row_ms + PROMPT / CHUNK * self.chunk_ms


def measured(
    linears: tuple[tuple[int, int], ...],
    threads: int = 0,
    dtype: str = AUTO,
    patience: float = _PATIENCE,
) -> Choice:
    """For layers of such linear maps (out, in). Takes about two seconds. Where nothing was found in
    time it is float32, which works everywhere. Raises LlmFailure if another was asked for and can't
    be computed with here."""
    dtypes = ("float32", "bfloat16") if dtype == AUTO else (dtype,)
    counts = (threads,) if threads else thread_counts(cores())
    found = try_out(Trial(linears, dtypes, counts, patience / 3), patience)
    if not found and "float32" in dtypes:
        return Choice("float32", counts[0], 0.0)
    if not found:
        raise LlmFailure(LlmCode.NOT_SUPPORTED, f"this machine can't compute in {dtype}")
    best = choose(found)
    return Choice(best.dtype, best.threads, best.row_ms, best.environment)


def choose(found: Sequence[Measurement]) -> Measurement:
    """The fastest for a usual job. What is exact and what leaves cores to others is only given up
    for a clear gain."""
    ordered = sorted(found, key=lambda one: (one.dtype != "float32", one.threads))
    best = ordered[0]
    for one in ordered[1:]:
        share = _THREADS_GAIN if one.dtype == best.dtype else _DTYPE_GAIN
        best = one if one.job_ms < share * best.job_ms else best
    return best


def thread_counts(cores: int) -> tuple[int, ...]:
    return tuple(sorted({1, max(1, cores // 2), cores}))


def cores() -> int:
    """Those that this process may use: a container often has less time than cores."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(count or 1, _allowed(Path("/sys/fs/cgroup"))))


def _allowed(cgroups: Path) -> int:
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return 1 << 16
    return 1 << 16 if quota == "max" else -(-int(quota) // int(period))


def try_out(trial: Trial, patience: float, command: Sequence[str] = _COMMAND) -> list[Measurement]:
    """What was found until all was tried, or patience ended."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with child:
        try:
            said, _ = child.communicate(msgspec.json.encode(trial), timeout=patience)
        except subprocess.TimeoutExpired as late:
            said = late.output or b""
        finally:
            child.kill()
    whole = said[: said.rfind(b"\n") + 1]
    return [msgspec.json.decode(line, type=Measurement) for line in whole.splitlines()]


# -- in the child ------------------------------------------------------------------------


def main() -> None:
    import torch  # noqa: F401 - so that the forks have it

    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    for dtype in trial.dtypes:
        lived = _forked(trial, dtype, {})
        if not lived and dtype == "bfloat16" and not SAFER.keys() & os.environ.keys():
            _forked(trial, dtype, SAFER)


def _forked(trial: Trial, dtype: str, environment: dict[str, str]) -> bool:
    """Whether it came to its end."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1] == 0
    try:
        signal.alarm(max(1, int(trial.seconds)))
        os.environ.update(environment)
        for found in tried(trial, dtype, environment):
            os.write(1, msgspec.json.encode(found) + b"\n")
        os._exit(0)
    finally:
        os._exit(1)


def tried(trial: Trial, dtype: str, environment: dict[str, str]) -> Iterator[Measurement]:
    import torch

    copies = _Copies(trial.linears, dtype)
    for threads in trial.threads:
        torch.set_num_threads(threads)
        row, chunk = copies.milliseconds(1), copies.milliseconds(CHUNK)
        yield Measurement(dtype, threads, row, chunk, environment)


class _Copies:
    """A layer's linears, several times over; of a large layer only some rows."""

    def __init__(self, linears: Sequence[tuple[int, int]], dtype: str) -> None:
        from torch import nn

        from penstock.workloads.pipes.model.linear import COMPUTE, swapped

        values = sum(out * inner for out, inner in linears)
        cut = [(max(1, int(out * min(1.0, _VALUES / values))), inner) for out, inner in linears]
        self._share = sum(out * inner for out, inner in cut) / values
        self._inner = [inner for _, inner in cut]
        self._dtype = COMPUTE[dtype]
        self._layers = [
            swapped(nn.ModuleList(nn.Linear(i, o, False, dtype=self._dtype) for o, i in cut), dtype)
            for _ in range(min(max(1, _VALUES // values), _COPIES))
        ]

    def milliseconds(self, rows: int) -> float:
        """Of one layer: the best of several rounds, as whatever else the machine does only
        adds."""
        import torch

        inputs = [torch.full((rows, inner), 0.01, dtype=self._dtype) for inner in self._inner]
        with torch.inference_mode():
            self._round(inputs)
            best, end = self._round(inputs), time.perf_counter() + _SECONDS
            while time.perf_counter() < end:
                best = min(best, self._round(inputs))
        return best / self._share * 1000

    def _round(self, inputs: Sequence[Tensor]) -> float:
        start = time.perf_counter()
        for layer in self._layers:
            for multiply, x in zip(layer, inputs, strict=True):
                multiply(x)
        return (time.perf_counter() - start) / len(self._layers)


if __name__ == "__main__":
    main()
