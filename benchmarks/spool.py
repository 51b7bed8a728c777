"""The spool and the OpenAI API beside llama.cpp itself, on one machine in one run.

`python benchmarks/spool.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import report
from measure import busy_percent, flush_times, machine
from options import add_options, command, publish, tell, verdict
from processes import HERE
from run import scratch
from spooled import ours, renames
from spooled.prompts import PROMPTS, SLOTS, THREADS, TOKENS

from penstock.workloads.spool.config import Sync

GROUPS = ("answers", "streams", "queue", "start")
AT_ONCE = (1, 8, 32)
MODEL = HERE.parent / ".models" / "SmolLM2-135M-Instruct.gguf"
Figures = dict[str, Any]


def main() -> int:
    options = parse(sys.argv[1:])
    if not options.model.exists():
        tell(f"there is no model at {options.model}: 'make model' fetches it")
        return 1
    began, notes, busy = time.monotonic(), list[str](), [busy_percent()]
    runs: list[Figures] = []
    with scratch(options.folder) as folder:
        for turn in range(options.repeats or (1 if options.quick or options.tiny else 5)):
            tell(f"run {turn + 1}")
            runs.append({})
            for group in options.only:
                busy.append(busy_percent())
                place = folder / f"{group}-{turn}"
                place.mkdir()
                runs[-1] |= MEASURES[group](place, options)
        flush = median(flush_times(folder)) * 1e3
    if not has_contexts() and "answers" in options.only:
        notes.append("a context for each job was left out: pip install cyllama brings it")
    everything = {
        "command": command("spool.py", GROUPS, options),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            **machine(),
            "disk": f"4 KiB appended and flushed in {flush:.2f} ms (median)",
            "engine": ", ".join(versions()),
            "others": f"kept the cores {median(busy):.0f}% busy (median), at most {max(busy):.0f}%",
        },
        "results": {key: median(run[key] for run in runs) for key in runs[0]},
        "notes": notes,
    }
    tell(f"took {time.monotonic() - began:.0f} s")
    publish(everything, page(everything), options)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The spool and the OpenAI API beside llama.cpp.")
    parser.add_argument("--quick", action="store_true", help="one run: two or three minutes")
    parser.add_argument("--tiny", action="store_true", help="the least, to see that it works")
    parser.add_argument("--model", type=Path, default=MODEL, metavar="FILE", help="what is asked")
    add_options(parser, GROUPS)
    return parser.parse_args(arguments)


# -- measuring ----------------------------------------------------------------------


def answers(folder: Path, options: argparse.Namespace) -> Figures:
    """The same prompts, greedily, by each side."""
    model = str(options.model)
    sides = {
        "sequential": bare(model, "sequential"),
        "parallel": bare(model, "parallel"),
        "spool": ours.spool(folder / "spool", model),
    }
    with ours.door(folder / "door", model) as (pid, address):
        sides["door"] = ours.through_door(pid, address)
    if has_contexts():
        sides["contexts"] = asked_of("contexts.py", model, "2", "4")
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


def streams(folder: Path, options: argparse.Namespace) -> Figures:
    """When the first token comes, and how many a second, so many at once."""
    figures = {}
    with ours.door(folder, str(options.model)) as (_, address):
        for at_once in AT_ONCE:
            found = ours.streamed(address, at_once)
            figures |= {f"door_{key}_{at_once}": value for key, value in found.items()}
    for at_once in AT_ONCE:
        found = bare(str(options.model), "first", str(at_once))
        figures |= {f"bare_{key}_{at_once}": found[key] for key in ("first_ms", "rate")}
    return figures


def queue(folder: Path, options: argparse.Namespace) -> Figures:
    """Whole jobs a second with nothing computed, beside the bare loop."""
    count = 50 if options.tiny else 300 if options.quick else 1000
    return {
        "loop_sync": renames.rate(folder / "loop", count, sync=True),
        "loop": renames.rate(folder / "fast-loop", 3 * count, sync=False),
        "queue_sync": ours.queue(folder / "queue", count, Sync.FULL),
        "queue": ours.queue(folder / "fast-queue", 3 * count, Sync.NONE),
    }


def start(folder: Path, options: argparse.Namespace) -> Figures:
    found = ours.latency(folder, 20 if options.tiny else 200)
    return {f"start_{key}": value for key, value in found.items()}


MEASURES = {"answers": answers, "streams": streams, "queue": queue, "start": start}


def bare(*arguments: str) -> Figures:
    return asked_of("bare.py", *arguments)


def asked_of(script: str, *arguments: str) -> Figures:
    """What another side says, from a process of its own."""
    said = subprocess.run(
        [sys.executable, str(HERE / "spooled" / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        check=True,
    )
    figures: Figures = json.loads(said.stdout.splitlines()[-1])
    return figures


def has_contexts() -> bool:
    return importlib.util.find_spec("cyllama") is not None


def versions() -> list[str]:
    names = ("xllamacpp", "openai", "cyllama")
    return [
        f"{name} {importlib.metadata.version(name)}"
        for name in names
        if importlib.util.find_spec(name) is not None
    ]


# -- the page -----------------------------------------------------------------------

SIDES = {
    "contexts": "a context for each job, 2 workers of 4 threads",
    "sequential": "llama.cpp, one after another",
    "parallel": f"llama.cpp's server, {SLOTS} slots",
    "spool": "Penstock's spool",
    "door": "Penstock's OpenAI API",
}


def page(everything: dict[str, Any]) -> str:
    f = everything["results"]
    parts = [*report.origin(everything), targets(f)]
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
    parts += [f"- {note}" for note in everything["notes"]]
    return "\n\n".join(parts)


def targets(f: Figures) -> str:
    rows = []

    def reach(said: str, figure: float, least: float) -> None:
        rows.append([said, f"{figure:.2f}x", verdict(figure >= least)])

    if "parallel_per_cpu" in f:
        limit = f["parallel_per_cpu"]
        reach("tokens per CPU s of the server: 0.95 by the spool", f["spool_per_cpu"] / limit, 0.95)
        reach("the same: 0.90 by the OpenAI API", f["door_per_cpu"] / limit, 0.90)
    if "contexts_per_cpu" in f:
        said = "tokens per CPU s of a context for each job: 2.5 times by the spool"
        reach(said, f["spool_per_cpu"] / f["contexts_per_cpu"], 2.5)
    if "start_p50_ms" in f:
        at = f"{f['start_p50_ms']:.1f} ms (p99 {f['start_p99_ms']:.1f})"
        rows.append(["submit to RUNNING, p50 under 10 ms", at, verdict(f["start_p50_ms"] < 10)])
    if "queue" in f:
        said = "jobs a second of the bare loop, flushed: 0.5"
        reach(said, f["queue_sync"] / f["loop_sync"], 0.5)
    return report.table(["to reach", "figure", ""], rows) if rows else ""


if __name__ == "__main__":
    sys.exit(main())
