"""The worker itself: what it is, how it is, and whether it takes jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.api.container.answers import answer
from penstock.api.container.wording import HEALTH_KEYS, INFO_KEYS, Wording
from penstock.api.operation import PUBLIC, Operation
from penstock.api.reply import NO_STORE, Reply
from penstock.workloads.container.store import ContainerApi, WorkerHealth, WorkerInfo

if TYPE_CHECKING:
    from penstock.api.call import Call

_PROMETHEUS = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"), NO_STORE)


class HealthQuery(Struct, frozen=True):
    strict: bool = False
    """Answer 503 while the status is not `ok`, for whoever looks at the status code only."""


class Drain(Struct, frozen=True):
    draining: bool


class AboutWorker:
    def __init__(self, api: ContainerApi, wording: Wording) -> None:
        self._api, self._wording = api, wording

    async def get_info(self, call: Call) -> Reply:
        return answer(self._wording.chosen(await self._api.info(), INFO_KEYS))

    async def get_health(self, call: Call) -> Reply:
        strict = call.query(HealthQuery).strict
        health = await self._api.health()
        status = 503 if strict and health.status != "ok" else 200
        return answer(self._wording.chosen(health, HEALTH_KEYS), status)

    async def drain(self, call: Call) -> Reply:
        self._api.drain(True)
        return answer(Drain(True))

    async def stop_draining(self, call: Call) -> Reply:
        self._api.drain(False)
        return answer(Drain(False))

    async def metrics(self, call: Call) -> Reply:
        return Reply(self._api.metrics(), headers=_PROMETHEUS)


def operations(api: ContainerApi, wording: Wording) -> tuple[Operation, ...]:
    these = AboutWorker(api, wording)
    return (
        Operation(
            "GET",
            "/info",
            these.get_info,
            answer=WorkerInfo,
            summary="What this worker is",
        ),
        Operation(
            "GET",
            "/health",
            these.get_health,
            role=PUBLIC,
            query=HealthQuery,
            answer=WorkerHealth,
            others={503: WorkerHealth},
            refusals=(400,),
            summary="How this worker is",
            description=(
                "`status` is `ok`, or `degraded` when no engine answers, the disk is low, or it "
                "drains; `problems` says why. Answered with 200 either way, unless `strict` asks "
                "otherwise."
            ),
        ),
        Operation(
            "POST",
            "/drain",
            these.drain,
            answer=Drain,
            summary="Take no new jobs",
            description="Those that are there go on; submissions are answered 503.",
        ),
        Operation("DELETE", "/drain", these.stop_draining, answer=Drain, summary="Take jobs again"),
        Operation(
            "GET",
            "/metrics",
            these.metrics,
            answer=str,
            answer_type="text/plain",
            summary="Figures for Prometheus",
        ),
    )
