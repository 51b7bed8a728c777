"""The HTTP server of `penstock container serve`, within the engine's own event loop."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec.structs import replace

from penstock.api.about import get_docs, get_openapi
from penstock.api.application import ApiSpec, Authenticate, token_in
from penstock.api.container.artifacts import ArtifactReading
from penstock.api.container.facade import ContainerFacade
from penstock.api.container.jobs import Jobs
from penstock.api.container.logs import LogReading
from penstock.api.container.views import Failure, problem_reply
from penstock.api.container.worker import AboutWorker
from penstock.api.cors import Cors
from penstock.api.openapi import OpenApiInfo, document
from penstock.api.operation import PUBLIC, Operation, routes_of
from penstock.api.options import HttpOptions
from penstock.api.reply import encode
from penstock.api.server import ApiServer
from penstock.core.errors import NotAuthenticated
from penstock.dashboard.pages import page
from penstock.ports.clock import Clock
from penstock.ports.engine_api import OWNER, Session
from penstock.workloads.container.config import WorkerConfig, check_reach

ABOUT = """\
A worker that runs jobs in containers. Where it has a token, everything but `/health` needs it: \
`Authorization: Bearer <token>`. Every answer is JSON, errors too: `error.code` is for programs, \
`error.message` for people. Times are ISO 8601, UTC. Keys may be added to answers at any time."""

INFO = OpenApiInfo(
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
LIMITS = HttpOptions(max_streams_per_key=1500, max_waiting_per_key=4096)
"""Times, sizes and numbers that a client is held to."""
_SESSION = Session(OWNER)


def operations(facade: ContainerFacade, *, public_info: bool = False) -> tuple[Operation, ...]:
    these = (Jobs(facade), LogReading(facade), ArtifactReading(facade), AboutWorker(facade))
    found = (
        *routes_of(*these),
        Operation("GET", "/openapi.json", get_openapi, answer=dict[str, Any]),
        Operation("GET", "/docs", get_docs, answer=str, answer_type="text/html"),
    )
    if not public_info:
        return found
    return tuple(replace(one, role=PUBLIC) if one.path == "/info" else one for one in found)


def http_options(config: WorkerConfig, limits: HttpOptions = LIMITS) -> HttpOptions:
    """Raises Misconfigured for what would be dangerous."""
    check_reach(config)
    max_body = config.max_body_bytes
    options = replace(
        limits,
        host=config.host,
        port=config.port,
        unix_socket=config.socket,
        certfile=config.tls_certificate,
        keyfile=config.tls_key,
        insecure=True,  # the protocol has no TLS; the configuration demands a token instead
        allowed_hosts=(*HttpOptions(host=config.host).own_names, *config.hosts)
        if config.hosts
        else (),
        # A page that has the token gains nothing by a name that points here by a trick.
        checks_hosts=not ("*" in config.cors and config.token),
        max_body=max_body,
        # Files in base64 are a third longer than they are.
        max_upload=max(max_body, config.inputs.max_bytes * 4 // 3 + max_body),
        ignore_unknown=True,
    )
    options.check()
    return options


def api_spec(facade: ContainerFacade, config: WorkerConfig) -> ApiSpec:
    table = operations(facade, public_info=config.public_info)

    @cache
    def openapi() -> bytes:
        return encode(document(table, INFO))

    @cache
    def docs() -> bytes:
        return page(document(table, INFO)).encode()

    cors = Cors.of(config.cors, may_change=bool(config.token))
    return ApiSpec(table, openapi, docs, problem=problem_reply, cors=cors)


def container_server(
    facade: ContainerFacade, config: WorkerConfig, *, clock: Clock, limits: HttpOptions = LIMITS
) -> ApiServer:
    """Not yet started. Raises Misconfigured for what would be dangerous."""
    options = http_options(config, limits)
    return ApiServer(api_spec(facade, config), by_token(config.token), options, clock=clock)


def by_token(token: str) -> Authenticate:
    """Whoever has the token; without one, whoever reaches this machine's own address."""
    expected = token.encode()

    def authenticate(headers: Mapping[bytes, bytes]) -> Session:
        if expected and not hmac.compare_digest(token_in(headers).encode("latin-1"), expected):
            raise NotAuthenticated("this is not the worker's token", hint="look at its settings")
        return _SESSION

    return authenticate
