"""For tests: of applications, and of executors, stores and buses that others write.

The names here are for applications; docs/how-to/testing.md shows them. The modules hold the
conformance suites, which plug-in authors and Penstock's own tests run, and what these need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.testing.context import RecordingContext, arun, run
    from penstock.testing.in_memory import InMemoryEngine

_HOMES = {
    "InMemoryEngine": "penstock.testing.in_memory",
    "RecordingContext": "penstock.testing.context",
    "arun": "penstock.testing.context",
    "run": "penstock.testing.context",
}
"""Imported when they are first asked for: pytest loads this package in every run."""

__all__ = ["InMemoryEngine", "RecordingContext", "arun", "run"]


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'penstock.testing' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(home), name)
        globals()[name] = value
        return value
