"""`penstock container serve`: an engine in this process, behind the container protocol."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from penstock.config import Settings
from penstock.workloads.container.config import WorkerConfig

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from penstock.api.container.facade import ContainerFacade
    from penstock.api.server import ApiServer
    from penstock.workloads.container.engine import ContainerEngine


@asynccontextmanager
async def container_worker(
    config: WorkerConfig, settings: Settings, container_engine: ContainerEngine | None = None
) -> AsyncIterator[tuple[ContainerFacade, ApiServer]]:
    """Serve from here to the end of the block; containers that run then go on."""
    from penstock.api.container.facade import ContainerFacade
    from penstock.api.container.server import container_server, http_options
    from penstock.app.engine import Engine
    from penstock.ports.clock import SystemClock
    from penstock.workloads.container.executor import ContainerExecutor

    http_options(config)
    if (old := config.jobs_dir / "containers.db").exists():
        log.warning("%s is of an earlier version; its jobs are not taken over", old)
    clock = SystemClock()
    executor = ContainerExecutor(config, container_engine)
    async with AsyncExitStack() as stack:
        engine = Engine(engine_settings(config, settings), [executor], clock=clock)
        await stack.enter_async_context(engine)
        assert executor.host is not None
        facade = ContainerFacade(engine.api, executor.host, config, clock)
        server = container_server(facade, config, clock=clock)
        await server.start()
        stack.push_async_callback(server.close)
        yield facade, server


def engine_settings(config: WorkerConfig, settings: Settings) -> Settings:
    """The engine's settings, as the worker's configuration has them."""
    largest = config.inputs.max_bytes * 4 // 3 + config.max_body_bytes
    return settings.changed(
        concurrency=config.max_concurrent_jobs,
        http__listen="",
        limits__max_waiting=config.max_queued_jobs,
        limits__max_input=max(settings.limits.max_input, largest),
        storage__retention=config.retention,
        storage__sources=(*settings.storage.sources, *config.inputs.sources),
    )
