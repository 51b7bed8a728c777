"""Models that are split over nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.api.operation import Operation
from penstock.api.reply import Reply, json_reply
from penstock.ports.engine_api import KeyRole
from penstock.workloads.pipes.status import PipesView, status_of

if TYPE_CHECKING:
    from penstock.api.call import Call


async def get_pipes(call: Call) -> Reply:
    return json_reply(status_of(await call.api.workers()))


OPERATIONS = (
    Operation(
        "GET",
        "/v1/pipes",
        get_pipes,
        role=KeyRole.OPERATE,
        answer=PipesView,
        summary="Show models that are split over nodes",
        description=(
            "Which node holds which layers, what each has to do, and whether every layer is held; "
            "at most a second or two old."
        ),
    ),
)
