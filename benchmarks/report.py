"""Figures as tables: side by side with ratios, and what was to be reached."""

# The dash and the multiplication sign are meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from side import DRAMATIQ, HUEY, HUEY_FSYNC, PENSTOCK, SIDES

Results = dict[str, dict[str, dict[str, float | None]]]
"""Experiment, side, figure."""

NONE = "–"
_QUIET = 10
"""Percent of the cores that others may keep busy."""


@dataclass(frozen=True)
class Row:
    label: str
    experiment: str
    figure: str
    format: str = "{:,.0f}"
    less_is_better: bool = False


ROWS = (
    Row("drained by 1 worker process, jobs/s", "drain-1", "rate"),
    Row("drained by 2 worker processes, jobs/s", "drain-2", "rate"),
    Row("drained in process, jobs/s", "drain-in-process", "rate"),
    Row("drained by 1 worker process, plain `def` in threads, jobs/s", "drain-threads", "rate"),
    Row("drained by 1 worker process, idempotent jobs, jobs/s", "drain-idempotent", "rate"),
    Row("processor a job, 1 worker process, µs", "drain-1", "cpu_us", "{:,.0f}", True),
    Row("– of it the engine, µs", "drain-1", "engine_us"),
    Row("– of it the worker, µs", "drain-1", "worker_us"),
    Row("– idempotent jobs, µs", "drain-idempotent", "cpu_us"),
    Row("sustained, submit to durable end, jobs/s", "sustained", "rate"),
    Row("– processor a job, all processes, µs", "sustained", "cpu_us"),
    Row("sustained, submitted in hundreds, jobs/s", "sustained-bulk", "rate"),
    Row("sustained, idempotent jobs, jobs/s", "sustained-idempotent", "rate"),
    Row("submitted one after another, jobs/s", "submit", "one"),
    Row("submitted one by one, 64 in flight, jobs/s", "submit", "many"),
    Row("submitted in bulk, jobs/s", "submit", "bulk"),
    Row("latency p50 at 100 jobs/s, ms", "latency", "p50_ms", "{:.2f}", True),
    Row("latency p99 at 100 jobs/s, ms", "latency", "p99_ms", "{:.2f}", True),
    Row("– p50 in disk flushes", "latency", "p50_flushes", "{:.1f}"),
    Row("– p99 in disk flushes", "latency", "p99_flushes", "{:.1f}"),
    Row("– p50 of idempotent jobs, ms", "latency-idempotent", "p50_ms", "{:.2f}"),
    Row("– p99 of idempotent jobs, ms", "latency-idempotent", "p99_ms", "{:.2f}"),
    Row("killed worker: jobs missing", "kill", "missing"),
    Row("killed worker: jobs executed twice", "kill", "run_twice"),
    Row("killed worker: results applied twice", "kill", "applied_twice"),
    Row("killed worker: all done after, s", "kill", "all_done_s", "{:.1f}"),
    Row("idle engine and worker, % of a core", "idle", "cpu_percent", "{:.2f}"),
)


def side_by_side(results: Results, sides: Sequence[str]) -> str:
    rows = [
        [row.label, *(_cell(results, row, side) for side in sides)]
        for row in ROWS
        if row.experiment in results
    ]
    return table(["", *(SIDES[side] for side in sides)], rows) if rows else ""


def unlike(results: Results, sides: Sequence[str]) -> Iterable[str]:
    """What differs between the sides, and not because one is better."""
    if len(sides) < 2:
        return
    if "latency" in results and {HUEY, HUEY_FSYNC} & {*sides}:
        yield "Latency: Huey's consumer polls, by default every 100 ms; its latency is mostly that."
    if "kill" in results:
        yield (
            "Killed worker: measured once. Penstock's job is marked idempotent, so that it may run"
            " again; a peer's job is not tried again, or later than the measurement lasts."
        )


