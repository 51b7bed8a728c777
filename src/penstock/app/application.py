"""`penstock.App`: functions that are jobs, and the ways to run them."""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack
from urllib.parse import urlsplit

from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.link.desk import RemoteDesk
from penstock.app.client import Client
from penstock.app.container_worker import executor_config
from penstock.app.engine import Engine
from penstock.app.models import model_config
from penstock.app.pipelines import Pipeline, load_pipeline
from penstock.app.pipes import pipe_config
from penstock.app.portal import LoopThread, Portal
from penstock.config import Settings, load
from penstock.core.errors import Misconfigured
from penstock.ports.desk import Desk
from penstock.ports.executor import Executor
from penstock.workloads.function.definition import JobFunction, make_function
from penstock.workloads.function.options import Definition as JobDefinition
from penstock.workloads.pipeline.definition import Definition

if TYPE_CHECKING:
    from penstock.adapters.http.desk import HttpDesk

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class App:
    """A set of functions that can be submitted as jobs."""

    def __init__(self) -> None:
        self.functions: dict[str, JobFunction[..., Any]] = {}
        self.pipelines: dict[str, Definition] = {}
        self._client: Client | None = None

    def job(
        self, topic: str, **definition: Unpack[JobDefinition]
    ) -> Callable[[Callable[..., Any]], JobFunction[..., Any]]:
        """Make the function below a job with this topic.

        `timeout`, `retries`, `retry_on`, `retry_never`, `priority`, `idempotent`, `mode`
        ('async', 'thread' or 'process') and `memory_limit` are its defaults.
        """

        def register(fn: Callable[..., Any]) -> JobFunction[..., Any]:
            if topic in self.functions:
                raise Misconfigured(f"the topic {topic} has a function already")
            made = make_function(fn, topic, lambda: self.client().bound, **definition)
            self.functions[topic] = made
            return made

        return register

    def add(self, *pipelines: Definition) -> None:
        """Serve these pipelines as well."""
        for pipeline in pipelines:
            pipeline.check()
            if pipeline.name in self.pipelines:
                raise Misconfigured(f"the application has a pipeline {pipeline.name} already")
            self.pipelines[pipeline.name] = pipeline
            if isinstance(pipeline, Pipeline):
                pipeline._app = self

    @property
    def is_running(self) -> bool:
        return self._client is not None

    def client(self) -> Client:
        """The client that functions submit through, while there is one."""
        if self._client is None:
            raise Misconfigured(
                "the application is not running, so there is nobody to submit to",
                hint="submit inside 'with app.run():' or 'with app.connect():'",
            )
        return self._client

    def bind(self, client: Client | None) -> Client | None:
        """Let this application's functions submit through `client`; returns the one before."""
        before, self._client = self._client, client
        return before

    def run(
        self, data: str | Path | None = None, *, settings: Settings | None = None, **flags: Any
    ) -> Session:
        """An engine embedded in this process, with a worker for these functions.

        Use it with `with` (it runs in a thread of its own) or `async with` (it runs in your
        event loop). `data` is its folder; other settings can be given by name.
        """
        if settings is None:
            if data is not None:
                flags["data_dir"] = str(data)
            settings = load(flags=flags)
        return _Embedded(self, settings)

    def connect(
        self, address: str | None = None, *, data: str | Path | None = None, token: str = ""
    ) -> Session:
        """A running engine; these functions submit to it."""
        return _Connected(self, address, data, token)


def connect(
    address: str | None = None, *, data: str | Path | None = None, token: str = ""
) -> Session:
    """A running engine: by its address, or by its data folder (the default one if none).

    An address is `unix:/path`, `tcp://127.0.0.1:7077`, or the URL of an HTTP API, as
    `https://jobs.example.org`, which wants a key as its token.
    """
    return _Connected(None, address, data, token)


class Session(ABC):
    """Something to enter with `with` or `async with`; gives a Client."""

    def __init__(self, app: App | None) -> None:
        self._app = app
        self._thread: LoopThread | None = None
        self._before: Client | None = None

    @abstractmethod
    async def _open(self) -> Client: ...

    @abstractmethod
    async def _close(self) -> None: ...

    @property
    def _failure(self) -> BaseException | None:
        """What it ended of, if it ended before it was left."""
        return None

    def __enter__(self) -> Client:
        self._thread = LoopThread("penstock")
        try:
            client = self._thread.run(self._open())
        except BaseException:
            self._thread.close()
            raise
        self._bind(client)
        return client

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        try:
            self._thread.run(self._close())
        finally:
            self._unbind()
            self._thread.close()
        if error is None and (failure := self._failure) is not None:
            raise failure

    async def __aenter__(self) -> Client:
        client = await self._open()
        self._bind(client)
        return client

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._close()
        finally:
            self._unbind()
        if error is None and (failure := self._failure) is not None:
            raise failure

    def _bind(self, client: Client) -> None:
        if self._app is not None:
            self._before = self._app.bind(client)

    def _unbind(self) -> None:
        if self._app is not None:
            self._app.bind(self._before)


