"""A model split over nodes beside the same model in one process, on one machine in one run.

`python benchmarks/pipes.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from harness import MODEL, Benchmark, Experiment, Figures, Measure, Run, call, versions
from piped import ours
from piped.plan import PLANS

NODES = (1, 2, 3)
DELAY = 0.02
"""Seconds on each link, one way."""


def experiments(run: Run) -> Iterator[Experiment]:
    """Each side in processes of its own, one thread in each."""
    options = run.options
    if not options.model.exists():
        raise SystemExit(f"there is no model at {options.model}: 'make model' fetches it")
    run.facts["engine"] = ", ".join(versions("torch", "transformers"))
    run.more["size"] = run.size
    if not options.peer:
        run.left_out("Language Pipes", "--peer PYTHON names an interpreter that has it")
    for name in options.only:
        model = run.folder / name
        if name == "halves":
            yield halves(run, model)
            continue
        asked_of("models:make", name, options.model, model)
        run.more.setdefault("base", ours.base(name, model))
        sides: dict[str, Measure] = {"plain": of("plain:measure", model, "float32", run.size)}
        for nodes in NODES:
            sides[f"ours{nodes}"] = of("ours:measure", name, model, nodes, run.size)
        if options.peer and name != "billion":
            for nodes in NODES:
                told = (options.peer, name, model, nodes, run.size)
                sides[f"peer{nodes}"] = of("peer:measure", *told)
        yield Experiment(name, sides)
        if name == "real":
            sides = {}
            for nodes in NODES[1:]:
                for how, speculation in (("plain", False), ("speculating", True)):
                    told = (name, model, nodes, run.size, DELAY)
                    sides[f"{how}{nodes}"] = of("ours:measure", *told, speculation=speculation)
            yield Experiment("distant", sides, group="real")


def halves(run: Run, model: Path) -> Experiment:
    """A model of which no node can hold more than half and a layer, beside one node that can."""
    name = "plumbing" if run.size == "tiny" else "whole_billion"
    asked_of("models:make", name, run.options.model, model)
    run.more.setdefault("base", ours.base(name, model))
    how = f"{run.size} rate"
    sides = {
        "ours1": of("ours:measure", name, model, 1, how),
        "limited2": of("ours:measure", name, model, 2, how, is_limited=True),
    }
    return Experiment("halves", sides)


def of(function: str, *arguments: Any, **named: Any) -> Measure:
    return lambda _: asked_of(function, *arguments, **named)


def asked_of(function: str, *arguments: Any, **named: Any) -> Any:
    return call(f"piped.{function}", *arguments, environment={"OMP_NUM_THREADS": "1"}, **named)


# -- the page -----------------------------------------------------------------------

SIDES = {
    "plain": "transformers.generate, one process",
    "ours1": "Penstock, 1 node",
    "ours2": "Penstock, 2 nodes",
    "ours3": "Penstock, 3 nodes",
    "limited2": "Penstock, 2 nodes with memory for little more than half of the layers",
    "peer1": "Language Pipes, 1 node",
    "peer2": "Language Pipes, 2 nodes",
    "peer3": "Language Pipes, 3 nodes",
    "plain2": "2 nodes, a token a round trip",
    "speculating2": "2 nodes, speculating",
    "plain3": "3 nodes, a token a round trip",
    "speculating3": "3 nodes, speculating",
}
KINDS = {"quoting": "repeats its prompt", "new": "does not"}
COLUMNS = [(kind, what) for kind in KINDS for what in ("rate", "tokens_a_trip")]
TITLES = {
    "real": "SmolLM2-135M, real weights (30 layers, 576 wide)",
    "plumbing": "Random weights, 8 layers, 256 wide: nearly only plumbing",
    "billion": "Random weights, 8 of the 22 layers of a model of 1.1 billion weights (2048 wide)",
    "halves": "Random weights, all 22 layers of a model of 1.1 billion weights (2048 wide)",
}


def figures_of(everything: dict[str, Any]) -> Figures:
    """By model, side and figure."""
    return {"base": everything["base"]} | {
        f"{name}_{side}_{figure}": value
        for name, by_side in everything["results"].items()
        for side, figures in by_side.items()
        for figure, value in figures.items()
    }


def page(everything: dict[str, Any]) -> str:
    f, plan = figures_of(everything), PLANS[everything["size"]]
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
        if name == "real":
            parts += distant(f)
    if "halves_ours1_rate" in f:
        rows = [
            [SIDES[side], f"{f[f'halves_{side}_rate']:.2f}", f"{f[f'halves_{side}_cpu_ms']:.0f}"]
            for side in ("ours1", "limited2")
        ]
        heads = ["", "tokens/s", "CPU ms a token"]
        parts += [f"{TITLES['halves']}; greedy, one job:", report.table(heads, rows)]
    return report.page(everything, goals(f, plan.first[-1]), *parts)


def distant(f: Figures) -> list[str]:
    rows = [
        [SIDES[side], *(f"{f[f'distant_{side}_{kind}_{what}']:.1f}" for kind, what in COLUMNS)]
        for side in SIDES
        if f"distant_{side}_quoting_rate" in f
    ]
    if not rows:
        return []
    heads = [f"{KINDS[kind]}: {what.replace('_', ' ')}" for kind, what in COLUMNS]
    title = f"The same with {DELAY * 1000:.0f} ms of delay on each link, one way, one job:"
    return [title, report.table(["", *(head.replace("rate", "tokens/s") for head in heads)], rows)]


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
        reach("1 node: 1.05 times generate's tokens/s", one / f["real_plain_rate"], 1.05)
        reach("3 nodes: 0.95 of our 1 node, real weights", three / one, 0.95)
        cpu = f[f"real_ours3_first_{longest}_cpu_ms"] / f[f"real_plain_first_{longest}_cpu_ms"]
        below(f"{longest} prompt tokens: 1.3 times generate's CPU (3 nodes)", cpu, 1.3)
        if "real_ours1_together_8" in f:
            for side in ("ours1", "ours3"):
                gain = f[f"real_{side}_together_8"] / f[f"real_{side}_together_1"]
                reach(f"8 jobs at once: 4 times the tokens/s of one ({SIDES[side]})", gain, 4.0)
        size = f["real_ours3_resident_0"] - f["base"]
        share = size / f["real_ours3_weights_0"]
        below(f"memory of a node above {f['base'] >> 20} MiB: 1.15 of its weights", share, 1.15)
    if "plumbing_plain_rate" in f:
        one, three = f["plumbing_ours1_rate"], f["plumbing_ours3_rate"]
        reach("3 nodes: 0.75 of our 1 node, plumbing alone", three / one, 0.75)
        beyond = f["plumbing_ours3_cpu_ms"] - f["plumbing_ours1_cpu_ms"]
        below("a hop: 0.5 ms of CPU", beyond / f["plumbing_ours3_hops"], 0.5, "{:.2f} ms")
    if "billion_plain_rate" in f:
        ratio = f["billion_ours1_rate"] / f["billion_plain_rate"]
        reach("1 node: 1.05 times generate's tokens/s, layers of 1.1 billion", ratio, 1.05)
    if "halves_ours1_rate" in f:
        ratio = f["halves_limited2_rate"] / f["halves_ours1_rate"]
        reach("2 nodes that can't hold the model alone: 0.9 of one node that can", ratio, 0.9)
    for nodes in NODES[1:]:
        if f"distant_plain{nodes}_quoting_rate" in f:
            plain = f[f"distant_plain{nodes}_quoting_rate"]
            ratio = f[f"distant_speculating{nodes}_quoting_rate"] / plain
            reach(f"slow links: 1.8 times the tokens/s by speculation, {nodes} nodes", ratio, 1.8)
    for nodes in NODES:
        ours, peer = f"real_ours{nodes}", f"real_peer{nodes}"
        if f"{peer}_rate" in f:
            ratio = f[f"{ours}_rate"] / f[f"{peer}_rate"]
            reach(f"1.5 times the peer's tokens/s, {nodes} nodes", ratio, 1.5)
        if f"{peer}_first_{longest}_ms" in f:
            ratio = f[f"{peer}_first_{longest}_ms"] / f[f"{ours}_first_{longest}_ms"]
            reach(f"first token of {longest} 2.5 times as soon as its, {nodes} nodes", ratio, 2.5)
        if f"{peer}_together_8" in f:
            ratio = f[f"{ours}_together_8"] / f[f"{peer}_together_8"]
            reach(f"4 times its tokens/s with 8 streams, {nodes} nodes", ratio, 4.0)
    return goals


BENCHMARK = Benchmark(
    "pipes.py",
    "Split models beside whole ones.",
    tuple(TITLES),
    experiments,
    page,
    titles=SIDES,
    peers=[side for side in SIDES if side.startswith("peer")],
    arguments={
        "--model": {"type": Path, "default": MODEL, "help": "the real one"},
        "--peer": {"metavar": "PYTHON", "help": "an interpreter that has Language Pipes"},
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
