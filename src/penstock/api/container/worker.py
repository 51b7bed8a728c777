"""The worker itself: what it is, how it is, and whether it takes jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.api.container.facade import ContainerFacade, WorkerHealth, WorkerInfo
from penstock.api.container.views import answer
from penstock.api.operation import PUBLIC, route
from penstock.api.reply import NO_STORE, Reply

if TYPE_CHECKING:
    from penstock.api.call import Call

_PROMETHEUS = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"), NO_STORE)


class HealthQuery(Struct, frozen=True):
    strict: bool = False
    """Answer 503 while the status is not `ok`, for clients that look at the status code only."""


class Drain(Struct, frozen=True):
    draining: bool


class AboutWorker:
    def __init__(self, facade: ContainerFacade) -> None:
        self._facade = facade

    @route("GET /info", answer=WorkerInfo)
    async def get_info(self, call: Call) -> Reply:
        """What this worker is.

        Without the token, where the worker's `public_info` says so.
        """
        return answer(await self._facade.info())

    @route(
        "GET /health",
        role=PUBLIC,
        query=HealthQuery,
        answer=WorkerHealth,
        others={503: WorkerHealth},
        refusals=(400,),
    )
    async def get_health(self, call: Call) -> Reply:
        """How this worker is.

        `status` is `ok`, or `degraded` when no engine answers, the disk is low, or it drains;
        `problems` says why. Answered with 200 either way, unless `strict` asks otherwise.
        """
        strict = call.query(HealthQuery).strict
        health = await self._facade.health()
        status = 503 if strict and health.status != "ok" else 200
        return answer(health, status)

    @route("POST /drain", answer=Drain)
    async def drain(self, call: Call) -> Reply:
        """Take no new jobs.

        Those that are there go on; submissions are answered 503.
        """
        self._facade.drain(True)
        return answer(Drain(True))

    @route("DELETE /drain", answer=Drain)
    async def stop_draining(self, call: Call) -> Reply:
        """Take jobs again."""
        self._facade.drain(False)
        return answer(Drain(False))

    @route("GET /metrics", answer=str, answer_type="text/plain")
    async def metrics(self, call: Call) -> Reply:
        """Metrics for Prometheus.

        Those of the engine: jobs by state, workers, requests.
        """
        services = call.services
        figures = await self._facade.figures(services.traffic, services.streams.count)
        return Reply(figures.text(), headers=_PROMETHEUS)
