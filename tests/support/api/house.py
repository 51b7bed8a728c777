"""An engine with its HTTP API, and clients of it: careful ones and careless ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from tests.support.api.tiny import a_tiny_pipeline
from yarl import URL

from penstock import App, current
from penstock.api.about import Health
from penstock.api.options import HttpOptions
from penstock.api.server import HttpServer
from penstock.app.application import make_executors
from penstock.app.engine import Engine
from penstock.config import Settings, load
from penstock.control.engine_api import EngineAuthenticator
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import KeyRole
from penstock.ports.store import JobQuery

RULES = """
default = "allow"

[[rules]]
id = "ask"
decision = "require_approval"
topics = ["job.text.risky"]
approval = { needed = 1, expires = "1h" }

[[rules]]
id = "ask-soon"
decision = "require_approval"
topics = ["job.text.hasty"]
approval = { needed = 1, expires = "1s" }

[[rules]]
id = "never"
decision = "deny"
topics = ["job.text.forbidden"]
reason = "it is forbidden"
"""


class Answer(msgspec.Struct):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class House:
    """One engine, one server, one session."""

    def __init__(self, engine: Engine, server: HttpServer, token: str) -> None:
        self.engine, self.server, self.token = engine, server, token
        self.url = ""
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def __aenter__(self) -> Self:
        self.url = await self.server.start()
        self.session = aiohttp.ClientSession(
            auto_decompress=False, headers={"Accept-Encoding": "identity"}
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for writer in self._writers:
            writer.close()
        await self.session.close()
        await self.server.close()
        await self.engine.api.cancel_many(JobQuery())  # or its worker would finish it first

    async def key(self, name: str, *roles: KeyRole, tenant: str | None = None) -> str:
        made = await self.engine.api.keys.create(name, roles, tenant=tenant)
        return made.token

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        data: Any = None,
    ) -> Answer:
        """`body` is sent as JSON, `data` as it is."""
        given = dict(headers or {})
        token = self.token if token is None else token
        if token:
            given.setdefault("Authorization", f"Bearer {token}")
        if body is not None:
            data = json.dumps(body).encode()
            given.setdefault("Content-Type", "application/json")
        url = URL(self.url + path, encoded=True)
        async with self.session.request(method, url, data=data, headers=given) as response:
            return Answer(response.status, response.headers, await response.read())

    async def submit(self, topic: str = "job.text.shout", **fields: Any) -> dict[str, Any]:
        token = fields.pop("token", None)
        fields.setdefault("input", {"text": "hi"})
        answer = await self.call("POST", "/v1/jobs", {"topic": topic, **fields}, token=token)
        assert answer.status in (200, 201), answer
        found: dict[str, Any] = answer.json
        return found

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that is closed at the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    async def raw(self, data: bytes, *, wait: float = 10.0) -> bytes:
        """Send bytes on a connection of their own; everything until the other end closes."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            return await asyncio.wait_for(reader.read(-1), wait)
        finally:
            writer.close()

    def head(self, method: str, path: str, *headers: str, token: str | None = None) -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: 127.0.0.1:{self.port}",
            f"Authorization: Bearer {self.token if token is None else token}",
            *headers,
        ]
        return "\r\n".join([*lines, "", ""]).encode()


def an_app() -> App:
    app = App()

    @app.job("job.text.shout")
    async def shout(text: str = "") -> str:
        return text.upper()

    @app.job("job.text.fail")
    async def fail(text: str = "") -> None:
        raise ValueError("no")

    @app.job("job.text.risky")
    async def risky(text: str = "") -> str:
        return text

    @app.job("job.text.hasty")
    async def hasty(text: str = "") -> str:
        return text

    @app.job("job.text.forbidden")
    async def forbidden(text: str = "") -> str:
        return text

    @app.job("job.text.slow")
    async def slow(text: str = "") -> str:
        await asyncio.sleep(3600)
        return text

    @app.job("job.text.talk")
    async def talk(lines: int = 3, pause: float = 0.0) -> None:
        ctx = current()
        for n in range(lines):
            ctx.log(f"line {n + 1}")
        ctx.progress(0.5, "half of it")
        await asyncio.sleep(pause)

    @app.job("job.text.large")
    async def large(size: int = 100_000) -> str:
        return "x" * size

    app.add(a_tiny_pipeline(), a_tiny_pipeline("many", single_flight=False))
    return app


def prepared(folder: Path) -> Settings:
    folder.mkdir(exist_ok=True)
    rules = folder / "rules.toml"
    rules.write_text(RULES)
    flags = {"data_dir": str(folder / "data"), "durability": "memory", "rules": str(rules)}
    return load(flags=flags)


@asynccontextmanager
async def house(
    folder: Path, *, health: Callable[[], Health] = Health, **options: Any
) -> AsyncIterator[House]:
    settings = prepared(folder)
    async with Engine(settings, make_executors(an_app(), settings), listen=False) as engine:
        door = EngineAuthenticator(engine.parts.keys, engine.api)
        http = HttpOptions(**{"port": 0, "grace": 0.5, **options})
        server = HttpServer(door, http, clock=SystemClock(), health=health)
        async with House(engine, server, settings.token_file.read_text()) as one:
            yield one
