"""Runs split models as canonical jobs (`job.chat.<model>`): what happens inside RUNNING.

The node lives as long as the worker. It replaces nodes that fail, so a job that it gives up is
given up; only what no node could do, as for a lack of memory, makes jobs wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from penstock.core.errors import Misconfigured, PenstockError, Unavailable
from penstock.core.job import TopicDefaults
from penstock.ports.executor import Context, Environment, Outcome, Task
from penstock.workloads.llm.executor import DEFAULTS, LlmExecutor
from penstock.workloads.llm.runner import Loading, Runner
from penstock.workloads.llm.values import (
    PIPE_TOPICS,
    LlmCode,
    LlmFailure,
    read_request,
)
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.status import FACT, LABEL, addresses
from penstock.workloads.pipes.views import view_of

log = logging.getLogger(__name__)

_LOOK = 5.0
"""Seconds between two looks for nodes among the engine's workers: of two that came at the same
time neither saw the other."""
_MACHINE = frozenset({LlmCode.ENGINE_MISSING, LlmCode.OUT_OF_MEMORY, LlmCode.ENGINE_CRASHED})
"""Failures to start for which no setting is to blame."""


class Host(Protocol):
    """A node, as far as an executor has to do with it."""

    @property
    def node_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Where other nodes reach it, once it was started."""

    @property
    def runner(self) -> Runner:
        """Answers with its model; only where it has the end model."""

    async def start(self, on_progress: Loading) -> None:
        """Until its own part is loaded. Raises LlmFailure, Misconfigured."""

    def records(self) -> Iterable[NodeRecord]:
        """All nodes that it knows of, and itself."""

    def join(self, addresses: Iterable[str]) -> None:
        """See whether there are nodes."""

    async def stop(self) -> None:
        """It drains first."""


class PipesExecutor:
    """Executes jobs of the model whose end model is here. A node that only holds layers serves no
    topic, and is there for the others."""

    resumable = False

    def __init__(
        self, config: LpConfig | None, make_host: Callable[[LpConfig], Host] | None = None
    ) -> None:
        self._config = config
        self._make_host = make_host or _node
        served = (config.model,) if config is not None and config.end_model else ()
        self.topics = tuple(PIPE_TOPICS + model for model in served)
        self.topic_defaults: Mapping[str, TopicDefaults] = dict.fromkeys(self.topics, DEFAULTS)
        self.always_open = config is not None
        """Whether it has something to do besides jobs."""
        self._host: Host | None = None
        self._jobs = LlmExecutor(None)
        self._worker_id = ""
        self._looking: asyncio.Task[None] | None = None

    @property
    def labels(self) -> Mapping[str, str]:
        return {LABEL: self._host.address} if self._host is not None else {}

    def facts(self) -> Mapping[str, Any]:
        if self._host is None:
            return {}
        host, workers = self._host, {self._host.node_id: self._worker_id}
        nodes = msgspec.to_builtins(view_of(host.records(), workers))
        return {FACT: nodes, **self._jobs.facts()}

    # -- the node -----------------------------------------------------------------

    async def open(self, environment: Environment) -> None:
        """Start the node, joined to those that are workers of the same engine."""
        if self._config is None or self._host is not None:
            return
        self._worker_id = environment.worker_id
        join = (*self._config.join, *await addresses(environment.api, environment.worker_id))
        host = self._make_host(replace(self._config, join=tuple(dict.fromkeys(join))))
        try:
            await host.start(_Loading(self._config.model).tell)
        except LlmFailure as failure:
            await host.stop()
            raise _explained(failure) from failure
        except BaseException:
            await host.stop()
            raise
        self._host = host
        if self._config.end_model:
            self._jobs = LlmExecutor(
                host.runner,
                (self._config.model,),
                prefix=PIPE_TOPICS,
                memory_setting="pipe_memory",
            )
        self._looking = asyncio.ensure_future(self._look(environment, host))

    async def _look(self, environment: Environment, host: Host) -> None:
        while True:
            await environment.clock.sleep(_LOOK)
            with suppress(PenstockError):  # while the engine is away, nodes go on without it
                host.join(await addresses(environment.api, environment.worker_id))

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        host, self._host, self._jobs = self._host, None, LlmExecutor(None)
        if host is not None:
            await host.stop()

    # -- jobs ---------------------------------------------------------------------

    def check(self, topic: str, payload: bytes) -> None:
        read_request(payload)

    async def run(self, task: Task, ctx: Context) -> Outcome:
        return await self._jobs.run(task, ctx)


def make(app: Any, options: Mapping[str, Any]) -> PipesExecutor:
    """The executor of split models (entry point `penstock.executors`)."""
    return PipesExecutor(options.get("pipes"))


def _node(config: LpConfig) -> Host:
    """Only here is what computes imported."""
    from penstock.workloads.pipes.runner import NodeHost

    return NodeHost(config)


class _Loading:
    """Logs how far a model is loaded: each thing that is done, at each quarter of the whole."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._said = ("", -1)

    def tell(self, fraction: float, doing: str) -> None:
        said = ("".join(sign for sign in doing if not sign.isdigit()), int(fraction * 4))
        if said != self._said:
            self._said = said
            log.info("%s: %s (%.0f%%)", self._model, doing, fraction * 100)


def _explained(failure: LlmFailure) -> PenstockError:
    if failure.code in _MACHINE:
        return Unavailable(failure.message)
    return Misconfigured(failure.message)
