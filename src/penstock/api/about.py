"""Health, the API's own description, models split over nodes, and workspaces of spool servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.api.operation import PUBLIC, route
from penstock.api.reply import JSON_HEADERS, Reply, json_reply, page_headers
from penstock.core.errors import NotPermitted, PenstockError
from penstock.dashboard.pages import STYLE_SOURCE
from penstock.lifecycles.spool import Status
from penstock.ports.engine_api import KeyRole
from penstock.workloads.pipes.status import PipesView, status_of
from penstock.workloads.spool.client.flow import Flow

if TYPE_CHECKING:
    from penstock.api.call import Call


class Health(Struct, frozen=True):
    """Public: it contains nothing that needs a key."""

    ready: bool = True
    problems: tuple[str, ...] = ()
    """Why the engine is not ready, a few words each."""


class HealthView(Struct, frozen=True):
    status: str
    """ok or unavailable"""
    problems: tuple[str, ...] = ()


@route("GET /healthz", role=PUBLIC, answer=HealthView)
async def healthz(call: Call) -> Reply:
    """Whether the process lives.

    Answers as soon as the server listens; says nothing about its work.
    """
    return json_reply(HealthView("ok"))


@route("GET /readyz", role=PUBLIC, answer=HealthView, others={503: HealthView})
async def readyz(call: Call) -> Reply:
    """Whether it can take work.

    503 while the engine starts, stops, or can't write.
    """
    health = call.services.health()
    if health.ready:
        return json_reply(HealthView("ok"))
    return json_reply(HealthView("unavailable", health.problems), 503)


PAGE = page_headers(STYLE_SOURCE)


@route("GET /v1/openapi.json", answer=dict[str, Any])
@route(
    "GET /openapi.json",
    name="get_openapi_openly",
    summary="Get this document, without a key",
    role=PUBLIC,
    answer=dict[str, Any],
)
async def get_openapi(call: Call) -> Reply:
    """Get this document.

    OpenAPI 3.1, made from the same table as the server's own routes.
    """
    return Reply(call.services.document(), 200, JSON_HEADERS)


@route("GET /docs", role=PUBLIC, answer=str, answer_type="text/html")
async def get_docs(call: Call) -> Reply:
    """Read this document."""
    return Reply(call.services.page(), 200, PAGE)


@route("GET /v1/pipes", role=KeyRole.OPERATE, answer=PipesView)
async def get_pipes(call: Call) -> Reply:
    """Show models that are split over nodes.

    Which node holds which layers, what each has to do, and whether every layer is held; at most a
    second or two old.
    """
    return json_reply(status_of(await call.api.workers()))


class SpoolView(Struct, frozen=True, kw_only=True):
    """One workspace of a spool server."""

    path: str
    served: bool
    """Whether a server is there that takes queued jobs."""
    counts: dict[Status, int] = {}
    """Jobs by state: how many lie in each folder."""
    problem: str = ""
    """Why it can't be read."""


class SpoolsView(Struct, frozen=True):
    spools: list[SpoolView]


@route("GET /v1/spools", role=KeyRole.OPERATE, all_tenants=True, answer=SpoolsView)
async def get_spools(call: Call) -> Reply:
    """Show workspaces of spool servers.

    Those in the setting `spools`, with the number of jobs in each folder.
    """
    if call.caller.tenant is not None:
        raise NotPermitted("spools are of no tenant", hint="use a key that has no tenant")
    spools = [await asyncio.to_thread(_spool, path) for path in call.services.options.spools]
    return json_reply(SpoolsView(spools))


def _spool(path: Path) -> SpoolView:
    try:
        flow = Flow(path)
        flow.workspace.check()
        return SpoolView(path=str(path), served=flow.is_served(), counts=flow.counts())
    except (PenstockError, OSError) as error:
        return SpoolView(path=str(path), served=False, problem=str(error))
