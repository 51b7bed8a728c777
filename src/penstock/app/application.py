"""`penstock.App`: functions that are jobs, and the ways to run them."""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload
from urllib.parse import urlsplit
from weakref import WeakSet

from penstock.adapters.link.address import Address
from penstock.adapters.link.blocking import LinkPool
from penstock.adapters.link.client import Link
from penstock.adapters.link.proxy import remote_api
from penstock.adapters.sqlite.database import WriterLock
from penstock.app.client import Client
from penstock.app.engine import Engine, make_private
from penstock.app.pipelines import Pipeline
from penstock.app.portal import LoopThread, Portal, at_exit, not_at_exit
from penstock.app.remote import client_security
from penstock.config import Settings, load
from penstock.config.options import SettingOptions
from penstock.core.errors import (
    AlreadyRunning,
    Misconfigured,
    NotRunning,
    Unavailable,
    did_you_mean,
)
from penstock.ports.engine_api import EngineApi
from penstock.ports.executor import Context, Executor
from penstock.ports.store import Durability
from penstock.workloads.container.config import executor_config
from penstock.workloads.function.definition import JobFunction, make_function
from penstock.workloads.function.options import JobOptions
from penstock.workloads.llm.config import model_config
from penstock.workloads.pipeline.definition import Definition, load_pipeline
from penstock.workloads.pipes.setup import pipe_config

if TYPE_CHECKING:
    from penstock.adapters.http.engine_api import HttpEngineApi
    from penstock.app.worker_process import Membership

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_JOIN_TIMEOUT = 15.0
"""Seconds that a start waits for an engine that another process starts or ends."""
_JOIN_PAUSE = 0.05
_APPS: WeakSet[App] = WeakSet()
_SHOWN_AFTER = 0.5
"""Seconds that closing takes after an error before the error is logged."""


class App:
    """A set of functions that can be submitted as jobs."""

    def __init__(self) -> None:
        self.functions: dict[str, JobFunction[..., Any]] = {}
        self.pipelines: dict[str, Definition] = {}
        self._client: Client | None = None
        self._started: _Embedded | None = None
        """What `start` has started and `close` closes."""
        self._starting = threading.Lock()
        _APPS.add(self)

    @overload
    def job(
        self, topic: str, *, ctx: Literal[True], **definition: Unpack[JobOptions]
    ) -> Callable[[Callable[Concatenate[Context, P], R]], JobFunction[P, R]]: ...
    @overload
    def job(
        self, topic: str, **definition: Unpack[JobOptions]
    ) -> Callable[[Callable[P, R]], JobFunction[P, R]]: ...
    def job(
        self, topic: str, *, ctx: bool = False, **definition: Unpack[JobOptions]
    ) -> Callable[[Callable[..., Any]], JobFunction[..., Any]]:
        """Make the function below a job with this topic.

        `timeout`, `retries`, `retry_on`, `retry_never`, `priority`, `idempotent`, `mode`
        ('async', 'thread' or 'process') and `memory_limit` are its defaults. `ctx`: the first
        parameter is its Context, which callers don't give.
        """

        def register(fn: Callable[..., Any]) -> JobFunction[..., Any]:
            if topic in self.functions:
                raise Misconfigured(f"the topic {topic} has a function already")
            made = make_function(fn, topic, self.client, ctx=ctx, **definition)
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
                "the application is not running, so a job can't be submitted",
                hint="call app.start(), or submit inside 'with app.run():' or"
                " 'with app.connect():'",
            )
        started = self._started
        if started is not None and not started.is_here:  # a fork's parent has it
            return self.start(settings=started.settings, share=started.share)
        return self._client

    def bind(self, client: Client | None) -> Client | None:
        """Let this application's functions submit through `client`; returns the one before."""
        before, self._client = self._client, client
        return before

    def run(
        self,
        data: str | Path | None = None,
        *,
        settings: Settings | None = None,
        share: bool = True,
        **flags: Unpack[SettingOptions],
    ) -> Session:
        """An engine embedded in this process, with a worker for these functions.

        Use it with `with` (it runs in a thread of its own) or `async with` (it runs in your
        event loop). `data` is its folder; other settings can be given by name.

        If another process has the engine of this folder, this one joins it: its functions are
        submitted to that engine and run here as well, and if that process ends, one of those that
        joined takes the engine over. With `share=False` it raises AlreadyRunning instead.
        """
        return _Embedded(self, settings or load(flags={**flags, **_folder(data)}), share)

    def start(
        self,
        data: str | Path | None = None,
        *,
        settings: Settings | None = None,
        share: bool = True,
        **flags: Unpack[SettingOptions],
    ) -> Client:
        """Run as `run` does, in a thread, until `close` or the end of the process.

        If it was started already, that client is returned; other settings are refused then.
        After a fork it starts anew.
        """
        session = self.run(data, settings=settings, share=share, **flags)
        assert isinstance(session, _Embedded)
        with self._starting:
            running = self._started
            if running is not None and running.is_here:
                is_plain = data is None and settings is None and not flags
                if not is_plain and session.settings != running.settings:
                    raise Misconfigured(
                        f"the application runs already, on {running.settings.data_dir}, with"
                        " other settings",
                        hint="call app.close() first",
                    )
                assert running.client is not None
                return running.client
            client = session.__enter__()
            self._started = session
            at_exit(self.close)
        return client

    def close(self) -> None:
        """End what `start` started, as the end of `with app.run():` does. If nothing was started,
        or another process did, nothing happens."""
        with self._starting:
            session, self._started = self._started, None
            if session is not None:
                not_at_exit(self.close)
                session.__exit__(None, None, None)

    async def astart(
        self,
        data: str | Path | None = None,
        *,
        settings: Settings | None = None,
        share: bool = True,
        **flags: Unpack[SettingOptions],
    ) -> Client:
        """`start`, for a running event loop; the engine still runs in a thread of its own."""
        return await asyncio.to_thread(self.start, data, settings=settings, share=share, **flags)

    async def aclose(self) -> None:
        """`close`, for a running event loop."""
        await asyncio.to_thread(self.close)

    def connect(
        self,
        address: str | None = None,
        *,
        data: str | Path | None = None,
        token: str = "",
        reconnect_timeout: float | None = None,
    ) -> Session:
        """A running engine; these functions submit to it. See `penstock.connect`."""
        return _Connected(self, address, data, token, reconnect_timeout)


