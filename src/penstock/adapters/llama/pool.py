"""Several models in one memory: loaded when they are asked for, unloaded when room is needed.

Who is used stays. When a model needs room, those that nobody uses leave, the longest unused
first; when all are used, it waits, and after a while newcomers to the others wait behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from penstock.adapters.llama.engine import Engine
from penstock.adapters.llama.machine import too_large
from penstock.adapters.llama.process import EngineSpec
from penstock.workloads.llm.health import EngineState
from penstock.workloads.llm.runner import Loading
from penstock.workloads.llm.values import EngineUnavailable, LlmCode, LlmFailure

Start = Callable[[EngineSpec, Loading], Awaitable[Engine]]
_PATIENCE = 5.0
"""Seconds that one which needs room lets newcomers to the others go first."""
_TICK = 0.01
"""Seconds by which a timer may be early."""


class LoadedModel:
    """One model of the pool: loading, in use, or idle."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.engine: Engine | None = None
        self.loading: asyncio.Task[Engine] | None = None
        self.listeners: list[Loading] = []
        self.users = 0
        self.used_at = 0.0
        self.memory = 0
        """Bytes that it has, or was promised."""
        self.waits_since: float | None = None
        """Since when it waits for room."""
        self.is_leaving = False

    @property
    def is_idle(self) -> bool:
        return self.engine is not None and not self.users and not self.is_leaving

    def tell(self, done: float, what: str) -> None:
        for listener in self.listeners:
            listener(done, what)


