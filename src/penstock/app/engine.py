"""One running engine, put together from its settings.

This package is the only place that names adapters. Parts are made here and handed to each
other; nothing is looked up, and nothing runs before `start`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from penstock.adapters.files.start_log import FileStartLog
from penstock.adapters.link.address import Address
from penstock.adapters.link.server import LinkServer
from penstock.adapters.memory.store import MemoryBackend
from penstock.adapters.sqlite.database import WriterLock
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.app.migration import migrate_runs
from penstock.app.parts import assemble, open_blobs
from penstock.config import Settings
from penstock.config.loading import parse_host_port
from penstock.control.engine_api import EngineAuthenticator, LocalEngineApi, load_paused_pools
from penstock.control.ledger import Ledger
from penstock.control.limits import load_limits
from penstock.control.policy import Rulebook
from penstock.control.safety import SafetyKernel
from penstock.control.shared_state import FactState
from penstock.core.errors import StoreFailed, Unavailable
from penstock.core.job import IdSource, Job
from penstock.core.journal import Stride
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock, SystemClock
from penstock.ports.executor import Environment, Executor, is_needed
from penstock.ports.store import Backend, Durability
from penstock.worker.worker import Worker, WorkerOptions
from penstock.workloads.llm.batches import BatchStore
from penstock.workloads.llm.storage.files import FileBatchStore
from penstock.workloads.llm.storage.memory import MemoryBatchStore

if TYPE_CHECKING:
    from penstock.api.health import Health
    from penstock.api.options import HttpOptions
    from penstock.api.server import HttpServer

log = logging.getLogger(__name__)

LOCAL = "local-"
"""How the ids of workers inside an engine begin: they end with it."""
_WELCOME = 5.0
"""Seconds that a start waits for its own worker to be known."""
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
    ) -> None:
        """`lock`: the data folder's lock, if the caller has taken it already."""
        self.settings = settings
        self._lock = lock
        self._executors = list(filter(is_needed, executors))
        self._clock: Clock = clock or SystemClock()
        self._listen = listen
        self._given_blobs = blobs
        self._any_port = any_port
        """Whether HTTP may take a free port where its own is taken."""
        self._services: list[asyncio.Task[None]] = []
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
        self.store = Ledger(self._open_backend(), monotonic=self._clock.monotonic)
        self.store.listeners.on_failure = partial(self._fail, "a listener of the store")
        try:
            await self.store.open()
            if settings.durability is not Durability.MEMORY:
                migrate_runs(settings.data_dir, settings.durability)
            self.state = FactState(self.store)
            parts = assemble(
                settings,
                self.store,
                self.state,
                self._open_batch_store(),
                rulebook,
                self._clock,
                token,
                self._executors,
                self._given_blobs or open_blobs(settings),
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
            if settings.http:
                await self._start_http()
            self._is_up = True
            if (failure := self.failure) is not None:
                raise failure
        except BaseException:
            await self.stop()
            raise
        log.info("engine started at %s", settings.data_dir)

    def _open_backend(self) -> Backend:
        settings = self.settings
        if settings.durability is Durability.MEMORY:
            return MemoryBackend()
        return SqliteBackend(
            settings.database,
            durability=settings.durability,
            max_log_lines=settings.max_log_lines,
            lock=self._lock,
        )

    def _open_batch_store(self) -> BatchStore:
        settings = self.settings
        if settings.durability is Durability.MEMORY:
            return MemoryBatchStore()
        return FileBatchStore(settings.shelf, sync=settings.durability is Durability.DISK)

    async def _restore(self) -> None:
        """Take up what an earlier engine left; its own workers are gone with it."""
        parts = self.parts
        rates = [rule.rate for rule in parts.rulebook.kernel.rules.rules if rule.rate is not None]
        await load_limits(self.store, self.open_jobs.limiter, self._clock, rates)
        await load_paused_pools(self.store, self.open_jobs.roster)
        for restore in parts.restores:
            await restore()
        self.open_jobs.restore(await self.store.unfinished())
        parts.starts.take_over((job.job_id, job.attempt) for job in self.open_jobs.held.values())
        monotonic = self._clock.monotonic()
        for record in self.open_jobs.roster.workers.values():
            gone = record.worker_id.startswith(LOCAL)
            self.open_jobs.roster.set_missing(record, float("-inf") if gone else monotonic)

    def _run_services(self) -> None:
        self.parts.feed.subscribe(self.bus)
        for name, service in self.parts.running.items():
            self._services.append(self._supervise(name, service.run()))

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
        self._failed.exception()  # whoever wants to know asks; nobody has to
        self.on_failure(failure)
        if self._is_up:
            self._stop_once()

    async def _start_worker(self) -> None:
        self.worker_id = LOCAL + IdSource().next(self._clock.now())[-8:]
        options = WorkerOptions(
            worker_id=self.worker_id,
            slots=self.settings.concurrency,
            local=True,
            drain_timeout=self.settings.drain_timeout,
            max_log_lines=self.settings.max_log_lines,
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

    async def _introduced(self, worker: Worker, running: asyncio.Task[None]) -> None:
        """Whoever asks from now on is told what is served here."""
        welcomed = asyncio.ensure_future(worker.welcomed.wait())
        assert self._failed is not None
        events: list[asyncio.Future[Any]] = [welcomed, running, self._failed]
        await asyncio.wait(events, timeout=_WELCOME, return_when="FIRST_COMPLETED")
        welcomed.cancel()

    async def _start_listening(self, token: str) -> None:
        settings = self.settings
        self._server = LinkServer(self.bus, self.api, token, self.state, self.blobs)
        for text in settings.addresses:
            address = Address.parse(text)
            if address.path is not None:
                make_private(address.path.parent)
            self.addresses.append(await self._server.listen(address))

    async def _start_http(self) -> None:
        from penstock.api.server import AddressTaken, HttpServer

        authenticator = EngineAuthenticator(self.parts.keys, self.api)
        options = http_options(self.settings)
        while not self.url:
            self._http = HttpServer(authenticator, options, clock=self._clock, health=self._health)
            try:
                self.url = await self._http.start()
            except AddressTaken:
                if not self._any_port or not options.port:
                    raise
                options = replace(options, port=0)

    def _health(self) -> Health:
        from penstock.api.health import Health

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
            closing.callback(abandon, self._executors)  # after the store: nothing is recorded
            closing.callback(self._close_waiting)
            closing.push_async_callback(self.store.close)
            if hasattr(self, "parts"):
                closing.push_async_callback(self.bus.close)
                closing.push_async_callback(self.parts.hub.close)
            for task in reversed(self._services):
                closing.push_async_callback(_end, task)
            closing.push_async_callback(self._close_doors)
            if self.failure is not None:
                await self._close_doors()  # nobody is to wait here any longer
            if self._worker is not None:
                await self._end_worker(self._worker)
                await self._take_in_results()

    async def _end_worker(self, running: asyncio.Task[None]) -> None:
        """A job that can't be ended is not waited for after a failure or in a hurry."""
        if self.failure is not None and self._local is not None:
            drain_timeout = self._local.options.drain_timeout
            self._drain.give_up_after(drain_timeout + self.settings.kill_grace + _LAST_WORDS)
        self.left_running = not await self._drain.end(running)

    async def _close_doors(self) -> None:
        http, self._http = self._http, None
        server, self._server = self._server, None
        try:
            if http is not None:
                await http.close()
        finally:
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
    """Nobody waits any longer for jobs that still run."""
    for executor in executors:
        if (give_up := getattr(executor, "abandon", None)) is not None:
            give_up()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def http_options(settings: Settings) -> HttpOptions:
    from penstock.api.options import HttpOptions

    host, port = parse_host_port(settings.http)
    return HttpOptions(
        host=host,
        port=port,
        certfile=settings.http_certificate,
        keyfile=settings.http_private_key,
        insecure=settings.http_insecure,
        allowed_hosts=settings.http_hosts,
        max_body=settings.http_max_body,
        max_upload=settings.max_input,
        max_connections=settings.http_max_connections,
        max_streams=settings.http_max_streams,
        rate=settings.http_rate,
        openai_strict=settings.openai_strict,
        image_sources=settings.image_sources,
        models_dir=settings.model_folder,
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