def connect(
    address: str | None = None,
    *,
    data: str | Path | None = None,
    token: str = "",
    reconnect_timeout: float | None = None,
) -> Session:
    """A running engine: by its address, or by its data folder (the default one if none).

    An address is `unix:/path`, `tcp://127.0.0.1:7077`, or the URL of an HTTP API, as
    `https://jobs.example.org`, which wants a key as its token.

    The first connection must succeed at once. One that is lost later is made again: a call
    waits for the engine up to its own timeout, else up to `reconnect_timeout` seconds (None: the
    setting of that name; `math.inf`: for ever), and then raises EngineUnavailable. A wait without
    a timeout goes on waiting.
    """
    return _Connected(None, address, data, token, reconnect_timeout)


def _renew_locks() -> None:
    for app in _APPS:
        app._starting = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_locks)


class Session(ABC):
    """Something to enter with `with` or `async with`; gives a Client."""

    def __init__(self, app: App | None) -> None:
        self._app = app
        self._thread: LoopThread | None = None
        self._before: Client | None = None
        self.client: Client | None = None
        """What the application's functions submit through, while it is entered."""
        self._pid = 0
        """The process that entered it."""

    @property
    def is_here(self) -> bool:
        """Whether it was entered in this process, and not before a fork."""
        return self._pid == os.getpid()

    @abstractmethod
    async def _open(self) -> Client: ...

    @abstractmethod
    async def _close(self, patience: float | None) -> None:
        """With `patience`, running jobs are asked to end now, and given up after that time."""

    @property
    def _patience(self) -> float:
        """Seconds that running jobs have to end after an error."""
        return 0.0

    @property
    def _failure(self) -> BaseException | None:
        """What it ended of, if it ended before it was left."""
        return None

    def __enter__(self) -> Client:
        self._thread = LoopThread("penstock")
        try:
            return self._thread.run(self.__aenter__())
        except BaseException:
            self._thread.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        if not self.is_here:  # it is the parent's to close
            self._unbind()
            return
        try:
            self._close_blocking(self._thread, error)
        finally:
            self._unbind()
            self._thread.close()
        if error is None and (failure := self._failure) is not None:
            raise failure

    def _close_blocking(self, thread: LoopThread, error: BaseException | None) -> None:
        """Close; each Ctrl-C meanwhile hurries it more. Raises KeyboardInterrupt afterwards."""
        interrupt: KeyboardInterrupt | None = None
        for patience in self._patiences(error):
            try:
                with _shown_soon(error):
                    thread.run(self._close(patience))
                break
            except KeyboardInterrupt as pressed:
                interrupt = interrupt or pressed
        if interrupt is not None:
            raise interrupt

    async def _close_async(self, error: BaseException | None) -> None:
        """Close; each cancellation meanwhile hurries it more. Raises CancelledError afterwards."""
        cancelled: asyncio.CancelledError | None = None
        for patience in self._patiences(error):
            try:
                with _shown_soon(error):
                    await self._close(patience)
                break
            except asyncio.CancelledError as again:
                cancelled = cancelled or again
        if cancelled is not None:
            raise cancelled

    def _patiences(self, error: BaseException | None) -> list[float | None]:
        """What `_close` is told at first, and after each interruption."""
        return [None, self._patience, 0.0][0 if error is None else 1 :]

    async def __aenter__(self) -> Client:
        try:
            client = await self._open()
        except BaseException:
            self._unbind()
            raise
        self._bind(client)
        return client

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.is_here:
            self._unbind()
            return
        try:
            await self._close_async(error)
        finally:
            self._unbind()
        if error is None and (failure := self._failure) is not None:
            raise failure

    def _bind(self, client: Client) -> None:
        """Before jobs run here: they may submit others at once."""
        if self.client is None:
            self._pid, self.client = os.getpid(), client
            if self._app is not None:
                self._before = self._app.bind(client)

    def _unbind(self) -> None:
        if self.client is not None:
            self.client = None
            if self._app is not None:
                self._app.bind(self._before)


