"""What the page says about states: their sentences, legal moves and colours.

All of it is derived from the tables in `penstock.lifecycles`, and sent to the page as JSON and CSS.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec

from penstock.core.machine import StateMachine
from penstock.dashboard.colours import COLOURS, LIKE
from penstock.lifecycles.batch import BATCH
from penstock.lifecycles.canonical import ACTORS, CANONICAL
from penstock.lifecycles.container import CANONICAL_STATES, CONTAINER
from penstock.lifecycles.pipeline import PIPELINE
from penstock.lifecycles.processor import PROCESSOR
from penstock.lifecycles.spool import SPOOL

AnyMachine: TypeAlias = StateMachine[Any, Any]

LIFECYCLES: Mapping[str, AnyMachine] = {
    "canonical": CANONICAL,
    "pipeline": PIPELINE,
    "container": CONTAINER,
    "spool": SPOOL,
    "processor": PROCESSOR,
    "batch": BATCH,
}


def sentences(states: type[StrEnum]) -> dict[StrEnum, str]:
    """Read the string that stands under each member where the states are declared."""
    declared = ast.parse(textwrap.dedent(inspect.getsource(states))).body[0]
    assert isinstance(declared, ast.ClassDef)
    found: dict[StrEnum, str] = {}
    for member, below in pairwise(declared.body):
        match member, below:
            case (
                ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[states[name]] = " ".join(text.split())
    if silent := [state.name for state in states if state not in found]:
        raise ValueError(f"{states.__name__}: no sentence stands under {', '.join(silent)}")
    return found


def vocabulary() -> bytes:
    """The lifecycles as JSON: states with their sentences, legal moves, and who may make them."""
    return msgspec.json.encode(
        {
            "lifecycles": {name: _lifecycle(machine) for name, machine in LIFECYCLES.items()},
            "container": {
                canonical: state for state, all_ in CANONICAL_STATES.items() for canonical in all_
            },
            "actors": {event: sorted(roles) for event, roles in ACTORS.items()},
            "like": {name: state for state, names in LIKE.items() for name in names},
        }
    )


def _lifecycle(machine: AnyMachine) -> dict[str, Any]:
    meaning = sentences(type(machine.initial))
    return {
        "name": machine.name,
        "initial": machine.initial,
        "states": {
            state: {"meaning": meaning[state], "final": machine.is_final(state)}
            for state in machine.states
        },
        "moves": list(machine),
    }


def stylesheet() -> bytes:
    """The colours as CSS: `.state-RUNNING` sets `--state`."""
    return "".join(_rules()).encode()


def _rules() -> Iterator[str]:
    for state, colour in COLOURS.items():
        names = ", ".join(f".state-{name}" for name in (state.value, *LIKE[state]))
        yield f"{names} {{ --state: light-dark({colour.light}, {colour.dark}); }}\n"
