"""Figures of HTTP as tables, and what was to be reached."""

# The multiplication sign is meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from report import Goals, shown, table
from report import page as paged
from web.reading import LISTINGS

PLAIN = "trivial endpoint, uvicorn as it comes"
BARE = "trivial endpoint, the server as Penstock sets it"
SUBMIT = "submit, durable"
DRAINED = "submit, durable, a worker process draining"
BULK = "bulk over HTTP"
ENGINE = "bulk in process"
READING = "reading"
LOOP = "bare event loop"
EVENTS = "events"

_LEAST_SHARE = 0.4
_LEAST_BULK = 20_000
_NOISE = 1.5
"""What is flat may differ by so much."""
_MOST_TIMES = 2.0


def page(everything: dict[str, Any]) -> str:
    results, plan, goals = everything["results"], everything["plan"], Goals()
    makers = {"requests": _requests, "bulk": _bulk, "reading": _reading, "events": _events}
    parts = [make(results[name], plan, goals) for name, make in makers.items() if name in results]
    return paged(everything, goals, *parts)


def _requests(found: dict[str, Any], plan: dict[str, Any], goals: Goals) -> str:
    limit = max(found[name]["rate"] for name in (PLAIN, BARE))
    share = found[SUBMIT]["rate"] / limit
    aim = "one job a request, durable: 40% of the trivial endpoint's requests/s"
    goals.at_least(aim, share, _LEAST_SHARE, "{:.0%}")
    rows = [
        [
            name,
            f"{f['rate']:,.0f}",
            f"{f['rate'] / limit:.0%}",
            f"{f['p50_ms']:.2f}",
            f"{f['p99_ms']:.2f}",
            f"{f['cpu_us']:.0f}",
        ]
        for name, f in found.items()
    ]
    head = ["64 connections, one job a request", "requests/s", "of the limit"]
    return table([*head, "p50, ms", "p99, ms", "server's processor, µs"], rows)


def _bulk(found: dict[str, Any], plan: dict[str, Any], goals: Goals) -> str:
    ours, engine = found[BULK], found[ENGINE]
    rates, limits = ({n: v for n, v in f.items() if n.endswith(" rate")} for f in (ours, engine))
    best, limit = max(rates.values()), max(limits.values())
    goals.add(
        "in bulk: 20,000 jobs/s accepted, or the engine's own limit",
        f"{best:,.0f} jobs/s, in process {limit:,.0f}",
        best >= min(_LEAST_BULK, limit),
    )
    rows = []
    for figure, rate in rates.items():
        name = figure.removesuffix(" rate")
        # A stream goes to the engine in hundreds; it has no call of its own to compare with.
        own = limits.get(figure)
        rows.append(
            [
                name,
                shown(rate, "{:,.0f}"),
                shown(own, "{:,.0f}"),
                shown(rate / own if own else None, "{:.0%}"),
                shown(ours[f"{name} cpu_us"], "{:.0f}"),
                shown(engine.get(f"{name} cpu_us"), "{:.0f}"),
            ]
        )
    head = ["accepted in bulk, 4 calls at a time", "HTTP, jobs/s", "in process, jobs/s"]
    return table([*head, "share", "HTTP, µs a job", "in process, µs a job"], rows)


def _reading(results: dict[str, Any], plan: dict[str, Any], goals: Goals) -> str:
    found, stores = results[READING], plan["stored"]
    first, last = stores[0], stores[-1]
    end = f" {first} p50_ms"
    names = [name.removesuffix(end) for name in found if name.endswith(end)]

    def growth(name: str, figure: str) -> float:
        ratio: float = found[f"{name} {last} {figure}"] / found[f"{name} {first} {figure}"]
        return ratio

    pages = [name for name in names if name.partition(", deep")[0] in LISTINGS]
    worst, which = max((growth(name, "p99_ms"), name) for name in pages)
    goals.add(
        "the p99 of a page of 50 jobs flat (within 1.5) as the store grows",
        f"at most {worst:.2f} of that with {first:,} ({which})",
        worst <= _NOISE,
    )
    rows = [
        [
            name,
            *(_both(found, f"{name} {stored}") for stored in stores),
            " / ".join(f"{growth(name, figure):.2f}" for figure in ("p50_ms", "p99_ms")),
        ]
        for name in names
    ]
    head = ["p50 / p99 in ms, with so many jobs stored", *(f"{n:,}" for n in stores)]
    return table([*head, "last to first"], rows)


def _both(found: dict[str, float], name: str) -> str:
    return f"{found[f'{name} p50_ms']:.2f} / {found[f'{name} p99_ms']:.2f}"


def _events(found: dict[str, Any], plan: dict[str, Any], goals: Goals) -> str:
    readers: Sequence[int] = plan["readers"]

    def each(side: str, count: int) -> float | None:
        """The cost of a reader is a difference, and lost in noise where there is only one."""
        cost: float = found[side][f"{count} cpu_us"]
        return cost if cost > 0 else None

    def times(count: int) -> float | None:
        """Ours to the bare loop's; None where too little happened to tell."""
        ours, bare = each(EVENTS, count), each(LOOP, count)
        return ours / bare if ours and bare else None

    if (most := times(readers[-1])) is not None:
        aim = "an event to many readers: twice the processor time of a bare loop"
        goals.at_most(aim, most, _MOST_TIMES, f"{{:.1f}}× with {readers[-1]:,} readers")
    rows = [
        [
            f"{count:,} {'reader' if count == 1 else 'readers'}, {rate:.0f} events/s",
            *(shown(each(side, count), "{:.1f}") for side in (EVENTS, LOOP)),
            shown(times(count), "{:.1f}×"),
            _both(found[EVENTS], str(count)),
            _both(found[LOOP], str(count)),
        ]
        for count, rate in zip(readers, plan["rates"], strict=True)
    ]
    head = ["processor an event and reader, µs; delay p50 / p99, ms", "Penstock", "bare loop"]
    return table([*head, "ratio", "Penstock's delay", "bare loop's delay"], rows)
