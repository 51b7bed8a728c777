"""The page about sizing says what its simulation does."""

from __future__ import annotations

from tools import sizing


def test_the_tables_of_the_page_are_those_of_the_simulation() -> None:
    text = sizing.PAGE.read_text()
    assert sizing.rewritten(text) == text


def test_the_page_names_the_costs_that_the_simulation_has() -> None:
    text = sizing.PAGE.read_text()
    for where, cost in (
        ("client", sizing.CLIENT),
        ("engine", sizing.ENGINE),
        ("worker", sizing.WORKER),
        ("PostgreSQL, all its processes", sizing.SERVER),
    ):
        assert f"| {where} | {cost * 1e6:.0f} |" in text


def test_an_owner_keeps_up_below_its_capacity_and_not_above() -> None:
    limit = sizing.capacity()
    below, above = sizing.simulate(0.8 * limit), sizing.simulate(1.2 * limit)
    assert below.rate > 0.75 * limit
    assert above.rate < 1.05 * limit
    assert above.p99 > 5 * below.p99
