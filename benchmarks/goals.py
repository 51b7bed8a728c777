"""The goals of the engine: each judged by the figures of the run, beside a peer's."""

# The dash and the multiplication sign are meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

from typing import Any

from peers.sides import HUEY, HUEY_FSYNC, PENSTOCK, PGQUEUER, SIDES
from report import NONE, Goals, shown, times

Results = dict[str, dict[str, dict[str, Any]]]
Figure = tuple[str, str]
"""An experiment and the name of its figure."""

DRAIN, SUBMIT, EMBEDDED = ("drain-1", "rate"), ("submit-apart", "one"), "submit-embedded"


def look_up(results: Results, figure: Figure, side: str = PENSTOCK) -> float | None:
    experiment, name = figure
    return results.get(experiment, {}).get(side, {}).get(name)


class _Judge(Goals):
    """Adds a row wherever Penstock's figure was measured."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results

    def beside(
        self,
        work: str,
        ours: Figure,
        side: str,
        theirs: Figure,
        least: float | None = None,
        of: str = "",
    ) -> None:
        """At least so many times a peer's rate; without `least` only to compare."""
        mine, other = look_up(self._results, ours), look_up(self._results, theirs, side)
        if mine is None or not (other or least):
            return
        aim, figure = f"≥ {least:g}×" if least else NONE, f"{mine:,.0f}/s"
        if not other:
            self.add(work, figure, aim=aim, peer=f"{SIDES[side]}: not measured")
            return
        peer, ratio = f"{SIDES[side]}{of}: {other:,.0f}/s", mine / other
        reached = ratio >= least if least else None
        self.add(work, figure, reached, aim=aim, peer=peer, ratio=times(ratio))

    def share(
        self,
        work: str,
        aim: str,
        ours: Figure,
        label: str,
        other: Figure,
        least: float = 0.0,
        most: float = float("inf"),
        form: str = "{:,.0f}/s",
    ) -> None:
        """Our figure as a share of another of ours."""
        mine, base = look_up(self._results, ours), look_up(self._results, other)
        if mine is not None and base:
            self.add(
                work,
                form.format(mine),
                least <= mine / base <= most,
                aim=aim,
                peer=f"{label}: {form.format(base).removesuffix(' a job')}",
                ratio=times(mine / base),
            )

    def rate(self, work: str, ours: Figure, least: float) -> None:
        if (mine := look_up(self._results, ours)) is not None:
            self.add(work, f"{mine:,.0f}/s", mine >= least, aim=f"≥ {least:,.0f}/s")

    def cost(self, work: str, ours: Figure, most: float) -> None:
        if (mine := look_up(self._results, ours)) is not None:
            self.add(work, f"{mine:.3g} µs", mine <= most, aim=f"≤ {most:g} µs")


