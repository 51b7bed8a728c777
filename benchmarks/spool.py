"""The spool and the OpenAI API beside llama.cpp itself, on one machine in one run.

`python benchmarks/spool.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from harness import MODEL, Benchmark, Experiment, Figures, Run, call, versions
from spooled import ours, renames
from spooled.prompts import PROMPTS, SLOTS, THREADS, TOKENS

from penstock.workloads.spool.config import Sync

AT_ONCE = (1, 8, 32)
OURS = "beside llama.cpp"


def experiments(run: Run) -> Iterator[Experiment]:
    if not run.options.model.exists():
        raise SystemExit(f"there is no model at {run.options.model}: 'make model' fetches it")
    run.facts["engine"] = ", ".join(versions("xllamacpp", "openai", "cyllama"))
    if not has_contexts() and run.wants("answers"):
        run.left_out("a context for each job", "pip install cyllama brings it")
    for name, measure in MEASURES.items():
        yield Experiment(name, {OURS: lambda folder, measure=measure: measure(folder, run)})


# -- measuring ----------------------------------------------------------------------


def answers(folder: Path, run: Run) -> Figures:
    """The same prompts, greedily, by each side."""
    model = str(run.options.model.resolve())
    sides = {
        "sequential": call("spooled.bare:all_of", model, 1),
        "parallel": call("spooled.bare:all_of", model, SLOTS),
        "spool": ours.spool(folder / "spool", model),
    }
    with ours.door(folder / "door", model) as (pid, address):
        sides["door"] = ours.through_door(pid, address)
    if has_contexts():
        sides["contexts"] = call("spooled.contexts:measure", model, 2, 4)
    reference = sides["parallel"]["texts"]
    figures = {}
    for name, side in sides.items():
        same = sum(one == other for one, other in zip(side["texts"], reference, strict=True))
        figures |= {
            f"{name}_wall": side["wall"],
            f"{name}_cpu": side["cpu"],
            f"{name}_per_cpu": side["tokens"] / side["cpu"],
            f"{name}_rate": side["tokens"] / side["wall"],
            f"{name}_same": same,
        }
    return figures


def streams(folder: Path, run: Run) -> Figures:
    """When the first token comes, and how many a second, so many at once."""
    figures = {}
    with ours.door(folder, str(run.options.model.resolve())) as (_, address):
        for at_once in AT_ONCE:
            found = ours.streamed(address, at_once)
            figures |= {f"door_{key}_{at_once}": value for key, value in found.items()}
    for at_once in AT_ONCE:
        found = call("spooled.bare:streamed", str(run.options.model.resolve()), at_once)
        figures |= {f"bare_{key}_{at_once}": found[key] for key in ("first_ms", "rate")}
    return figures


def queue(folder: Path, run: Run) -> Figures:
    """Whole jobs a second with nothing computed, beside the bare loop."""
    count = run.sized(1000, 300, 50)
    return {
        "loop_sync": renames.rate(folder / "loop", count, sync=True),
        "loop": renames.rate(folder / "fast-loop", 3 * count, sync=False),
        "queue_sync": ours.queue(folder / "queue", count, Sync.FULL),
        "queue": ours.queue(folder / "fast-queue", 3 * count, Sync.NONE),
    }


def requests(folder: Path, run: Run) -> Figures:
    """Chat requests a second with nothing computed, each a durable job."""
    return {"requests": ours.no_op_chats(folder, run.sized(3.0, 3.0, 0.3))}


def start(folder: Path, run: Run) -> Figures:
    found = ours.latency(folder, run.sized(200, 200, 20))
    return {f"start_{key}": value for key, value in found.items()}


MEASURES = {
    "answers": answers,
    "streams": streams,
    "queue": queue,
    "requests": requests,
    "start": start,
}


def has_contexts() -> bool:
    return importlib.util.find_spec("cyllama") is not None


# -- the page -----------------------------------------------------------------------

SIDES = {
    "contexts": "a context for each job, 2 workers of 4 threads",
    "sequential": "llama.cpp, one after another",
    "parallel": f"llama.cpp's server, {SLOTS} slots",
    "spool": "Penstock's spool",
    "door": "Penstock's OpenAI API",
}


def figures_of(results: dict[str, Any]) -> Figures:
    return {name: value for by in results.values() for name, value in by[OURS].items()}


def page(everything: dict[str, Any]) -> str:
    f, parts = figures_of(everything["results"]), list[str]()
    if "parallel_cpu" in f:
        parts += [f"{len(PROMPTS)} short prompts, {TOKENS} tokens each, greedy, {THREADS} threads:"]
        rows = [
            [
                title,
                f"{f[f'{name}_wall']:.1f}",
                f"{f[f'{name}_cpu']:.1f}",
                f"{f[f'{name}_rate']:.0f}",
                f"{f[f'{name}_per_cpu']:.1f}",
                f"{f[f'{name}_per_cpu'] / f['parallel_per_cpu']:.2f}x",
                f"{f[f'{name}_same']:.0f} of {len(PROMPTS)}",
            ]
            for name, title in SIDES.items()
            if f"{name}_cpu" in f
        ]
        head = ["", "s", "CPU s", "tokens/s", "tokens per CPU s", "of the server's", "same text"]
        parts += [report.table(head, rows)]
    if "door_rate_1" in f:
        parts += ["Streamed, so many at once (of 32 prompts at most), median:"]
        rows = [
            [
                str(n),
                f"{f[f'bare_first_ms_{n}']:.0f} / {f[f'door_first_ms_{n}']:.0f}",
                f"{f[f'bare_rate_{n}']:.0f} / {f[f'door_rate_{n}']:.0f}",
                f"{f[f'door_rate_{n}'] / f[f'bare_rate_{n}']:.2f}x",
            ]
            for n in AT_ONCE
        ]
        head = ["at once", "first token, ms: binding / OpenAI API", "tokens/s: the same", ""]
        parts += [report.table(head, rows)]
    if "queue" in f:
        parts += ["Whole jobs a second with nothing computed (submitted, claimed, ended):"]
        rows = [
            ["flushed", *(f"{f[key]:,.0f}" for key in ("loop_sync", "queue_sync"))],
            ["not flushed", *(f"{f[key]:,.0f}" for key in ("loop", "queue"))],
        ]
        ratios = (f["queue_sync"] / f["loop_sync"], f["queue"] / f["loop"])
        rows = [[*row, f"{ratio:.2f}x"] for row, ratio in zip(rows, ratios, strict=True)]
        parts += [report.table(["", "the bare loop", "Penstock's spool", ""], rows)]
    return report.page(everything, goals(f), *parts)


def goals(f: Figures) -> report.Goals:
    goals = report.Goals()
    if "parallel_per_cpu" in f:
        limit, spool = f["parallel_per_cpu"], f["spool_per_cpu"]
        goals.at_least("tokens per CPU s of the server: 0.97 by the spool", spool / limit, 0.97)
        goals.at_least("the same: 0.97 by the OpenAI API", f["door_per_cpu"] / limit, 0.97)
    if "contexts_per_cpu" in f:
        said = "tokens per CPU s of a context for each job: 2.5 times by the spool"
        goals.at_least(said, f["spool_per_cpu"] / f["contexts_per_cpu"], 2.5)
    if "start_p50_ms" in f:
        at = f"{f['start_p50_ms']:.1f} ms (p99 {f['start_p99_ms']:.1f})"
        goals.add("submit to RUNNING, p50 under 10 ms", at, f["start_p50_ms"] < 10)
    if "queue" in f:
        ratio = f["queue_sync"] / f["loop_sync"]
        goals.at_least("jobs a second of the bare loop, flushed: 0.9", ratio, 0.9)
        goals.at_least("the same, not flushed: 0.5", f["queue"] / f["loop"], 0.5)
    if "requests" in f:
        said = "chat requests a second, durable, with nothing computed: 2,000"
        goals.at_least(said, f["requests"], 2000, "{:,.0f}")
    return goals


BENCHMARK = Benchmark(
    "spool.py",
    "The spool and the OpenAI API beside llama.cpp.",
    tuple(MEASURES),
    experiments,
    page,
    repeats=5,
    arguments={"--model": {"type": Path, "default": MODEL, "help": "the model that is asked"}},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
