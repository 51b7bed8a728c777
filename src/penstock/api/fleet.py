"""Topics, workers and pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.api.operation import Operation
from penstock.api.reply import Reply, json_reply
from penstock.ports.engine_api import KeyRole, PoolView, WorkerView

if TYPE_CHECKING:
    from penstock.api.call import Call


class TopicList(Struct, frozen=True):
    topics: list[str]
    """Some may be globs."""


class WorkerList(Struct, frozen=True):
    workers: list[WorkerView]


class PoolList(Struct, frozen=True):
    pools: list[PoolView]


async def list_topics(call: Call) -> Reply:
    return json_reply(TopicList(await call.api.topics()))


async def list_workers(call: Call) -> Reply:
    return json_reply(WorkerList(await call.api.workers()))


async def list_pools(call: Call) -> Reply:
    return json_reply(PoolList(await call.api.pools()))


async def pause_pool(call: Call) -> Reply:
    return json_reply(await call.api.pause_pool(call.params["name"]))


async def resume_pool(call: Call) -> Reply:
    return json_reply(await call.api.resume_pool(call.params["name"]))


OPERATIONS = (
    Operation(
        "GET",
        "/v1/topics",
        list_topics,
        answer=TopicList,
        summary="List the topics that workers serve",
    ),
    Operation(
        "GET",
        "/v1/workers",
        list_workers,
        role=KeyRole.OPERATE,
        answer=WorkerList,
        summary="List workers",
    ),
    Operation(
        "GET",
        "/v1/pools",
        list_pools,
        role=KeyRole.OPERATE,
        answer=PoolList,
        summary="List pools",
    ),
    Operation(
        "POST",
        "/v1/pools/{name}/pause",
        pause_pool,
        role=KeyRole.OPERATE,
        answer=PoolView,
        refusals=(404,),
        summary="Pause a pool",
        description=(
            "Its workers are given nothing new and finish what they have; `held` tells how far "
            "it is drained. It stays paused over a restart."
        ),
    ),
    Operation(
        "POST",
        "/v1/pools/{name}/resume",
        resume_pool,
        role=KeyRole.OPERATE,
        answer=PoolView,
        refusals=(404,),
        summary="Resume a pool",
    ),
)