def goals(results: Results) -> Goals:
    judge = _Judge(results)
    beside, share, two = judge.beside, judge.share, ("drain-2", "rate")
    beside("drained, 1 worker process", DRAIN, HUEY_FSYNC, DRAIN, 14)
    beside("drained, 1 worker process", DRAIN, HUEY, DRAIN, 3)
    beside("drained, 1 worker process", DRAIN, PGQUEUER, DRAIN)
    share("drained, 2 worker processes", "> with one", two, "with one", DRAIN, 1 + 1e-9)
    beside("drained, 2 worker processes", two, PGQUEUER, two)
    judge.cost("processor a job, engine", ("drain-1", "engine_us"), 18)
    judge.cost("processor a job, worker", ("drain-1", "worker_us"), 12)
    for how, name, least in (("one by one", "", 6), ("in hundreds", "-bulk", 8)):
        ours = (f"sustained{name}", "rate")
        beside(f"sustained, submitted {how}", ours, HUEY_FSYNC, DRAIN, least, ", drain")
    judge.rate("drained in process", ("drain-in-process", "rate"), 30_000)
    beside("submitted synchronously, engine apart", SUBMIT, HUEY_FSYNC, SUBMIT, 1)
    beside("submitted synchronously, engine apart", SUBMIT, PGQUEUER, SUBMIT)
    running = ("submit-apart", "running_one")
    beside("– while a worker process runs them", running, HUEY_FSYNC, running, 1)
    beside("– embedded, its own jobs running", (EMBEDDED, "own"), HUEY_FSYNC, SUBMIT, 1)
    for name, running_jobs, those in (
        ("short", "10 ms jobs", "those 10 ms jobs"),
        ("noop", "a no-op backlog", "that backlog"),
    ):
        ours, alone = (EMBEDDED, f"{name}_beside"), (EMBEDDED, f"{name}_alone")
        one = (EMBEDDED, f"{name}_one")
        beside(f"– embedded, {running_jobs} running", one, HUEY_FSYNC, SUBMIT, 1)
        share(f"– the rate of {those} meanwhile", "≥ 0.75×", ours, "alone", alone, 0.75)
    bulk = ("submit-async", "bulk")
    judge.rate("submitted, 64 in flight", ("submit-async", "many"), 25_000)
    judge.rate("submitted, 1,000 a call", bulk, 60_000)
    beside("submitted, 1,000 a call", bulk, PGQUEUER, ("submit-apart", "bulk"))
    for work, name, plain in (
        ("mapped over 100,000 items", "map", "submit"),
        ("gathered 100,000 jobs", "gather", "drain"),
    ):
        share(work, "≥ 0.8×", ("children", name), plain, ("children", plain), 0.8)
    _latency(judge, results)
    _http(judge, results)
    _flat(judge, results)
    share(
        "flat: placed among 1,000 workers, 10,000 tenants",
        "≤ 2×",
        ("placement", "many_us"),
        "a tenth",
        ("placement", "few_us"),
        most=2,
        form="{:.1f} µs a job",
    )
    if (percent := look_up(results, ("idle", "cpu_percent"))) is not None:
        work = "idle engine and worker, of a core"
        judge.add(work, f"{percent:.2f}%", percent < 1, aim="< 1%")
    if found := results.get("kill", {}).get(PENSTOCK):
        missing, twice, took = found["missing"], found["applied_twice"], found["all_done_s"]
        said = f"{missing:.0f} lost, {twice:.0f} applied twice, {shown(took, '{:.1f} s')}"
        reached = missing == 0 and twice == 0 and took is not None and took < 15
        judge.add("killed worker", said, reached, aim="0 lost, 0 applied twice")
    return judge


def _latency(judge: Goals, results: Results) -> None:
    work = "p50 latency at 100 jobs/s"
    p50, flush = (look_up(results, ("latency", name)) for name in ("p50_ms", "flush_ms"))
    if p50 is None:
        return
    if flush is not None:
        limit = 3 * flush + 0.7
        peer = f"flush: {flush:.2f} ms; limit: {limit:.2f} ms"
        judge.add(work, f"{p50:.2f} ms", p50 <= limit, aim="≤ 3 flushes + 0.7 ms", peer=peer)
    found = results["latency"].items()
    others = {side: figures["p50_ms"] for side, figures in found if side != PENSTOCK}
    if not others:
        judge.add(work, f"{p50:.2f} ms", aim="the least")
        return
    side = min(others, key=lambda side: others[side])
    ratio, peer = others[side] / p50, f"{SIDES[side]}: {others[side]:.2f} ms"
    judge.add(work, f"{p50:.2f} ms", ratio > 1, aim="the least", peer=peer, ratio=times(ratio))


def _http(judge: Goals, results: Results) -> None:
    ours = look_up(results, ("http-submit", "rate"))
    trivial = [look_up(results, (name, "rate")) for name in ("http-plain", "http-bare")]
    limit = max((rate for rate in trivial if rate is not None), default=None)
    if ours is not None and limit is not None:
        judge.add(
            "HTTP, one job a request",
            f"{ours:,.0f}/s",
            ours / limit >= 0.4,
            aim="≥ 40%",
            peer=f"trivial endpoint: {limit:,.0f}/s",
            ratio=f"{ours / limit:.0%}",
        )


def _flat(judge: Goals, results: Results) -> None:
    """The worst of the larger stores beside the smallest."""
    costs = [
        (int(name.removeprefix("growth-")), cost)
        for name in results
        if name.startswith("growth-") and (cost := look_up(results, (name, "total_us")))
    ]
    if len(costs) < 2:
        return
    (least, first), *larger = costs
    stored, worst = max(larger, key=lambda each: each[1])
    judge.add(
        "flat: processor a job as the store grows",
        f"{worst:.1f} µs at {stored:,}",
        worst / first <= 1.2,
        aim="≤ 1.2×",
        peer=f"{first:.1f} µs at {least:,}",
        ratio=times(worst / first),
    )
