"""Figures of HTTP as tables, and what was to be reached."""

# The multiplication sign is meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

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
    goals = Goals()
    for aim, judge in GOALS.items():
        if (judged := judge(everything)) is not None:
            goals.add(aim, *judged)
    return paged(
        everything, goals, *(make(everything) for make in (_requests, _bulk, _reading, _events))
    )


# -- one by one -----------------------------------------------------------------------------


def _requests(everything: dict[str, Any]) -> str:
    results = everything["results"]
    limit = _limit(results)
    if limit is None:
        return ""
    rows = []
    for name in (PLAIN, BARE, SUBMIT, DRAINED):
        found = results[name]
        rows.append(
            [
                name,
                shown(found["rate"], "{:,.0f}"),
                shown(found["rate"] / limit, "{:.0%}"),
                shown(found["p50_ms"], "{:.2f}"),
                shown(found["p99_ms"], "{:.2f}"),
                shown(found["cpu_us"], "{:.0f}"),
            ]
        )
    head = ["64 connections, one job a request", "requests/s", "of the limit"]
    return table([*head, "p50, ms", "p99, ms", "server's processor, µs"], rows)


def _limit(results: dict[str, Any]) -> float | None:
    rates: list[float] = [results[name]["rate"] for name in (PLAIN, BARE) if name in results]
    return max(rates, default=None)


def _share(everything: dict[str, Any]) -> tuple[str, bool] | None:
    results = everything["results"]
    limit = _limit(results)
    if limit is None:
        return None
    share = results[SUBMIT]["rate"] / limit
    return f"{share:.0%}", share >= _LEAST_SHARE


# -- in bulk --------------------------------------------------------------------------------


def _bulk(everything: dict[str, Any]) -> str:
    results = everything["results"]
    if BULK not in results:
        return ""
    ours, engine = results[BULK], results[ENGINE]
    rows = []
    for name in _kinds(ours):
        # A stream goes to the engine in hundreds; it has no call of its own to compare with.
        rate, limit = ours[f"{name} rate"], engine.get(f"{name} rate")
        rows.append(
            [
                name,
                shown(rate, "{:,.0f}"),
                shown(limit, "{:,.0f}"),
                shown(rate / limit if limit else None, "{:.0%}"),
                shown(ours[f"{name} cpu_us"], "{:.0f}"),
                shown(engine.get(f"{name} cpu_us"), "{:.0f}"),
            ]
        )
    head = ["accepted in bulk, 4 calls at a time", "HTTP, jobs/s", "in process, jobs/s"]
    return table([*head, "share", "HTTP, µs a job", "in process, µs a job"], rows)


def _kinds(figures: dict[str, float]) -> list[str]:
    return [name.removesuffix(" rate") for name in figures if name.endswith(" rate")]


def _bulky(everything: dict[str, Any]) -> tuple[str, bool] | None:
    results = everything["results"]
    if BULK not in results:
        return None
    best = max(results[BULK][f"{name} rate"] for name in _kinds(results[BULK]))
    limit = max(results[ENGINE][f"{name} rate"] for name in _kinds(results[ENGINE]))
    return f"{best:,.0f} jobs/s, in process {limit:,.0f}", best >= min(_LEAST_BULK, limit)


# -- reading --------------------------------------------------------------------------------


def _reading(everything: dict[str, Any]) -> str:
    found = everything["results"].get(READING)
    if found is None:
        return ""
    stores = everything["plan"]["stored"]
    rows = []
    for name in _asked(found, stores[0]):
        cells = [_both(found, f"{name} {stored}") for stored in stores]
        grown = [f"{_growth(found, name, stores, p):.2f}" for p in ("p50_ms", "p99_ms")]
        rows.append([name, *cells, " / ".join(grown)])
    head = ["p50 / p99 in ms, with so many jobs stored", *(f"{n:,}" for n in stores)]
    return table([*head, "last to first"], rows)


def _both(found: dict[str, float], name: str) -> str:
    return f"{found[f'{name} p50_ms']:.2f} / {found[f'{name} p99_ms']:.2f}"


def _asked(found: dict[str, float], first: int) -> list[str]:
    end = f" {first} p50_ms"
    return [name.removesuffix(end) for name in found if name.endswith(end)]


def _growth(found: dict[str, float], name: str, stores: tuple[int, ...], figure: str) -> float:
    return found[f"{name} {stores[-1]} {figure}"] / found[f"{name} {stores[0]} {figure}"]


def _flat(everything: dict[str, Any]) -> tuple[str, bool] | None:
    found, stores = everything["results"].get(READING), everything["plan"]["stored"]
    if found is None:
        return None
    pages = [name for name in _asked(found, stores[0]) if name.partition(", deep")[0] in LISTINGS]
    worst, name = max((_growth(found, name, stores, "p99_ms"), name) for name in pages)
    return f"at most {worst:.2f} of that with {stores[0]:,} ({name})", worst <= _NOISE


# -- events ---------------------------------------------------------------------------------


def _events(everything: dict[str, Any]) -> str:
    results, plan = everything["results"], everything["plan"]
    if EVENTS not in results:
        return ""
    ours, bare = results[EVENTS], results[LOOP]
    rows = [
        [
            f"{count:,} {'reader' if count == 1 else 'readers'}, {rate:.0f} events/s",
            *(shown(_each(results, side, count), "{:.1f}") for side in (EVENTS, LOOP)),
            shown(_times(results, count), "{:.1f}×"),
            _both(ours, str(count)),
            _both(bare, str(count)),
        ]
        for count, rate in zip(plan["readers"], plan["rates"], strict=True)
    ]
    head = ["processor an event and reader, µs; delay p50 / p99, ms", "Penstock", "bare loop"]
    return table([*head, "ratio", "Penstock's delay", "bare loop's delay"], rows)


def _told(everything: dict[str, Any]) -> tuple[str, bool] | None:
    results, most = everything["results"], everything["plan"]["readers"][-1]
    if EVENTS not in results:
        return None
    if (times := _times(results, most)) is None:
        return None
    return f"{times:.1f}× with {most:,} readers", times <= _MOST_TIMES


def _times(results: dict[str, Any], readers: int) -> float | None:
    """Ours to the bare loop's; None where too little happened to tell."""
    ours, bare = _each(results, EVENTS, readers), _each(results, LOOP, readers)
    return ours / bare if ours and bare else None


def _each(results: dict[str, Any], side: str, readers: int) -> float | None:
    """The cost of a reader is a difference, and lost in noise where there is only one."""
    found: float = results[side][f"{readers} cpu_us"]
    return found if found > 0 else None


GOALS = {
    "one job a request, durable: 40% of the trivial endpoint's requests/s": _share,
    "in bulk: 20,000 jobs/s accepted, or the engine's own limit": _bulky,
    "the p99 of a page of 50 jobs flat (within 1.5) as the store grows": _flat,
    "an event to many readers: twice the processor time of a bare loop": _told,
}
