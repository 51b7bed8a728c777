"""A standalone container worker behind its HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from penstock.ports.clock import SystemClock
from penstock.workloads.container.config import Compat, WorkerConfig

if TYPE_CHECKING:
    from penstock.api.container.options import ContainerHttpOptions
    from penstock.api.container.server import ContainerServer
    from penstock.workloads.container.standing.worker import Worker


@asynccontextmanager
async def container_worker(config: WorkerConfig) -> AsyncIterator[tuple[Worker, ContainerServer]]:
    """A worker that stands alone, behind its HTTP API, from here to the end of the block."""
    from penstock.adapters.files.blobs import FileBlobs
    from penstock.api.container.server import ContainerServer
    from penstock.app.engine import make_private
    from penstock.workloads.container.engines.discovery import open_engine
    from penstock.workloads.container.files.sandbox import Sandboxes
    from penstock.workloads.container.standing.worker import Worker
    from penstock.workloads.container.storage.sqlite.store import SqliteContainerStore

    clock, options = SystemClock(), http_options(config)
    options.check()
    make_private(config.jobs_dir)
    async with AsyncExitStack() as stack:
        store = SqliteContainerStore(config.jobs_dir / "containers.db")
        stack.push_async_callback(store.close)
        engine = await open_engine(config)
        stack.push_async_callback(engine.close)
        rules = config.inputs
        blobs = FileBlobs(
            config.jobs_dir / "blobs",
            inline_limit=0,
            max_size=rules.max_file_bytes,
            sources=rules.sources,
        )
        sandboxes = Sandboxes(config.jobs_dir / "jobs", rules, blobs)
        worker = Worker(config, engine, store, sandboxes, clock)
        await worker.start()
        stack.push_async_callback(worker.stop)
        server = ContainerServer(worker, options, clock=clock)
        await server.start()
        stack.push_async_callback(server.close)
        yield worker, server


def http_options(config: WorkerConfig) -> ContainerHttpOptions:
    from penstock.api.container.options import ContainerHttpOptions

    return ContainerHttpOptions(
        host=config.host,
        port=config.port,
        token=config.token,
        cors=config.cors,
        max_body=config.max_body_bytes,
        max_upload=config.inputs.max_bytes * 4 // 3 + config.max_body_bytes,
        compat_strict=config.compat is Compat.STRICT,
    )
