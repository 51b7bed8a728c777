"""The goals of the engine: each judged by the figures of the run, beside a peer's."""

# The multiplication sign is meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from report import NONE, shown, table, times
from side import HUEY, HUEY_FSYNC, PENSTOCK, PGQUEUER, SIDES

Everything = dict[str, Any]
Figure = tuple[str, str]
"""An experiment and the name of its figure."""


class Judged(NamedTuple):
    """What the figures say."""

    ours: str
    peer: str = NONE
    ratio: str = NONE
    reached: bool | None = None
    """None: there is no goal, or the peer was not measured."""


@dataclass(frozen=True)
class Goal:
    work: str
    aim: str
    judge: Callable[[Everything], Judged | None]
    """None if Penstock's figure was not measured."""


def goals_table(everything: Everything) -> str:
    rows, verdicts = [], []
    for goal in GOALS:
        if (judged := goal.judge(everything)) is None:
            continue
        verdicts.append(judged.reached)
        verdict = {True: "reached", False: "**missed**", None: NONE}[judged.reached]
        rows.append([goal.work, judged.ours, judged.peer, judged.ratio, goal.aim, verdict])
    if not rows:
        return ""
    reached, missed = verdicts.count(True), verdicts.count(False)
    head = ["work", "this run", "peer", "ratio", "goal", ""]
    return f"{table(head, rows)}\n\nGoals reached: {reached} of {reached + missed}."


def _figure(everything: Everything, figure: Figure, side: str = PENSTOCK) -> float | None:
    experiment, name = figure
    value: float | None = everything["results"].get(experiment, {}).get(side, {}).get(name)
    return value


def _times(
    work: str, ours: Figure, side: str, theirs: Figure, least: float | None = None, of: str = ""
) -> Goal:
    """At least so many times a peer's rate; without `least` only to compare."""

    def judge(everything: Everything) -> Judged | None:
        mine = _figure(everything, ours)
        if mine is None:
            return None
        other = _figure(everything, theirs, side)
        if not other:
            return Judged(f"{mine:,.0f}/s", f"{SIDES[side]}: not measured") if least else None
        ratio = mine / other
        peer = f"{SIDES[side]}{of}: {other:,.0f}/s"
        return Judged(f"{mine:,.0f}/s", peer, times(ratio), least and ratio >= least)

    return Goal(work, f"≥ {least:g}×" if least else NONE, judge)


def _at_least(work: str, ours: Figure, least: float) -> Goal:
    def judge(everything: Everything) -> Judged | None:
        mine = _figure(everything, ours)
        return None if mine is None else Judged(f"{mine:,.0f}/s", reached=mine >= least)

    return Goal(work, f"≥ {least:,.0f}/s", judge)


def _at_most(work: str, ours: Figure, most: float, unit: str) -> Goal:
    def judge(everything: Everything) -> Judged | None:
        mine = _figure(everything, ours)
        return None if mine is None else Judged(f"{mine:.3g} {unit}", reached=mine <= most)

    return Goal(work, f"≤ {most:g} {unit}", judge)


def _kept(work: str, name: str) -> Goal:
    """The rate of running jobs beside a loop that submits, as a share of their rate alone."""

    def judge(everything: Everything) -> Judged | None:
        alone = _figure(everything, ("submit-embedded", f"{name}_alone"))
        beside = _figure(everything, ("submit-embedded", f"{name}_beside"))
        if not alone or beside is None:
            return None
        kept = beside / alone
        return Judged(f"{beside:,.0f}/s", f"alone: {alone:,.0f}/s", times(kept), kept >= 0.75)

    return Goal(work, "≥ 0.75×", judge)


def _share(work: str, name: str, plain: str) -> Goal:
    """The rate of jobs that are handled together, as a share of that of as many plain ones."""

    def judge(everything: Everything) -> Judged | None:
        ours = _figure(everything, ("children", name))
        other = _figure(everything, ("children", plain))
        if ours is None or not other:
            return None
        share = ours / other
        return Judged(f"{ours:,.0f}/s", f"{plain}: {other:,.0f}/s", times(share), share >= 0.8)

    return Goal(work, "≥ 0.8×", judge)


def _two_workers(everything: Everything) -> Judged | None:
    one = _figure(everything, ("drain-1", "rate"))
    two = _figure(everything, ("drain-2", "rate"))
    if one is None or two is None:
        return None
    return Judged(f"{two:,.0f}/s", f"with one: {one:,.0f}/s", times(two / one), two > one)


def _latency(everything: Everything) -> Judged | None:
    p50 = _figure(everything, ("latency", "p50_ms"))
    flush = _figure(everything, ("latency", "flush_ms"))
    if p50 is None or flush is None:
        return None
    limit = 3 * flush + 0.7
    return Judged(
        f"{p50:.2f} ms", f"flush: {flush:.2f} ms; limit: {limit:.2f} ms", reached=p50 <= limit
    )


def _sooner(everything: Everything) -> Judged | None:
    p50 = _figure(everything, ("latency", "p50_ms"))
    if p50 is None:
        return None
    others = {
        side: found["p50_ms"]
        for side, found in everything["results"]["latency"].items()
        if side != PENSTOCK
    }
    if not others:
        return Judged(f"{p50:.2f} ms")
    side = min(others, key=lambda side: others[side])
    ratio = others[side] / p50
    return Judged(f"{p50:.2f} ms", f"{SIDES[side]}: {others[side]:.2f} ms", times(ratio), ratio > 1)


