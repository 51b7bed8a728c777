"""Many rows in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def every(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but one test that goes through all rows.

    For rows that only differ in a value. They share the test's fixtures, and the first row that
    fails is named.
    """
    fields = [name.strip() for name in names.split(",")]
    tried = [_values(row, len(fields)) for row in rows]
    assert tried, f"no rows of {names}"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def over_rows(**fixtures: Any) -> None:
            for values in tried:
                given = dict(zip(fields, values, strict=True))
                try:
                    test(**fixtures, **given)
                except BaseException as failure:
                    failure.add_note(f"in the row {given!r}")
                    raise

        signature = inspect.signature(test)
        kept = [one for name, one in signature.parameters.items() if name not in fields]
        over_rows.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return over_rows

    return decorate


def _values(row: Any, count: int) -> tuple[Any, ...]:
    values = getattr(row, "values", None)  # of pytest.param
    if isinstance(values, tuple):
        return values
    return (row,) if count == 1 else tuple(row)
