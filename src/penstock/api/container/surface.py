"""Everything that can be asked of a container worker, in one table."""

from __future__ import annotations

from functools import cache
from typing import Any

from penstock.api.about import get_docs, get_openapi
from penstock.api.application import ApiSpec
from penstock.api.container import artifacts, jobs, logs, submission, worker
from penstock.api.container.answers import Failure, problems
from penstock.api.container.options import ContainerHttpOptions
from penstock.api.container.wording import Wording
from penstock.api.openapi import Telling, document
from penstock.api.operation import Operation
from penstock.api.page import page
from penstock.api.reply import encode
from penstock.workloads.container.store import ContainerApi

ABOUT = """\
A worker that runs jobs in containers. Where it has a token, everything but `/health` needs it: \
`Authorization: Bearer <token>`. Every answer is JSON, those to mistakes too: `error.code` is for \
programs, `error.message` for people. Times are ISO 8601, UTC. Keys may be added to answers at any \
time."""

TELLING = Telling(
    title="Penstock container worker",
    about=ABOUT,
    tags={"jobs": "Jobs"},
    other_tag="The worker",
    key="The worker's token, where it has one.",
    any_key="Needs the token, where there is one.",
    problem=Failure,
    problem_type="application/json",
    refusals=(401,),
    body_refusals=(),
)


def operations(api: ContainerApi, wording: Wording) -> tuple[Operation, ...]:
    return (
        *submission.operations(api, wording),
        *jobs.operations(api, wording),
        *logs.operations(api, wording),
        *artifacts.operations(api),
        *worker.operations(api, wording),
        Operation(
            "GET",
            "/openapi.json",
            get_openapi,
            answer=dict[str, Any],
            summary="Get this document",
            description="OpenAPI 3.1, made from the same table as the server's own routes.",
        ),
        Operation(
            "GET",
            "/docs",
            get_docs,
            answer=str,
            answer_type="text/html",
            summary="Read this document",
        ),
    )


def surface(api: ContainerApi, options: ContainerHttpOptions) -> ApiSpec:
    table = operations(api, Wording(strict=options.compat_strict))

    @cache
    def told() -> bytes:
        return encode(document(table, TELLING))

    @cache
    def read() -> bytes:
        return page(document(table, TELLING)).encode()

    return ApiSpec(
        table,
        told,
        read,
        problem=problems(strict=options.compat_strict),
        cors=options.origins,
    )