class _Embedded(Session):
    """An engine in this process, or this process's part in one that another process has."""

    def __init__(self, app: App, settings: Settings, share: bool) -> None:
        super().__init__(app)
        self._application = app
        self.settings, self.share = settings, share
        self._engine: Engine | None = None
        self._membership: Membership | None = None
        self._connected: _Connected | None = None

    async def _open(self) -> Client:
        if self.settings.durability is Durability.MEMORY:
            return await self._embed(None)
        make_private(self.settings.data_dir)
        until = time.monotonic() + _JOIN_TIMEOUT
        while True:
            try:
                lock = WriterLock(self.settings.lock_file)
            except AlreadyRunning as running:
                if not self.share:
                    raise
                try:
                    return await self._join()
                except NotRunning:  # it is starting, or ending
                    if time.monotonic() > until:
                        raise running from None
                await asyncio.sleep(_JOIN_PAUSE)
            else:
                return await self._embed(lock)

    async def _embed(self, lock: WriterLock | None) -> Client:
        try:
            executors = make_executors(self._app, self.settings)
            self._engine = Engine(self.settings, executors, lock=lock)
            self._portal = Portal(asyncio.get_running_loop())
            self._engine.on_failure = self._portal.fail
            self._engine.on_open = self._opened
            await self._engine.start()
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        assert self.client is not None
        self.client.url = self._engine.url
        return self.client

    def _opened(self) -> None:
        assert self._engine is not None
        self._bind(Client(self._engine.api, self._portal, self._application.functions))

    async def _join(self) -> Client:
        from penstock.app.worker_process import Membership

        address = f"unix:{self.settings.socket}"
        connected = _Connected(self._app, address, None, "", self.settings.timeouts.reconnect)
        client = await connected._open()
        self._portal, self._connected = client._engine.portal, connected
        self._bind(client)
        try:
            self._membership = Membership(self._application, self.settings)
            await self._membership.start()
        except BaseException:
            await connected._close(0.0)
            self._unbind()
            raise
        return client

    async def _close(self, patience: float | None) -> None:
        if self._membership is not None:
            await self._membership.stop(patience)
        if self._connected is not None:
            await self._connected._close(patience)
        if self._engine is not None:
            await self._engine.stop(patience)
        self._portal.fail(Unavailable("the application was closed"))

    @property
    def _patience(self) -> float:
        return self.settings.timeouts.kill_grace + 1.0

    @property
    def _failure(self) -> BaseException | None:
        return None if self._engine is None else self._engine.failure