def _cell(results: Results, row: Row, side: str) -> str:
    value = look_up(results, row.experiment, side, row.figure)
    if value is None:
        return NONE
    text = row.format.format(value)
    if side == PENSTOCK or row.experiment == "kill":
        return text
    ours = look_up(results, row.experiment, PENSTOCK, row.figure)
    return text if not ours or not value else f"{text} ({_times(ours, value, row)})"


def _times(ours: float, theirs: float, row: Row) -> str:
    ratio = theirs / ours if row.less_is_better else ours / theirs
    digits = 2 if ratio < 1 else 1 if ratio < 20 else 0
    return f"{ratio:.{digits}f}×"


def look_up(results: Results, experiment: str, side: str, figure: str) -> float | None:
    return results.get(experiment, {}).get(side, {}).get(figure)


def growth(costs: Sequence[dict[str, float | None]]) -> str:
    columns: list[tuple[str, str, str]] = [
        ("stored jobs", "stored", "{:,.0f}"),
        ("start, s", "start_s", "{:.2f}"),
        ("submitted in bulk/s", "submit_rate", "{:,.0f}"),
        ("drained/s", "rate", "{:,.0f}"),
        ("processor a job, µs", "total_us", "{:.1f}"),
        ("p50, ms", "p50_ms", "{:.2f}"),
        ("engine's memory, MiB", "rss_mb", "{:.0f}"),
    ]
    rows = [
        [shown(cost.get(name), form) for _, name, form in columns]
        + [shown(_relative(cost, costs[0]), "{:.2f}")]
        for cost in costs
    ]
    return table([*(title for title, _, _ in columns), "processor, relative"], rows)


def memory(figures: dict[str, float | None]) -> str:
    stored, waiting = figures["stored"], figures["waiting"]
    rows = [
        [f"{stored:,.0f} finished", shown(figures["before_mb"], "{:.0f}")],
        [f"and {waiting:,.0f} waiting", shown(figures["filled_mb"], "{:.0f}")],
        ["the same, after a restart", shown(figures["restarted_mb"], "{:.0f}")],
    ]
    return table(["jobs in the store", "engine's memory, MiB"], rows)


