"""One running engine, put together from its settings.

This package is the only place that names adapters. Parts are made here and handed to each
other; nothing is looked up, and nothing runs before `start`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from penstock.adapters.files.blobs import FileBlobs
from penstock.adapters.files.start_log import FileStartLog
from penstock.adapters.link.address import Address
from penstock.adapters.link.server import LinkServer
from penstock.adapters.sqlite.database import WriterLock
from penstock.app.migration import migrate_files, migrate_runs
from penstock.app.parts import assemble, open_backend, open_blobs
from penstock.app.remote import Keys, Remote
from penstock.config import Settings
from penstock.control.engine_api import EngineAuthenticator, LocalEngineApi, load_paused_pools
from penstock.control.guard import digest_of
from penstock.control.home import HomeFacts
from penstock.control.ledger import Ledger
from penstock.control.limits import load_limits
from penstock.control.policy import Rulebook
from penstock.control.safety import SafetyKernel
from penstock.control.shared_state import FactState
from penstock.core.errors import Misconfigured, NotOwner, StoreFailed, Unavailable
from penstock.core.job import IdSource, Job
from penstock.core.journal import Stride
from penstock.core.shards import Shard
from penstock.ports.address import parse_address
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock, SystemClock
from penstock.ports.executor import Environment, Executor, is_needed
from penstock.ports.shared_state import SharedState
from penstock.ports.store import Backend, Durability
from penstock.worker.worker import Worker, WorkerOptions
from penstock.workloads.llm.batches import TOPIC as BATCH_TOPIC

if TYPE_CHECKING:
    from penstock.adapters.nats.connection import NatsOptions
    from penstock.adapters.nats.server import NatsServer
    from penstock.api.about import Health
    from penstock.api.options import HttpOptions
    from penstock.api.server import HttpServer
    from penstock.app.front_door import OwnerUrl
    from penstock.app.nats import CapPlane

log = logging.getLogger(__name__)

LOCAL = "local-"
"""How the ids of workers inside an engine begin: they end with it."""
_WELCOME = 5.0
"""Seconds that a start waits for its own worker to be known."""
_BATCHES = 1000
"""Batches that run at the same time: they wait for their lines."""
_BLOBS = "storage/blobs"
"""The fact that names the folder of payloads of all engines of a database."""
_LAST_WORDS = 5.0
"""Seconds that a stopped worker's last results get to be committed."""