class _Embedded(Session):
    def __init__(self, app: App, settings: Settings) -> None:
        super().__init__(app)
        self._settings = settings
        self._functions = app.functions
        self._engine: Engine | None = None

    async def _open(self) -> Client:
        executors = make_executors(self._app, self._settings)
        self._engine = Engine(self._settings, executors)
        portal = Portal(asyncio.get_running_loop())
        self._engine.on_failure = portal.fail
        await self._engine.start()
        return Client(self._engine.desk, portal, time.time, self._functions, self._engine.url)

    async def _close(self) -> None:
        if self._engine is not None:
            await self._engine.stop()

    @property
    def _failure(self) -> BaseException | None:
        return None if self._engine is None else self._engine.failure


class _Connected(Session):
    def __init__(
        self, app: App | None, address: str | None, data: str | Path | None, token: str
    ) -> None:
        super().__init__(app)
        self._address, self._data, self._token = address, data, token
        self._line: Link | HttpDesk | None = None

    async def _open(self) -> Client:
        desk = await (self._by_http() if is_url(self._address) else self._by_link())
        portal = Portal(asyncio.get_running_loop())
        functions = self._app.functions if self._app is not None else {}
        url = self._address if is_url(self._address) else None
        return Client(desk, portal, time.time, functions, url or "")

    async def _by_link(self) -> Desk:
        address, token = engine_address(self._address, self._data, self._token)
        self._line = Link(address, token=token)
        await self._line.connect()
        return RemoteDesk(self._line)

    async def _by_http(self) -> Desk:
        from penstock.adapters.http.desk import HttpDesk

        assert self._address is not None
        token = self._token or _token_at_hand(self._address, self._data)
        if token and self._address.startswith("http://") and not _is_here(self._address):
            log.warning("the key goes to %s unencrypted; use https", urlsplit(self._address).netloc)
        self._line = desk = HttpDesk(self._address, token)
        await desk.connect()
        return desk

    async def _close(self) -> None:
        if self._line is not None:
            await self._line.close()


def is_url(address: str | None) -> bool:
    return address is not None and address.startswith(("http://", "https://"))


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def _token_at_hand(url: str, data: str | Path | None) -> str:
    """The token of the engine on this machine, for that engine only: it goes nowhere else."""
    settings = load(flags={} if data is None else {"data_dir": str(data)})
    if not _is_here(url):
        return ""
    return settings.token_file.read_text().strip() if settings.token_file.is_file() else ""


def engine_address(address: str | None, data: str | Path | None, token: str) -> tuple[Address, str]:
    """Where the engine of a data folder listens, and the token it wants."""
    settings = load(flags={} if data is None else {"data_dir": str(data)})
    where = Address.parse(address) if address else Address(path=settings.socket)
    if where.path is None and not token and settings.token_file.is_file():
        token = settings.token_file.read_text().strip()
    return where, token


def make_executors(app: App | None, settings: Settings) -> list[Executor]:
    """Every executor that is installed, given this application, and the pipelines that the
    settings name."""
    named = [load_pipeline(reference) for reference in settings.pipelines]
    if named:
        app = app or App()
        app.add(*(pipeline for pipeline in named if pipeline.name not in app.pipelines))
    options: Mapping[str, Any] = {
        "kill_grace": settings.kill_grace,
        "max_result": settings.max_result,
        "threads": settings.concurrency,
        "containers": executor_config(settings),
        "models": model_config(settings),
        "pipes": pipe_config(settings),
    }
    return [entry.load()(app, options) for entry in entry_points(group="penstock.executors")]


def load_app(reference: str) -> App:
    """Import `module:name`. Raises Misconfigured, saying what is wrong with it."""
    import importlib
    import sys

    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise Misconfigured(f"{reference!r} is not an application", hint="write module:app")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise Misconfigured(f"can't import {module_name}: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, App):
        apps = [key for key, value in vars(module).items() if isinstance(value, App)]
        near = difflib.get_close_matches(name, apps, 1) or apps[:1]
        hint = f"did you mean {module_name}:{near[0]}?" if near else "it has no penstock.App"
        raise Misconfigured(f"{module_name} has no application {name!r}", hint=hint)
    return found