class ModelPool:
    """The models in memory."""

    def __init__(self, limit: int, idle: float, start: Start) -> None:
        self._limit = limit
        self._idle = idle
        self._start = start
        self._models: dict[EngineSpec, LoadedModel] = {}
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def engine(self, spec: EngineSpec) -> Engine | None:
        """The engine, if it is loaded."""
        model = self._models.get(spec)
        return model.engine if model is not None and not model.is_leaving else None

    def state(self, name: str) -> EngineState:
        """Of a model, whatever it is loaded for."""
        found = [one for one in self._models.values() if one.spec.model == name]
        if any(one.engine is not None and not one.is_leaving for one in found):
            return EngineState.READY
        return EngineState.LOADING if any(one.engine is None for one in found) else EngineState.GONE

    @asynccontextmanager
    async def use(
        self, spec: EngineSpec, on_progress: Loading | None = None
    ) -> AsyncGenerator[Engine, None]:
        """An engine that stays until it is left. Raises LlmFailure if there can't be one."""
        model = await self._take(spec, on_progress)
        assert model.engine is not None
        try:
            yield model.engine
        finally:
            self._release(model)

    async def unload(self, name: str) -> None:
        """Once it is not in use."""
        while found := [one for one in self._models.values() if one.spec.model == name]:
            for model in found:
                if model.is_idle:
                    await self._leave(model)
                    break
            else:
                await self._change.wait()

    async def close(self) -> None:
        self._is_closed = True
        loading = [model.loading for model in self._models.values() if model.loading is not None]
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await asyncio.gather(*(self._leave(model) for model in list(self._models.values())))
        await asyncio.gather(*self._tasks)

    # -- loading ---------------------------------------------------------------------------

    async def _take(self, spec: EngineSpec, on_progress: Loading | None) -> LoadedModel:
        while True:
            if self._is_closed:
                raise _closing()
            model = self._models.get(spec)
            if model is None:
                model = self._models[spec] = LoadedModel(spec)
                model.loading = asyncio.ensure_future(self._load(model))
                model.loading.add_done_callback(_looked_at)
            if model.engine is None:
                await self._await_loading(model, on_progress)
                return model
            if not model.engine.is_alive and not model.is_leaving:
                self._lost(model)
            elif model.is_leaving or self._somebody_waits_long(model):
                await self._change.wait()
            else:
                model.users += 1
                return model

    async def _await_loading(self, model: LoadedModel, on_progress: Loading | None) -> None:
        """Be one of its users from now on, so that it does not leave before it was used."""
        assert model.loading is not None
        model.users += 1
        if on_progress is not None:
            model.listeners.append(on_progress)
        try:
            await asyncio.shield(model.loading)
        except BaseException:
            self._release(model)
            if not model.loading.done() and not model.users:
                self._abandon(model, model.loading)
            elif model.loading.cancelled() and not _is_cancelled():
                raise _closing() from None
            raise
        finally:
            if on_progress is not None:
                model.listeners.remove(on_progress)

    def _release(self, model: LoadedModel) -> None:
        loop = asyncio.get_running_loop()
        model.users -= 1
        model.used_at = loop.time()
        if not model.users:
            self._changed()
            if self._idle:
                loop.call_later(self._idle, self._look_for_idle)

    async def _load(self, model: LoadedModel) -> Engine:
        try:
            await self._make_room(model)
            engine = await self._start(model.spec, model.tell)
        except LlmFailure as failure:
            self._give_up(model)
            raise EngineUnavailable(failure.code, failure.message, **failure.facts) from failure
        except OSError as error:  # as when there is no memory for another process
            self._give_up(model)
            raise EngineUnavailable(
                LlmCode.ENGINE_ERROR, f"the engine can't be started: {error}"
            ) from error
        except BaseException:
            self._give_up(model)
            raise
        model.engine = engine
        model.memory = engine.process.memory
        model.used_at = asyncio.get_running_loop().time()
        engine.process.gone.add_done_callback(lambda _: self._lost(model))
        self._changed()
        return engine

    async def _leave(self, model: LoadedModel) -> None:
        if model.is_leaving or model.engine is None:
            return
        model.is_leaving = True
        closing = self._spawn(model.engine.close())
        try:
            await asyncio.shield(closing)
        finally:
            if closing.done():
                self._give_up(model)
            else:  # whoever made it leave was cancelled, and it goes all the same
                closing.add_done_callback(lambda _: self._give_up(model))

    def _give_up(self, model: LoadedModel) -> None:
        if self._models.get(model.spec) is model:
            del self._models[model.spec]
        self._changed()

    def _abandon(self, model: LoadedModel, loading: asyncio.Task[Engine]) -> None:
        """Nobody waits for it any more."""

        async def ended() -> None:
            await asyncio.wait([loading])

        loading.cancel()
        self._give_up(model)
        self._spawn(ended())

    def _lost(self, model: LoadedModel) -> None:
        """Its process ended, whether we meant it to or not."""
        if model.is_leaving or self._models.get(model.spec) is not model:
            return
        self._give_up(model)  # what is left of it needs no memory, and another may come
        self._spawn(self._leave(model))

    # -- room ------------------------------------------------------------------------------

    async def _make_room(self, model: LoadedModel) -> None:
        need = model.spec.size.memory
        model.waits_since = asyncio.get_running_loop().time()
        try:
            while self._taken() + need > self._limit:
                idle = [one for one in self._models.values() if one.is_idle]
                if idle:
                    await self._leave(min(idle, key=lambda one: one.used_at))
                elif not self._taken():
                    raise too_large(model.spec.model, need, self._limit)
                else:
                    model.tell(0.0, "waiting for memory")
                    await self._change.wait()
            model.memory = need
        finally:
            model.waits_since = None

    def _taken(self) -> int:
        return sum(model.memory for model in self._models.values())

    def _somebody_waits_long(self, model: LoadedModel) -> bool:
        now = asyncio.get_running_loop().time()
        return any(
            one is not model and one.waits_since is not None and now - one.waits_since > _PATIENCE
            for one in self._models.values()
        )

    def _look_for_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        for model in list(self._models.values()):
            if model.is_idle and now - model.used_at >= self._idle - _TICK:
                self._spawn(self._leave(model))

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _closing() -> LlmFailure:
    return LlmFailure(LlmCode.ENGINE_ERROR, "the engine is being closed")


def _is_cancelled() -> bool:
    """Whether it is this task that is to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _looked_at(loading: asyncio.Task[Engine]) -> None:
    """Those who waited may be gone: then nobody is to be told how it ended."""
    if not loading.cancelled():
        loading.exception()