def shown(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def _relative(cost: dict[str, float | None], first: dict[str, float | None]) -> float | None:
    ours, base = cost.get("total_us"), first.get("total_us")
    return ours / base if ours and base else None


# -- targets -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Something to reach: what it says of the figures (text, reached), None if unmeasured."""

    aim: str
    judge: Callable[[dict[str, Any]], tuple[str, bool] | None]


def _at_least(times: float, ours: str, peer: str, theirs: str) -> Callable[..., Any]:
    def judge(everything: dict[str, Any]) -> tuple[str, bool] | None:
        results = everything["results"]
        mine = look_up(results, ours, PENSTOCK, "rate")
        other = look_up(results, theirs, peer, "rate")
        if mine is None or other is None:
            return None
        return f"{mine / other:.1f}×", mine >= times * other

    return judge


def _soon(everything: dict[str, Any]) -> tuple[str, bool] | None:
    found = everything["results"].get("latency", {}).get(PENSTOCK)
    if found is None:
        return None
    p50, limit = found["p50_ms"], 4 * found["flush_ms"] + 1
    return f"{p50:.2f} ms of {limit:.2f} ms", p50 < limit


def _sooner(everything: dict[str, Any]) -> tuple[str, bool] | None:
    found = everything["results"].get("latency", {})
    others = [found[side]["p50_ms"] for side in found if side != PENSTOCK]
    if PENSTOCK not in found or not others:
        return None
    p50 = found[PENSTOCK]["p50_ms"]
    return f"{p50:.2f} ms, the soonest peer {min(others):.2f} ms", p50 < min(others)


def _flat(everything: dict[str, Any]) -> tuple[str, bool] | None:
    costs = everything["growth"]
    relatives = [r for cost in costs if (r := _relative(cost, costs[0])) is not None]
    if len(relatives) < 2:
        return None
    worst = max(relatives)
    return f"at most {worst:.2f} of the cost at {costs[0]['stored']:,.0f}", worst <= 1.2


def _idle(everything: dict[str, Any]) -> tuple[str, bool] | None:
    percent = look_up(everything["results"], "idle", PENSTOCK, "cpu_percent")
    return None if percent is None else (f"{percent:.2f}%", percent < 1)


def _unharmed(everything: dict[str, Any]) -> tuple[str, bool] | None:
    found = everything["results"].get("kill", {}).get(PENSTOCK)
    if found is None:
        return None
    missed, twice, took = found["missing"], found["applied_twice"], found["all_done_s"]
    text = f"{missed:.0f} missing, {twice:.0f} applied twice, {shown(took, '{:.1f} s')}"
    return text, missed == 0 and twice == 0 and took is not None and took < 15


TARGETS = (
    Target(
        "drained by one worker process: 10× Huey with fsync",
        _at_least(10, "drain-1", HUEY_FSYNC, "drain-1"),
    ),
    Target(
        "drained by one worker process: 4× Huey without fsync",
        _at_least(4, "drain-1", HUEY, "drain-1"),
    ),
    Target(
        "sustained, submitted one by one: 5× what Huey with fsync drains",
        _at_least(5, "sustained", HUEY_FSYNC, "drain-1"),
    ),
    Target(
        "sustained, submitted in hundreds: 5× what Huey with fsync drains",
        _at_least(5, "sustained-bulk", HUEY_FSYNC, "drain-1"),
    ),
    Target("p50 latency under four disk flushes plus 1 ms", _soon),
    Target("p50 latency below every peer's", _sooner),
    Target("cost of a job flat (within 20%) as the store grows", _flat),
    Target("idle under 1% of a core", _idle),
    Target("a killed worker: none missing, none applied twice, done in seconds", _unharmed),
)


def targets(everything: dict[str, Any], wanted: Sequence[Target] = TARGETS) -> str:
    rows = []
    for target in wanted:
        if (judged := target.judge(everything)) is not None:
            text, reached = judged
            rows.append([target.aim, text, "reached" if reached else "**missed**"])
    return table(["to reach", "figure", ""], rows) if rows else ""


# -- Markdown ----------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that reads well as it stands."""
    lines = [list(head), *map(list, rows)]
    widths = [max(3, *(len(line[n]) for line in lines)) for n in range(len(head))]

    def drawn(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([drawn(lines[0]), drawn(rule), *map(drawn, lines[1:])])


def page(everything: dict[str, Any]) -> str:
    """All of it, as Markdown."""
    sides = [PENSTOCK, *(side for side in (HUEY_FSYNC, HUEY, DRAMATIQ) if _has(everything, side))]
    parts = [
        *origin(everything),
        *(f"Note: {note}." for note in everything["notes"]),
        targets(everything),
        side_by_side(everything["results"], sides),
        *unlike(everything["results"], sides),
    ]
    if everything["growth"]:
        parts.append(growth(everything["growth"]))
    if everything["memory"]:
        parts.append(memory(everything["memory"]))
    return "\n\n".join(part for part in parts if part)


def origin(everything: dict[str, Any]) -> list[str]:
    """How the figures were made, where, and what speaks against them."""
    machine = everything["machine"]
    said = [
        f"Made by `{everything['command']}` on {everything['date']}; later changes are not in these"
        " figures.",
        "\n".join(f"- {name}: {value}" for name, value in machine.items()),
    ]
    busy = re.search(r"kept the cores (\d+)% busy", machine.get("others", ""))
    if busy and int(busy[1]) > _QUIET:
        said.append("**The machine was not quiet:** other processes took part of every figure.")
    if "--quick" in everything["command"]:
        said.append("**A quick run:** few and small measurements; an indication only.")
    return said


def _has(everything: dict[str, Any], side: str) -> bool:
    return any(side in found for found in everything["results"].values())


BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


def rewritten(text: str, figures: str) -> str:
    """A page with new figures between its marks. Raises ValueError if it has none."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n\n{figures}\n\n{END}{tail}"
