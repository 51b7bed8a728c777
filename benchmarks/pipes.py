"""A model split over nodes beside the same model in one process, on one machine in one run.

`python benchmarks/pipes.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import report
from harness import MODEL, Benchmark, Figures, Run, from_process, look, medians, tell, versions
from piped import ours
from piped.plan import PLANS
from run import scratch

NODES = (1, 2, 3)


def measure_all(run: Run) -> Figures | None:
    options = run.options
    if not options.model.exists():
        tell(f"there is no model at {options.model}: 'make model' fetches it")
        return None
    run.facts["engine"] = ", ".join(versions("torch", "transformers"))
    run.more["size"] = run.size
    if not options.peer:
        why = "--peer PYTHON names an interpreter that has it"
        run.notes.append(f"Language Pipes was left out: {why}")
    runs: list[Figures] = []
    with scratch(options.folder) as folder:
        for name in options.only:
            asked_of("models.py", name, str(options.model), str(folder / name))
        base = ours.base(options.only[0], folder / options.only[0])
        for turn in range(run.repeats):
            runs.append({})
            for name in options.only:
                look(name, turn)
                runs[-1] |= measured(name, folder / name, run.size, options.peer)
    return {**medians(runs), "base": base}


# -- measuring ----------------------------------------------------------------------


def measured(name: str, folder: Path, how: str, peer: str | None) -> Figures:
    """Each side in processes of its own, one thread in each."""
    tell(f"{name}: transformers.generate")
    plain = asked_of("plain.py", str(folder), "float32", how)
    figures = named(name, "plain", plain)
    for nodes in NODES:
        tell(f"{name}: {nodes} of ours")
        found = ours.measure(name, folder, nodes, how)
        figures |= named(name, f"ours{nodes}", found)
    if peer and name != "larger":
        for nodes in NODES:
            tell(f"{name}: {nodes} of Language Pipes")
            found = asked_of("peer.py", peer, name, str(folder), str(nodes), how)
            figures |= named(name, f"peer{nodes}", found)
    return figures


def named(name: str, side: str, found: Figures) -> Figures:
    return {
        f"{name}_{side}_{key}": value
        for key, value in found.items()
        if isinstance(value, int | float)
    }


def asked_of(script: str, *arguments: str) -> Figures:
    return from_process(f"piped/{script}", *arguments, OMP_NUM_THREADS="1")


# -- the page -----------------------------------------------------------------------

SIDES = {
    "plain": "transformers.generate, one process",
    "ours1": "Penstock, 1 node",
    "ours2": "Penstock, 2 nodes",
    "ours3": "Penstock, 3 nodes",
    "peer1": "Language Pipes, 1 node",
    "peer2": "Language Pipes, 2 nodes",
    "peer3": "Language Pipes, 3 nodes",
}
TITLES = {
    "real": "SmolLM2-135M, real weights (30 layers, 576 wide)",
    "plumbing": "Random weights, 8 layers, 256 wide: nearly only plumbing",
    "larger": "Random weights, 24 layers, 1024 wide",
}


def page(everything: dict[str, Any]) -> str:
    f, plan = everything["results"], PLANS[everything["size"]]
    parts = []
    for name, title in TITLES.items():
        if f"{name}_plain_rate" not in f:
            continue
        parts += [f"{title}; greedy, one thread in each process, float32 (the peer: bfloat16):"]
        sides = [side for side in SIDES if f"{name}_{side}_rate" in f]
        parts += [decode_table(f, name, sides, plan.first)]
        crowds = [n for n in plan.at_once if f"{name}_ours1_together_{n}" in f]
        rows = [
            [SIDES[side], *(f"{f[f'{name}_{side}_together_{n}']:.0f}" for n in crowds)]
            for side in sides
            if f"{name}_{side}_together_{crowds[0]}" in f
        ]
        heads = [f"{n} at once" for n in crowds]
        parts += ["Tokens/s in all, so many jobs at once:", report.table(["", *heads], rows)]
    return report.page(everything, goals(f, plan.first[-1]), *parts)


def decode_table(f: Figures, name: str, sides: list[str], first: tuple[int, ...]) -> str:
    rows = []
    for side in sides:
        of = f"{name}_{side}"
        firsts = (
            f"{f[f'{of}_first_{n}_ms']:.0f} ({f[f'{of}_first_{n}_cpu_ms']:.0f})"
            if f"{of}_first_{n}_ms" in f
            else report.NONE
            for n in first
        )
        bytes_sent = f.get(f"{of}_bytes", 0)
        rows.append(
            [
                SIDES[side],
                f"{f[f'{of}_rate']:.1f}",
                f"{f[f'{of}_rate'] / f[f'{name}_plain_rate']:.2f}x",
                f"{f[f'{of}_cpu_ms']:.1f}",
                *firsts,
                f"{bytes_sent:.0f}" if bytes_sent else report.NONE,
            ]
        )
    heads = [f"first token of {n}, ms (CPU ms)" for n in first]
    head = ["", "tokens/s", "of generate's", "CPU ms a token", *heads, "bytes a token and hop"]
    return report.table(head, rows)


def goals(f: Figures, longest: int) -> report.Goals:
    goals = report.Goals()
    reach, below = goals.at_least, goals.at_most
    if "real_plain_rate" in f:
        one, three = f["real_ours1_rate"], f["real_ours3_rate"]
        reach("1 node: 1.1 times generate's tokens/s", one / f["real_plain_rate"], 1.1)
        reach("3 nodes: 0.85 of our 1 node, real weights", three / one, 0.85)
        cpu = f[f"real_ours3_first_{longest}_cpu_ms"] / f[f"real_plain_first_{longest}_cpu_ms"]
        below(f"{longest} prompt tokens: 1.3 times generate's CPU (3 nodes)", cpu, 1.3)
        if "real_ours1_together_8" in f:
            for side in ("ours1", "ours3"):
                gain = f[f"real_{side}_together_8"] / f[f"real_{side}_together_1"]
                reach(f"8 jobs at once: 3 times the tokens/s of one ({SIDES[side]})", gain, 3.0)
        size = f["real_ours3_resident_0"] - f["base"]
        share = size / f["real_ours3_weights_0"]
        below(f"memory of a node above {f['base'] >> 20} MiB: 1.15 of its weights", share, 1.15)
    if "plumbing_plain_rate" in f:
        one, three = f["plumbing_ours1_rate"], f["plumbing_ours3_rate"]
        reach("3 nodes: 0.7 of our 1 node, plumbing alone", three / one, 0.7)
        beyond = f["plumbing_ours3_cpu_ms"] - f["plumbing_ours1_cpu_ms"]
        below("a hop: 1 ms of CPU", beyond / f["plumbing_ours3_hops"], 1.0, "{:.2f} ms")
    for nodes in NODES:
        if f"real_peer{nodes}_rate" in f:
            ratio = f[f"real_ours{nodes}_rate"] / f[f"real_peer{nodes}_rate"]
            reach(f"twice the peer's tokens/s, {nodes} nodes", ratio, 2.0)
            if f"real_peer{nodes}_first_{longest}_ms" in f:
                theirs = f[f"real_peer{nodes}_first_{longest}_ms"]
                ratio = theirs / f[f"real_ours{nodes}_first_{longest}_ms"]
                reach(
                    f"a fifth of its time to the first token of {longest}, {nodes} nodes", ratio, 5
                )
    return goals


BENCHMARK = Benchmark(
    "pipes.py",
    "Split models beside whole ones.",
    ("real", "plumbing", "larger"),
    page,
    arguments={
        "--model": {"type": Path, "default": MODEL, "help": "the real one"},
        "--peer": {"metavar": "PYTHON", "help": "an interpreter that has Language Pipes"},
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(measure_all))
