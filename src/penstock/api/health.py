"""Whether the engine lives, and whether it can take work. Neither needs a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.api.operation import PUBLIC, Operation
from penstock.api.reply import Reply, json_reply

if TYPE_CHECKING:
    from penstock.api.call import Call


class Health(Struct, frozen=True):
    """Told to anybody who asks, so it says nothing that only some may know."""

    ready: bool = True
    problems: tuple[str, ...] = ()
    """Why it can't take work, in a few words each."""


class HealthView(Struct, frozen=True):
    status: str
    """ok or unavailable"""
    problems: tuple[str, ...] = ()


async def healthz(call: Call) -> Reply:
    return json_reply(HealthView("ok"))


async def readyz(call: Call) -> Reply:
    health = call.services.health()
    if health.ready:
        return json_reply(HealthView("ok"))
    return json_reply(HealthView("unavailable", health.problems), 503)


OPERATIONS = (
    Operation(
        "GET",
        "/healthz",
        healthz,
        role=PUBLIC,
        answer=HealthView,
        summary="Whether the process lives",
        description="Answers as soon as the server listens; says nothing about its work.",
    ),
    Operation(
        "GET",
        "/readyz",
        readyz,
        role=PUBLIC,
        answer=HealthView,
        others={503: HealthView},
        summary="Whether it can take work",
        description="503 while the engine starts, stops, or can't write.",
    ),
)
