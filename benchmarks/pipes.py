"""A model split over nodes beside the same model in one process, on one machine in one run.

`python benchmarks/pipes.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import MODEL, Benchmark, Experiment, Figures, Measure, Run, call, versions
from piped.nodes import ONE_THREAD, empty_bytes, network
from report import Goal, Results, by_figure, judged, look_up
from report import page as paged

NODES = (1, 2, 3)
DELAY = 0.02
"""Seconds on each link, one way."""
SIZES: dict[str, tuple[Any, Any, Any]] = {
    # Of a whole, a quick and a tiny run; a tiny one only shows that it runs.
    "tokens": (48, 32, 4),
    # Prompt lengths for the time to the first token.
    "first": ((32, 512), (32, 512), (8,)),
    # Jobs at once, and the tokens of each.
    "at_once": ((1, 4, 8, 16), (1, 4, 8, 16), (1, 2)),
    "together": (24, 16, 3),
    # Tokens of each answer over slow links.
    "answer": (96, 96, 8),
    # The best of so many.
    "turns": (3, 2, 1),
}
SIDES = {
    "plain": "transformers.generate, one process",
    **{f"ours{n}": f"Penstock, {n} node{'s' * (n > 1)}" for n in NODES},
    "limited2": "Penstock, 2 nodes with memory for little more than half of the layers",
    **{f"peer{n}": f"Language Pipes, {n} node{'s' * (n > 1)}" for n in NODES},
    **{
        f"{how}{n}": f"{n} nodes, {title}"
        for n in NODES[1:]
        for how, title in (("steady", "a token a round trip"), ("speculating", "speculating"))
    },
}
TITLES = {
    "real": "SmolLM2-135M, real weights (30 layers, 576 wide)",
    "plumbing": "random weights, 8 layers, 256 wide: nearly only plumbing",
    "billion": "random weights, 8 of the 22 layers of a model of 1.1 billion weights (2048 wide)",
    "halves": "random weights, all 22 layers of a model of 1.1 billion weights (2048 wide)",
}


def experiments(run: Run) -> Iterator[Experiment]:
    """Each side in processes of its own, one thread in each."""
    options, plan = run.options, vars(run.plan(SIZES))
    if not options.model.exists():
        raise SystemExit(f"there is no model at {options.model}: 'make model' fetches it")
    run.facts["engine"] = ", ".join(versions("torch", "transformers"))
    if not options.peer:
        run.left_out("Language Pipes", "--peer PYTHON names an interpreter that has it")
    for name in options.only:
        model, kind = run.folder / name, name
        if name == "halves":
            kind = "plumbing" if options.tiny else "whole_billion"
        call("piped.asking:make_model", kind, options.model, model)
        run.more.setdefault("base", empty_bytes(kind, model))
        if name == "halves":
            # A model of which no node can hold more than half and a layer, beside one that can;
            # the rate of one job alone, as it is too large for the rest.
            rate = {**plan, "first": (), "at_once": ()}
            sides = {"ours1": ours(kind, model, 1, rate)}
            sides["limited2"] = ours(kind, model, 2, rate, is_limited=True)
            yield Experiment(name, sides)
            continue
        sides = {"plain": of("piped.asking:generate", model, plan)}
        sides |= {f"ours{nodes}": ours(name, model, nodes, plan) for nodes in NODES}
        if options.peer and name != "billion":
            for nodes in NODES:
                told = (options.peer, name, model, nodes, plan)
                sides[f"peer{nodes}"] = of("piped.peer:measure", *told)
        yield Experiment(name, sides)
        if name == "real":
            links = {
                f"{how}{nodes}": ours(
                    name, model, nodes, plan, delay=DELAY, speculation=speculation
                )
                for nodes in NODES[1:]
                for how, speculation in (("steady", False), ("speculating", True))
            }
            yield Experiment("distant", links, group="real")


def ours(name: str, model: Path, nodes: int, plan: dict[str, Any], **options: Any) -> Measure:
    return lambda _: network(name, model, nodes, plan, **options)


def of(function: str, *arguments: Any) -> Measure:
    return lambda _: call(function, *arguments, environment=ONE_THREAD)


# -- the page -----------------------------------------------------------------------------


def page(everything: dict[str, Any]) -> str:
    results, plan = derived(everything["results"], everything.get("base", 0)), everything["plan"]
    decode = {
        "tokens/s": ("rate", "{:.1f}"),
        "of generate's": ("rate/rate @plain", "{:.2f}x"),
        "CPU ms a token": ("cpu_ms", "{:.1f}"),
    }
    for n in plan["first"]:
        decode[f"first token of {n}, ms"] = (f"first_{n}_ms", "{:.0f}")
        decode[f"its CPU ms ({n})"] = (f"first_{n}_cpu_ms", "{:.0f}")
    decode["bytes a token and hop"] = ("bytes", "{:.0f}")
    crowd = {f"{n} at once, tokens/s": (f"together_{n}", "{:.0f}") for n in plan["at_once"]}
    distant = {
        f"{title}: {head}": (f"{kind}_{figure}", "{:.1f}")
        for kind, title in (("quoting", "repeats its prompt"), ("new", "does not"))
        for figure, head in (("rate", "tokens/s"), ("tokens_a_trip", "tokens a trip"))
    }
    parts = []
    for name, title in TITLES.items():
        rows = {shown: f"{name} @{side}" for side, shown in SIDES.items()}
        parts += [by_figure(results, rows, decode, title), by_figure(results, rows, crowd, title)]
        if name == "real":
            links = {shown: f"distant @{side}" for side, shown in SIDES.items()}
            late = f"the same with {DELAY * 1000:.0f} ms of delay on each link, one way, one job"
            parts.append(by_figure(results, links, distant, late))
    titles = {side: title.partition(",")[0] for side, title in SIDES.items()}
    to_reach = goals(results, plan, everything.get("base", 0))
    return paged(everything, judged(to_reach, results, titles), *parts)


def derived(results: Results, base: int) -> dict[str, dict[str, Figures]]:
    """With what a hop costs beyond one node, and a node's memory beside its weights."""
    found = {
        name: {side: dict(figures) for side, figures in by.items()} for name, by in results.items()
    }
    for by_side in found.values():
        for figures in by_side.values():
            figures["bytes"] = figures.get("bytes") or None
            if figures.get("weights_1"):  # a node that chooses its layers has none at first
                figures["memory"] = (figures["resident_1"] - base) / figures["weights_1"]
        if {"ours1", "ours3"} <= {*by_side}:
            one, three = by_side["ours1"], by_side["ours3"]
            three["hop_ms"] = (three["cpu_ms"] - one["cpu_ms"]) / three["hops"]
    return found