def _http_share(everything: Everything) -> Judged | None:
    ours = _figure(everything, ("http-submit", "rate"))
    trivial = [_figure(everything, (name, "rate")) for name in ("http-plain", "http-bare")]
    limit = max((rate for rate in trivial if rate is not None), default=None)
    if ours is None or limit is None:
        return None
    share = ours / limit
    return Judged(
        f"{ours:,.0f}/s", f"trivial endpoint: {limit:,.0f}/s", f"{share:.0%}", share >= 0.4
    )


def _flat(everything: Everything) -> Judged | None:
    costs = [cost for cost in everything["growth"] if cost.get("total_us")]
    if len(costs) < 2:
        return None
    first = costs[0]["total_us"]
    worst = max(costs[1:], key=lambda cost: cost["total_us"])
    ratio = worst["total_us"] / first
    ours = f"{worst['total_us']:.1f} µs at {worst['stored']:,.0f}"
    peer = f"{first:.1f} µs at {costs[0]['stored']:,.0f}"
    return Judged(ours, peer, times(ratio), ratio <= 1.2)


def _placement(everything: Everything) -> Judged | None:
    few, many = (_figure(everything, ("placement", name)) for name in ("few_us", "many_us"))
    if not few or many is None:
        return None
    ratio = many / few
    return Judged(f"{many:.1f} µs a job", f"a tenth: {few:.1f} µs", times(ratio), ratio <= 2)


def _idle(everything: Everything) -> Judged | None:
    percent = _figure(everything, ("idle", "cpu_percent"))
    return None if percent is None else Judged(f"{percent:.2f}%", reached=percent < 1)


def _killed(everything: Everything) -> Judged | None:
    found = everything["results"].get("kill", {}).get(PENSTOCK)
    if found is None:
        return None
    missing, twice, took = found["missing"], found["applied_twice"], found["all_done_s"]
    text = f"{missing:.0f} lost, {twice:.0f} applied twice, {shown(took, '{:.1f} s')}"
    return Judged(text, reached=missing == 0 and twice == 0 and took is not None and took < 15)


_DRAIN, _SUBMIT = ("drain-1", "rate"), ("submit-apart", "one")
_EMBEDDED = "submit-embedded"

GOALS = (
    _times("drained, 1 worker process", _DRAIN, HUEY_FSYNC, _DRAIN, 14),
    _times("drained, 1 worker process", _DRAIN, HUEY, _DRAIN, 3),
    _times("drained, 1 worker process", _DRAIN, PGQUEUER, _DRAIN),
    Goal("drained, 2 worker processes", "> with one", _two_workers),
    _times("drained, 2 worker processes", ("drain-2", "rate"), PGQUEUER, ("drain-2", "rate")),
    _at_most("processor a job, engine", ("drain-1", "engine_us"), 18, "µs"),
    _at_most("processor a job, worker", ("drain-1", "worker_us"), 12, "µs"),
    _times(
        "sustained, submitted one by one", ("sustained", "rate"), HUEY_FSYNC, _DRAIN, 6, ", drain"
    ),
    _times(
        "sustained, submitted in hundreds",
        ("sustained-bulk", "rate"),
        HUEY_FSYNC,
        _DRAIN,
        8,
        ", drain",
    ),
    _at_least("drained in process", ("drain-in-process", "rate"), 30_000),
    _times("submitted synchronously, engine apart", _SUBMIT, HUEY_FSYNC, _SUBMIT, 1),
    _times("submitted synchronously, engine apart", _SUBMIT, PGQUEUER, _SUBMIT),
    _times(
        "– while a worker process runs them",
        ("submit-apart", "running_one"),
        HUEY_FSYNC,
        ("submit-apart", "running_one"),
        1,
    ),
    _times("– embedded, its own jobs running", (_EMBEDDED, "own"), HUEY_FSYNC, _SUBMIT, 1),
    _times("– embedded, 10 ms jobs running", (_EMBEDDED, "short_one"), HUEY_FSYNC, _SUBMIT, 1),
    _kept("– the rate of those 10 ms jobs meanwhile", "short"),
    _times("– embedded, a no-op backlog running", (_EMBEDDED, "noop_one"), HUEY_FSYNC, _SUBMIT, 1),
    _kept("– the rate of that backlog meanwhile", "noop"),
    _at_least("submitted, 64 in flight", ("submit-async", "many"), 25_000),
    _at_least("submitted, 1,000 a call", ("submit-async", "bulk"), 60_000),
    _times("submitted, 1,000 a call", ("submit-async", "bulk"), PGQUEUER, ("submit-apart", "bulk")),
    _share("mapped over 100,000 items", "map", "submit"),
    _share("gathered 100,000 jobs", "gather", "drain"),
    Goal("p50 latency at 100 jobs/s", "≤ 3 flushes + 0.7 ms", _latency),
    Goal("p50 latency at 100 jobs/s", "the least", _sooner),
    Goal("HTTP, one job a request", "≥ 40%", _http_share),
    Goal("flat: processor a job as the store grows", "≤ 1.2×", _flat),
    Goal("flat: placed among 1,000 workers, 10,000 tenants", "≤ 2×", _placement),
    Goal("idle engine and worker, of a core", "< 1%", _idle),
    Goal("killed worker", "0 lost, 0 applied twice", _killed),
)