class _Connected(Session):
    def __init__(
        self,
        app: App | None,
        address: str | None,
        data: str | Path | None,
        token: str,
        reconnect_timeout: float | None,
    ) -> None:
        super().__init__(app)
        self._address, self._data, self._token = address, data, token
        self._reconnect_timeout = reconnect_timeout
        self._line: Link | HttpEngineApi | None = None
        self._direct: LinkPool | None = None

    async def _open(self) -> Client:
        api = await (self._by_http() if is_url(self._address) else self._by_link())
        portal = Portal(asyncio.get_running_loop())
        functions = self._app.functions if self._app is not None else {}
        url = self._address if is_url(self._address) else None
        return Client(api, portal, functions, url or "", self._direct, self._reopen)

    def _patience_for_engine(self) -> float | None:
        """Seconds; None: for ever."""
        given = self._reconnect_timeout
        if given is None:
            given = load(flags=_folder(self._data)).timeouts.reconnect
        return None if given == math.inf else given

    def _reopen(self) -> Client:
        """A connection of its own, for a forked child."""
        settings = (self._address, self._data, self._token, self._reconnect_timeout)
        thread = LoopThread("penstock")
        try:
            return thread.run(_Connected(self._app, *settings)._open())
        except BaseException:
            thread.close()
            raise

    def __enter__(self) -> Client:
        client = super().__enter__()
        atexit.register(self._let_go)
        return client

    def __exit__(self, *error: Any) -> None:
        atexit.unregister(self._let_go)
        super().__exit__(*error)

    def _let_go(self) -> None:
        """Close what was never left, as in an interactive interpreter."""
        if self.is_here and self._thread is not None:
            self._thread.run(self._close(0.0))

    async def _by_link(self) -> EngineApi:
        address, token = engine_address(self._address, self._data, self._token)
        patience = self._patience_for_engine()
        security = await client_security(address, load(flags=_folder(self._data)))
        self._line = Link(address, token=token, reconnect_timeout=patience, security=security)
        await self._line.connect()
        self._direct = LinkPool(address, token, patience, security=security)
        return remote_api(self._line)

    async def _by_http(self) -> EngineApi:
        from penstock.adapters.http.connection import ConnectionOptions
        from penstock.adapters.http.engine_api import http_engine_api

        assert self._address is not None
        token = self._token or _token_at_hand(self._address, self._data)
        if token and self._address.startswith("http://") and not _is_here(self._address):
            log.warning("the key goes to %s unencrypted; use https", urlsplit(self._address).netloc)
        options = ConnectionOptions(reconnect_timeout=self._patience_for_engine())
        self._line = api = http_engine_api(self._address, token, options=options)
        await api.connect()
        return api

    async def _close(self, patience: float | None) -> None:
        if self._direct is not None:
            self._direct.close()
        if self._line is not None:
            await self._line.close()


@contextmanager
def _shown_soon(error: BaseException | None) -> Iterator[None]:
    """Log the error if what is done meanwhile takes a while: Python shows it only afterwards."""
    if error is None or isinstance(error, KeyboardInterrupt | SystemExit | asyncio.CancelledError):
        yield
        return
    told = "the application is closed because of an error"
    shown = threading.Timer(_SHOWN_AFTER, lambda: log.error(told, exc_info=error))
    shown.daemon = True
    shown.start()
    try:
        yield
    finally:
        shown.cancel()


def is_url(address: str | None) -> bool:
    return address is not None and address.startswith(("http://", "https://"))


def _folder(data: str | Path | None) -> dict[str, Any]:
    return {} if data is None else {"data_dir": str(data)}


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def _token_at_hand(url: str, data: str | Path | None) -> str:
    """The token of the engine on this machine, for that engine only: it goes nowhere else."""
    settings = load(flags=_folder(data))
    return _read_token(settings) if _is_here(url) else ""


def _read_token(settings: Settings) -> str:
    return settings.token_file.read_text().strip() if settings.token_file.is_file() else ""


def engine_address(address: str | None, data: str | Path | None, token: str) -> tuple[Address, str]:
    """Where the engine of a data folder listens, and the token it wants."""
    settings = load(flags=_folder(data))
    where = Address.parse(address) if address else Address(path=settings.socket)
    return where, token if token or where.path is not None else _read_token(settings)


def make_executors(app: App | None, settings: Settings) -> list[Executor]:
    """Every executor that is installed, given this application, and the pipelines that the
    settings name."""
    named = [load_pipeline(reference) for reference in settings.pipelines]
    if named:
        app = app or App()
        app.add(*(pipeline for pipeline in named if pipeline.name not in app.pipelines))
    options: Mapping[str, Any] = {
        "kill_grace": settings.timeouts.kill_grace,
        "max_result": settings.limits.max_result,
        "threads": settings.concurrency,
        "log_level": logging.getLevelNamesMapping()[settings.log_level.upper()],
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
        package = module_name.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        hint = f"run this where {package} is, or install it" if missing else ""
        raise Misconfigured(f"can't import {module_name}: {error}", hint=hint) from error
    found = getattr(module, name, None)
    if not isinstance(found, App):
        apps = [f"{module_name}:{key}" for key, v in vars(module).items() if isinstance(v, App)]
        hint = did_you_mean(reference, apps) or "it has no penstock.App"
        raise Misconfigured(f"{module_name} has no application {name!r}", hint=hint)
    return found