def goals(results: Results, plan: dict[str, Any], base: int) -> Iterator[Goal]:
    longest, generate, one = plan["first"][-1], "generate", "1 node"

    def beside(work: str, figure: str, ours: str, other: str, peer: str = "", **goal: Any) -> Goal:
        form = "{:.0f} ms" if figure.endswith("_ms") else "{:.1f}/s"
        return Goal(work, f"{figure} @{ours}", f"{figure} @{other}", form=form, peer=peer, **goal)

    yield beside("1 node", "real rate", "ours1", "plain", generate, least=1.05)
    yield beside("3 nodes, real weights", "real rate", "ours3", "ours1", one, least=0.95)
    work, cpu = f"CPU of {longest} prompt tokens, 3 nodes", f"real first_{longest}_cpu_ms"
    yield beside(work, cpu, "ours3", "plain", generate, most=1.3)
    for side in ("ours1", "ours3"):
        work, crowd = f"8 jobs at once, {SIDES[side]}", f"real together_8 @{side}"
        single = f"real together_1 @{side}"
        yield Goal(work, crowd, single, least=4, form="{:.1f}/s", peer="one job")
    work = f"memory of a node above {base >> 20} MiB, of its weights"
    yield Goal(work, "real memory @ours3", most=1.15, form="{:.2f}x")
    yield beside("3 nodes, plumbing alone", "plumbing rate", "ours3", "ours1", one, least=0.75)
    yield Goal("a hop: CPU", "plumbing hop_ms @ours3", most=0.5, form="{:.2f} ms")
    work = "1 node, layers of 1.1 billion"
    yield beside(work, "billion rate", "ours1", "plain", generate, least=1.05)
    work, peer = "2 nodes that can't hold the model alone", "one node that can"
    yield beside(work, "halves rate", "limited2", "ours1", peer, least=0.9)
    for n in NODES[1:]:
        work, sides = f"slow links: speculation, {n} nodes", (f"speculating{n}", f"steady{n}")
        yield beside(work, "distant quoting_rate", *sides, "a token a round trip", least=1.8)
    for n in NODES:
        mine, theirs = f"ours{n}", f"peer{n}"
        if look_up(results, f"real rate @{theirs}") is not None:
            yield beside(f"tokens/s, nodes: {n}", "real rate", mine, theirs, least=1.5)
            work, soon = f"first token of {longest}, nodes: {n}", f"real first_{longest}_ms"
            yield beside(work, soon, mine, theirs, most=1 / 2.5)
            yield beside(f"8 streams, nodes: {n}", "real together_8", mine, theirs, least=4)


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
