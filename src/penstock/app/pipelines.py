"""`penstock.Pipeline`: stages that run as one job, and the ways to start it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.app.client import DefaultClient, JobHandle
from penstock.config import load
from penstock.core.errors import NotFound
from penstock.workloads.pipeline.definition import Definition, load_pipeline
from penstock.workloads.pipeline.records import PipelineRecord

if TYPE_CHECKING:
    from penstock.app.application import App, Session
    from penstock.app.client import Client


class Pipeline(Definition):
    """A row of stages that runs as one durable job.

    It belongs to an application (`app.add(pipeline)`), and is started through that one's engine.
    Alone, in a script, it starts an engine of its own inside the process when it is first needed,
    or uses the one that runs on the same data folder.
    """

    _app: App | None = None
    _default: DefaultClient | None = None

    async def start(
        self,
        config: Any = None,
        *,
        tenant: str = "default",
        key: str | None = None,
        retry_of: str | None = None,
    ) -> JobHandle[Any]:
        """Start a run: a canonical job, durable when this returns.

        Raises InvalidRequest, naming the config's field, and PipelineBusy while one is running.
        """
        client = await asyncio.to_thread(self._connected)
        given = self.plain_config(config)
        record = await client.pipelines.astart(
            self.name, given, tenant=tenant, idempotency_key=key, retry_of=retry_of
        )
        return await client.aget(record.id)

    def run(self, config: Any = None, *, timeout: float | None = None) -> PipelineRecord:
        """Start a run, wait for its end, and return its record, whatever the end."""
        client = self._connected()
        record = client.pipelines.start(self.name, self.plain_config(config))
        client.get(record.id).wait(timeout=timeout)
        return client.pipelines.get(record.id)

    def _connected(self) -> Client:
        if self._app is not None and self._app.is_running:
            return self._app.client()
        if self._default is None:
            self._default = DefaultClient(self._embedded, self._check_served)
        return self._default.client()

    def _embedded(self) -> Session:
        from penstock.app.application import App

        app = self._app or App()
        if self.name not in app.pipelines:
            app.add(self)
        return app.run()

    def _check_served(self, client: Client) -> None:
        if self.name not in {info.name for info in client.pipelines.list()}:
            raise NotFound(
                f"the engine that is running here does not serve the pipeline {self.name}",
                hint="start it with 'penstock up --pipeline MODULE:NAME', or give this one an"
                " application with a data folder of its own",
            )

    def close(self) -> None:
        """Let go of the engine that this pipeline started for itself; runs go on at its next
        start."""
        if self._default is not None:
            self._default.close()


async def run_here(
    reference: str,
    config: dict[str, Any],
    *,
    data: Path | None = None,
    on_start: Callable[[Client, PipelineRecord], Awaitable[None]],
    **options: Any,
) -> None:
    """Start a pipeline in an engine of this process, which lives as long as `on_start` takes.

    The options are those of `Pipelines.start`.
    """
    from penstock.app.application import App

    definition = load_pipeline(reference)
    app = App()
    app.add(definition)
    settings = load(flags={} if data is None else {"data_dir": str(data)})
    async with app.run(settings=settings) as client:
        await client.api.pipelines.show(definition.name)
        record = await client.api.pipelines.start(definition.name, config, **options)
        await on_start(client, record)