class Engine:
    """Gateway, scheduler, reconciler, a local worker and a listener, in one event loop."""

    def __init__(
        self,
        settings: Settings,
        executors: Sequence[Executor] = (),
        *,
        clock: Clock | None = None,
        listen: bool = True,
        any_port: bool = False,
        blobs: Blobs | None = None,
        lock: WriterLock | None = None,
        patience: float | None = None,
        sockets: Mapping[str, socket.socket] | None = None,
        shard: Shard | None = None,
        home: str = "",
        owner_url: OwnerUrl | None = None,
    ) -> None:
        """`lock`: the data folder's lock, if the caller has taken it already. `patience`: seconds
        to wait while another engine owns the same database. `sockets`: those to listen with, by
        address, and those for TLS and HTTP as `tls` and `http`; others are bound by the engine.
        `shard`: the part of the database that is its own; `home`: the URL of shard 0's, if that
        is another one; `owner_url` finds the owners of other shards."""
        self._owner_url = owner_url
        self.shard, self._home_url = shard or Shard(), home
        self._home: Backend | None = None
        self.settings = settings
        self._sockets = sockets or {}
        self._patience = patience
        self._lock = lock
        self._executors = list(filter(is_needed, executors))
        self._clock: Clock = clock or SystemClock()
        self._listen = listen
        self._given_blobs = blobs
        self._any_port = any_port
        """Whether HTTP may take a free port where its own is taken."""
        self._services: list[asyncio.Task[None]] = []
        self._nats: asyncio.Task[None] | None = None
        self.nats_server: NatsServer | None = None
        self.cap: CapPlane | None = None
        self._local: Worker | None = None
        self._worker: asyncio.Task[None] | None = None
        self._server: LinkServer | None = None
        self._failed: asyncio.Future[None] | None = None
        self._is_up = False
        self._stopping: asyncio.Task[None] | None = None
        self._drain = Drain()
        self.on_failure: Callable[[Unavailable], None] = lambda error: None
        """Called when a service fails; the engine stops by itself after that."""
        self.on_open: Callable[[], object] = lambda: None
        """Called when `api` can be used, before the first job runs."""
        self._http: HttpServer | None = None
        self.addresses: list[Address] = []
        self.url = ""
        """Where the HTTP API is, if it is."""
        self.worker_id = ""
        self.left_running = False
        """Whether it stopped although a job still ran."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    # -- start --------------------------------------------------------------------

    async def start(self) -> None:
        settings = self.settings
        self._failed = asyncio.get_running_loop().create_future()
        make_private(settings.data_dir)
        rulebook = Rulebook(SafetyKernel(), settings.rules, self._clock)
        rulebook.load()
        token = make_token(settings.token_file)
        shard = self.shard
        backend = open_backend(settings, self._lock, patience=self._patience, shard=shard)
        home = self._open_home() if self._home_url else None
        self.store = Ledger(backend, monotonic=self._clock.monotonic, shard=shard, home=home)
        self.store.listeners.on_failure = partial(self._fail, "a listener of the store")
        try:
            await self.store.open()
            if settings.durability is not Durability.MEMORY:
                migrate_runs(settings.data_dir, settings.durability)
            self.state = FactState(self.store)
            blobs = self._given_blobs or open_blobs(settings)
            if settings.store and isinstance(blobs, FileBlobs):
                await claim_blobs(settings, blobs, self.state)
            await migrate_files(settings.data_dir, blobs, self.state)
            parts = assemble(
                settings,
                self.store,
                self.state,
                rulebook,
                self._clock,
                token,
                self._executors,
                blobs,
                self._home_url,
            )
            self.parts = parts
            self.bus, self.blobs, self.open_jobs = parts.bus, parts.blobs, parts.open_jobs
            self.scheduler, self.reconciler = parts.scheduler, parts.reconciler
            self.api = LocalEngineApi(parts)
            await self._restore()
            self._run_services()
            self.on_open()
            if self._executors:
                await self._start_worker()
            if self._listen:
                await self._start_listening(token)
            if settings.http.listen:
                await self._start_http()
            if settings.cap.enabled:
                await self._start_cap(token)
            if settings.store:
                self._join_engines(token)
            self._is_up = True
            if (failure := self.failure) is not None:
                raise failure
        except BaseException:
            await self.stop()
            raise
        log.info("engine started at %s", settings.data_dir)

    def _open_home(self) -> HomeFacts:
        from penstock.adapters.postgres.store import PostgresBackend

        self._home = PostgresBackend(self._home_url, readers=1)
        return HomeFacts(self._home.facts)

    async def _restore(self) -> None:
        """Take up what an earlier engine left; its own workers are gone with it."""
        parts = self.parts
        rates = [rule.rate for rule in parts.rulebook.kernel.rules.rules if rule.rate is not None]
        await load_limits(self.store, self.open_jobs.limiter, self._clock, rates)
        await load_paused_pools(self.store, self.open_jobs.roster)
        for restore in parts.restores:
            await restore()
        unfinished = await self.store.unfinished()
        self.open_jobs.restore(unfinished)
        parts.statistics.restore_open(unfinished)
        parts.starts.take_over((job.job_id, job.attempt) for job in self.open_jobs.held.values())
        said, monotonic = self.settings.timeouts, self._clock.monotonic()
        # The workers inside an engine that may still run end as soon as it can't own the store.
        local = float("-inf") if self.store.is_alone else monotonic + said.lease - said.lost_grace
        for record in self.open_jobs.roster.workers.values():
            is_local = record.worker_id.startswith(LOCAL)
            self.open_jobs.roster.set_missing(record, local if is_local else monotonic)

    def _run_services(self) -> None:
        self.parts.feed.subscribe(self.bus)
        for name, service in self.parts.running.items():
            self._services.append(self._supervise(name, service.run()))
        self._services.append(self._supervise("batch worker", self._run_batches()))

    async def _run_batches(self) -> None:
        """Run batches on a worker of their own, which starts with the first of them."""
        wanted = asyncio.Event()
        self.store.listen(lambda strides: wanted.set(), (BATCH_TOPIC,))
        if not any(job.request.topic == BATCH_TOPIC for job in await self.store.unfinished()):
            await wanted.wait()
        options = WorkerOptions(
            worker_id=self._new_worker_id(), slots=_BATCHES, local=True, drain_timeout=0.0
        )
        environment = Environment(options.worker_id, self._clock, self.blobs, self.api, self.state)
        executors = [self.parts.batch_executor]
        worker = Worker(self.bus, self.blobs, executors, self._clock, options, None, environment)
        await worker.run()

    def _supervise(self, name: str, service: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(service, name=f"penstock {name}")
        task.add_done_callback(self._service_ended)
        return task

    def _service_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._stopping is not None:
            return
        self._fail(task.get_name(), task.exception() or RuntimeError("it ended by itself"))

    def _fail(self, what: str, error: BaseException) -> None:
        """End the whole engine: without this part, callers would wait for ever."""
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        log.critical("%s failed: the engine stops", what, exc_info=error)
        if self._failed is None or self._failed.done():
            return
        failure = Unavailable(
            f"the engine failed: {what}: {type(error).__name__}: {error}",
            hint="start it again: it takes up what it had accepted",
        )
        failure.__cause__ = error
        self._failed.set_exception(failure)
        self._failed.exception()  # retrieved, so that asyncio does not warn
        self.on_failure(failure)
        if self._is_up:
            self._stop_once()

    async def _start_worker(self) -> None:
        self.worker_id = self._new_worker_id()
        options = WorkerOptions(
            worker_id=self.worker_id,
            slots=self.settings.concurrency,
            local=True,
            drain_timeout=self.settings.timeouts.drain,
            max_log_lines=self.settings.limits.max_log_lines,
        )
        environment = Environment(self.worker_id, self._clock, self.blobs, self.api, self.state)
        worker = Worker(
            self.bus, self.blobs, self._executors, self._clock, options, FileStartLog, environment
        )
        self.open_jobs.learn(worker.topics, worker.topic_defaults)
        # Before anybody is let in, so that a pipeline can be started at once.
        await worker.open_executors()
        self._local = worker
        self._worker = self._supervise("worker", worker.run())
        await self._introduced(worker, self._worker)

    def _new_worker_id(self) -> str:
        return LOCAL + IdSource().next(self._clock.now())[-8:]

    async def _introduced(self, worker: Worker, running: asyncio.Task[None]) -> None:
        """From now on, callers see what is served here."""
        welcomed = asyncio.ensure_future(worker.welcomed.wait())
        assert self._failed is not None
        events: list[asyncio.Future[Any]] = [welcomed, running, self._failed]
        await asyncio.wait(events, timeout=_WELCOME, return_when="FIRST_COMPLETED")
        welcomed.cancel()

    async def _start_listening(self, token: str) -> None:
        settings = self.settings
        remote = Remote(settings, self.parts) if settings.link.listen else None
        keys = Keys(self.parts, self.api)
        server = LinkServer(self.bus, self.api, token, self.state, self.blobs, remote, keys)
        self._server = server
        for text in settings.addresses:
            address = Address.parse(text)
            if address.path is not None:
                make_private(address.path.parent)
            self.addresses.append(await server.listen(address, self._sockets.get(text)))
        if remote is not None:
            host, port = parse_address(settings.link.listen)
            address = Address(host=host, port=port, tls=True)
            address = await server.listen(address, self._sockets.get("tls"))
            self.addresses.append(address)
            remote.listening(address, server.recheck)
        if settings.bus.address:
            await self._start_nats(server, token)

    async def _start_nats(self, server: LinkServer, token: str) -> None:
        from penstock.adapters.nats.tunnel import NatsListener
        from penstock.app.nats import nats_options

        options = nats_options(self.settings, token)
        if self.settings.bus.start_server:
            await self._start_nats_server(options)
        listener = NatsListener(options, server.accept, self.bus)
        await listener.start()
        self._nats = self._supervise("NATS", listener.run())

    async def _start_nats_server(self, options: NatsOptions) -> None:
        from penstock.adapters.nats.server import NatsServer

        self.nats_server = NatsServer(self.settings.data_dir / "nats", options)
        await self.nats_server.start()
        self._services.append(self._supervise("NATS server", self.nats_server.run()))

    async def _start_cap(self, token: str) -> None:
        from penstock.app.nats import open_cap

        if not self.settings.bus.address:
            raise Misconfigured("cap.enabled needs bus.url, the address of a NATS server")
        self.cap = await open_cap(self.settings, self.parts, self.api, self.state, token)
        self.store.listen(self.cap.bridge.hear)
        self._services.append(self._supervise("CAP", self.cap.bridge.run()))

    async def _start_http(self) -> None:
        from penstock.api.server import AddressTaken

        options = http_options(self.settings)
        while not self.url:
            self._http = self._http_server(options)
            try:
                self.url = await self._http.start(self._sockets.get("http"))
            except AddressTaken:
                if not self._any_port or not options.port:
                    raise
                options = replace(options, port=0)
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host.strip("[]"))
        url = self.url if host is None else f"{options.scheme}://{host}:{self.url.rsplit(':')[-1]}"
        self.parts.keys.sessions.url = url

    def _http_server(self, options: HttpOptions) -> HttpServer:
        from penstock.api.server import HttpServer

        keys, clock, health = self.parts.keys, self._clock, self._health
        sign_ins, owner_url = EngineAuthenticator(keys, self.api), self._owner_url
        if owner_url is None or options.certfile:
            return HttpServer(sign_ins, options, clock=clock, health=health)
        from penstock.app.front_door import ForwardingServer  # needs an extra

        return ForwardingServer(sign_ins, options, keys, owner_url, clock=clock, health=health)

    def _join_engines(self, token: str) -> None:
        """Be found by other engines of the same database, and accept their tokens."""
        from penstock.adapters.postgres.engines import Engines
        from penstock.app.standby import entry_of

        entry = entry_of(
            getattr(self.store.backend, "holder", ""),
            links=self.addresses,
            http=self.url,
            token=digest_of(token),
        )
        said = self.settings.timeouts
        lease = max(said.lease - said.kill_grace, 1.0)
        engines = Engines(self.settings.store, entry, lease=lease)
        self.parts.keys.opens = engines.opens
        self._services.append(self._supervise("engines", engines.run()))

    def _health(self) -> Health:
        from penstock.api.about import Health

        if self._failed is None or self._failed.done():
            return Health(False, ("the engine has failed or is stopping",))
        if self.scheduler.trouble:
            return Health(False, ("the store can't be read or written",))
        return Health()

    # -- stop ---------------------------------------------------------------------

    async def wait(self) -> None:
        """Wait for ever; raises if a service fails."""
        assert self._failed is not None
        await asyncio.shield(self._failed)

    @property
    def failure(self) -> BaseException | None:
        """What the engine ended of, if it did not end because somebody stopped it."""
        failed = self._failed
        if failed is None or not failed.done() or failed.cancelled():
            return None
        return failed.exception()

    @property
    def was_replaced(self) -> bool:
        """Whether it ended because another engine owns its database now."""
        return isinstance(getattr(self.failure, "__cause__", None), NotOwner)

    async def stop(self, patience: float | None = None) -> None:
        """Let running jobs finish within the drain timeout, commit their results, then stop.

        With `patience`, ask running jobs to end now, and leave those that have not ended after so
        many seconds to the next start. A stop that is under way can be hurried in this way.
        """
        stopping = self._stop_once()
        if patience is not None:
            if self._local is not None:
                self._local.hurry()
            self._drain.give_up_after(patience)
        await asyncio.shield(stopping)

    def _stop_once(self) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        # Whatever fails on the way, the rest is closed as well.
        async with AsyncExitStack() as closing:
            for bound in self._sockets.values():
                closing.callback(bound.close)
            closing.callback(abandon, self._executors)  # after the store: nothing is recorded
            closing.callback(self._close_waiting)
            closing.push_async_callback(self.store.close)
            if self._home is not None:
                closing.push_async_callback(self._home.close)
            if self.nats_server is not None:
                closing.push_async_callback(self.nats_server.stop)
            if hasattr(self, "parts"):
                closing.push_async_callback(self.bus.close)
                closing.push_async_callback(self.parts.hub.close)
            for task in reversed(self._services):
                closing.push_async_callback(_end, task)
            closing.push_async_callback(self._close_doors)
            if self.failure is not None:
                await self._close_doors()  # end all open connections and waits
            if self._worker is not None:
                await self._end_worker(self._worker)
                await self._take_in_results()

    async def _end_worker(self, running: asyncio.Task[None]) -> None:
        """A job that can't be ended is not waited for after a failure or in a hurry."""
        if self.failure is not None and self._local is not None:
            drain_timeout = self._local.options.drain_timeout
            self._drain.give_up_after(
                drain_timeout + self.settings.timeouts.kill_grace + _LAST_WORDS
            )
        self.left_running = not await self._drain.end(running)

    async def _close_doors(self) -> None:
        http, self._http = self._http, None
        server, self._server = self._server, None
        nats, self._nats = self._nats, None
        try:
            if http is not None:
                await http.close()
        finally:
            if nats is not None:
                await _end(nats)
            if self.cap is not None and self.cap.pointers is not None:
                await self.cap.pointers.close()
            if server is not None:
                await server.close()

    def _close_waiting(self) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()

    async def _take_in_results(self) -> None:
        """Wait until what the local worker had to say is committed."""
        if any(service.done() for service in self._services):
            return  # of a service that failed, perhaps the one that commits
        told = asyncio.Event()
        local, orphaned = self._local, self.open_jobs.orphaned

        def is_untold(job: Job) -> bool:
            reached = local is not None and local.has_received(job.job_id, job.attempt)
            if local is not None and job.job_id in local.interrupted:
                return False
            return job.worker_id == self.worker_id and reached and job.job_id not in orphaned

        def look(_: Sequence[Stride] = ()) -> None:
            if not any(map(is_untold, self.open_jobs.held.values())):
                told.set()

        stop_listening = self.store.listen(look)
        look()
        try:
            is_calm = self.failure is None and not self.left_running
            async with asyncio.timeout(_LAST_WORDS if is_calm else 1.0):
                await told.wait()
        except TimeoutError:
            log.warning("the local worker left jobs that it did not report on")
        finally:
            stop_listening()


