"""Figures as tables: side by side with ratios, and what was to be reached."""

# The dash and the multiplication sign are meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peers import huey, pgqueuer
from side import HUEY, HUEY_FSYNC, PENSTOCK, PGQUEUER, SIDES

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
    theirs: tuple[str, str] | None = None
    """The peers' experiment and figure, if they are called otherwise."""


_ONE = ("submit-apart", "one")

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
    Row("submitted one after another, synchronous, engine apart, jobs/s", *_ONE),
    Row("– while a worker process runs them", "submit-apart", "running_one"),
    Row("– embedded, its own jobs running", "submit-embedded", "own", theirs=_ONE),
    Row("– embedded, 10 ms jobs running", "submit-embedded", "short_one", theirs=_ONE),
    Row("– embedded, a no-op backlog running", "submit-embedded", "noop_one", theirs=_ONE),
    Row("10 ms jobs run in process, no loop submitting, jobs/s", "submit-embedded", "short_alone"),
    Row("– while the loop submits", "submit-embedded", "short_beside"),
    Row("no-op jobs run in process, no loop submitting, jobs/s", "submit-embedded", "noop_alone"),
    Row("– while the loop submits", "submit-embedded", "noop_beside"),
    Row("submitted one after another, asynchronous, embedded, jobs/s", "submit-async", "one"),
    Row("submitted one by one, 64 in flight, jobs/s", "submit-async", "many"),
    Row("submitted, 1,000 a call, jobs/s", "submit-async", "bulk", theirs=("submit-apart", "bulk")),
    Row("mapped over, 100,000 items, jobs/s", "children", "map"),
    Row("– submitted in the same run, 1,000 a call", "children", "submit"),
    Row("gathered, 100,000 jobs run by 1 worker process, jobs/s", "children", "gather"),
    Row("– drained in the same run", "children", "drain"),
    Row("latency p50 at 100 jobs/s, ms", "latency", "p50_ms", "{:.2f}", True),
    Row("latency p99 at 100 jobs/s, ms", "latency", "p99_ms", "{:.2f}", True),
    Row("– p50 in disk flushes", "latency", "p50_flushes", "{:.1f}"),
    Row("– p99 in disk flushes", "latency", "p99_flushes", "{:.1f}"),
    Row("– p50 of idempotent jobs, ms", "latency-idempotent", "p50_ms", "{:.2f}"),
    Row("– p99 of idempotent jobs, ms", "latency-idempotent", "p99_ms", "{:.2f}"),
    Row("HTTP, one job a request, requests/s", "http-submit", "rate"),
    Row("– p50, ms", "http-submit", "p50_ms", "{:.2f}"),
    Row("– the server's processor a request, µs", "http-submit", "cpu_us"),
    Row("trivial endpoint, the server as Penstock sets it, requests/s", "http-bare", "rate"),
    Row("trivial endpoint, uvicorn with its defaults, requests/s", "http-plain", "rate"),
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
    if {HUEY, HUEY_FSYNC} & {*sides}:
        yield (
            f"Huey's consumer polls every {huey.POLL * 1000:.0f} ms (its default; it waits longer"
            " the longer it has been idle): its latency is mostly that. It has no bulk call."
        )
    if PGQUEUER in sides:
        yield (
            f"PgQueuer: workers dequeue {pgqueuer.BATCH} jobs at a time, through asyncpg; the"
            " server has fsync and synchronous_commit on. Its processor time has the server's."
        )
    if "kill" in results:
        yield (
            "Killed worker: measured once. Penstock's job is marked idempotent, so that it may run"
            " again; a peer's job is not tried again, or later than the measurement lasts."
        )


def _cell(results: Results, row: Row, side: str) -> str:
    experiment, figure = (row.experiment, row.figure)
    if side != PENSTOCK and row.theirs is not None:
        experiment, figure = row.theirs
    value = look_up(results, experiment, side, figure)
    if value is None:
        return NONE
    text = row.format.format(value)
    if side == PENSTOCK or row.experiment == "kill":
        return text
    ours = look_up(results, row.experiment, PENSTOCK, row.figure)
    if not ours or not value:
        return text
    return f"{text} ({times(value / ours if row.less_is_better else ours / value)})"


def times(ratio: float) -> str:
    digits = 3 if ratio < 0.1 else 2 if ratio < 2 else 1 if ratio < 20 else 0
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


# -- goals -------------------------------------------------------------------------------


class Goals:
    """What was to be reached, and whether it is."""

    def __init__(self) -> None:
        self._rows: list[list[str]] = []

    def add(self, aim: str, figure: str, reached: bool) -> None:
        self._rows.append([aim, figure, "reached" if reached else "**missed**"])

    def at_least(self, aim: str, figure: float, least: float, form: str = "{:.2f}x") -> None:
        self.add(aim, form.format(figure), figure >= least)

    def at_most(self, aim: str, figure: float, most: float, form: str = "{:.2f}x") -> None:
        self.add(aim, form.format(figure), figure <= most)

    def table(self) -> str:
        return table(["to reach", "figure", ""], self._rows) if self._rows else ""


def page(everything: dict[str, Any], goals: Goals, *parts: str) -> str:
    """A page: how the figures were made, the goals, its parts, and what is to be noted."""
    notes = [f"- {note}" for note in everything["notes"]]
    return "\n\n".join(filter(None, [*origin(everything), goals.table(), *parts, *notes]))


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
    if {"--quick", "--tiny"} & {*everything["command"].split()}:
        said.append("**A quick run:** few and small measurements; an indication only.")
    return said


BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


def rewritten(text: str, figures: str) -> str:
    """A page with new figures between its marks. Raises ValueError if it has none."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n\n{figures}\n\n{END}{tail}"