class Drain:
    """Ends a worker whose jobs may take their time, or not end at all."""

    def __init__(self) -> None:
        self._gave_up = asyncio.Event()
        """Set when jobs that still run are no longer waited for."""

    def give_up_after(self, seconds: float) -> None:
        """Wait so long for running jobs, at most."""
        asyncio.get_running_loop().call_later(seconds, self._gave_up.set)

    async def end(self, worker: asyncio.Task[None]) -> bool:
        """Whether it has ended."""
        worker.cancel()
        gave_up = asyncio.ensure_future(self._gave_up.wait())
        await asyncio.wait((worker, gave_up), return_when=asyncio.FIRST_COMPLETED)
        gave_up.cancel()
        if not worker.done():
            log.error("jobs still run that can't be ended; they are left to themselves")
        return worker.done()


def abandon(executors: Iterable[Executor]) -> None:
    """Stop waiting for jobs that still run."""
    for executor in executors:
        if (give_up := getattr(executor, "abandon", None)) is not None:
            give_up()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def http_options(settings: Settings) -> HttpOptions:
    from penstock.api.options import HttpOptions

    host, port = parse_address(settings.http.listen)
    return HttpOptions(
        host=host,
        port=port,
        certfile=settings.http.certificate,
        keyfile=settings.http.private_key,
        insecure=settings.http.insecure,
        allowed_hosts=settings.http.allowed_hosts,
        cors=settings.http.cors,
        max_body=settings.http.max_body,
        max_upload=settings.limits.max_input,
        max_connections=settings.http.max_connections,
        max_streams=settings.http.max_streams,
        rate=settings.http.rate_limit,
        access_log=settings.http.access_log,
        openai_strict=settings.openai.strict,
        image_sources=settings.openai.image_sources,
        models_dir=settings.model_folder,
        spools=tuple(map(Path, settings.spools)),
    )


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can look into, or say why not."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreFailed(
            f"can't make the folder {folder}: {error.strerror}",
            hint="choose another with --data, or change the permissions",
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreFailed(
            f"can't write in the folder {folder}",
            hint="choose another with --data, or change its permissions",
        )


async def claim_blobs(settings: Settings, blobs: FileBlobs, state: SharedState) -> None:
    """Refuse a store of payloads that is not the one of the database's jobs.

    Raises Misconfigured.
    """
    name = await blobs.claim(secrets.token_hex(16).encode())
    known = await state.read(_BLOBS)
    if known is None:
        await state.write(_BLOBS, name)
    elif known != name:
        raise Misconfigured(
            f"{settings.blobs} does not have the payloads of the jobs in this database",
            hint="let all its engines share one folder or object store: set storage.blobs",
        )


def make_token(path: Path) -> str:
    """Read the engine's token, or make one that only its owner can read."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(token)
        return token
