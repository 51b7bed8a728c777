"""Several models in one memory: loaded when they are asked for, unloaded when room is needed.

Who is used stays. When a model needs room, those that nobody uses leave, the longest unused
first; when all are used, it waits, and after a while newcomers to the others wait behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from penstock.workloads.llm.runner import Loading
from penstock.workloads.llm.values import EngineUnavailable, LlmCode, LlmFailure
from penstock.workloads.spool.llama.engine import Engine
from penstock.workloads.spool.llama.process import Purpose
from penstock.workloads.spool.llama.sizing import too_large

Start = Callable[[Purpose, Loading], Awaitable[Engine]]
_PATIENCE = 5.0
"""Seconds that one which needs room lets newcomers to the others go first."""
_YOUNG = 10.0
"""An engine that died before it was so many seconds old died at once."""
_LONGEST_BACKOFF = 10.0
_TICK = 0.01
"""Seconds by which a timer may be early."""


class Seat:
    """The place of one model: while it is loaded, in use, or idle."""

    def __init__(self, purpose: Purpose) -> None:
        self.purpose = purpose
        self.engine: Engine | None = None
        self.loading: asyncio.Task[Engine] | None = None
        self.listeners: list[Loading] = []
        self.users = 0
        self.used_at = self.loaded_at = 0.0
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


class Fleet:
    """The models in memory."""

    def __init__(self, limit: int, idle: float, start: Start) -> None:
        self._limit = limit
        self._idle = idle
        self._start = start
        self._seats: dict[Purpose, Seat] = {}
        self._deaths: dict[Purpose, tuple[int, float]] = {}
        """How often in a row one died at once, and when it last did."""
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def engine(self, purpose: Purpose) -> Engine | None:
        """The engine, if it is loaded."""
        seat = self._seats.get(purpose)
        return seat.engine if seat is not None and not seat.is_leaving else None

    @asynccontextmanager
    async def use(
        self, purpose: Purpose, told: Loading | None = None
    ) -> AsyncGenerator[Engine, None]:
        """An engine that stays until it is left. Raises LlmFailure if there can't be one."""
        seat = await self._take(purpose, told)
        assert seat.engine is not None
        try:
            yield seat.engine
        finally:
            self._release(seat)

    async def unload(self, model: str) -> None:
        """Once it is not in use."""
        while seats := [seat for seat in self._seats.values() if seat.purpose.model == model]:
            for seat in seats:
                if seat.is_idle:
                    await self._leave(seat)
                    break
            else:
                await self._change.wait()

    async def close(self) -> None:
        self._is_closed = True
        loading = [seat.loading for seat in self._seats.values() if seat.loading is not None]
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await asyncio.gather(*(self._leave(seat) for seat in list(self._seats.values())))
        await asyncio.gather(*self._tasks)

    # -- who is seated ---------------------------------------------------------------------

    async def _take(self, purpose: Purpose, told: Loading | None) -> Seat:
        while True:
            if self._is_closed:
                raise _closing()
            seat = self._seats.get(purpose)
            if seat is None:
                seat = self._seats[purpose] = Seat(purpose)
                seat.loading = asyncio.ensure_future(self._load(seat))
                seat.loading.add_done_callback(_looked_at)
            if seat.engine is None:
                await self._await_loading(seat, told)
                return seat
            if not seat.engine.is_alive and not seat.is_leaving:
                self._lost(seat)
            elif seat.is_leaving or self._somebody_waits_long(seat):
                await self._change.wait()
            else:
                seat.users += 1
                return seat

    async def _await_loading(self, seat: Seat, told: Loading | None) -> None:
        """Be one of its users from now on, so that it does not leave before it was used."""
        assert seat.loading is not None
        seat.users += 1
        if told is not None:
            seat.listeners.append(told)
        try:
            await asyncio.shield(seat.loading)
        except BaseException:
            self._release(seat)
            if not seat.loading.done() and not seat.users:
                self._abandon(seat, seat.loading)
            elif seat.loading.cancelled() and not _is_cancelled():
                raise _closing() from None
            raise
        finally:
            if told is not None:
                seat.listeners.remove(told)

    def _release(self, seat: Seat) -> None:
        loop = asyncio.get_running_loop()
        seat.users -= 1
        seat.used_at = loop.time()
        if not seat.users:
            self._changed()
            if self._idle:
                loop.call_later(self._idle, self._look_for_idle)

    async def _load(self, seat: Seat) -> Engine:
        try:
            await self._back_off(seat.purpose)
            await self._make_room(seat)
            engine = await self._start(seat.purpose, seat.tell)
        except LlmFailure as failure:
            self._give_up(seat)
            raise EngineUnavailable(failure.code, failure.message, **failure.facts) from failure
        except OSError as error:  # as when there is no memory for another process
            self._give_up(seat)
            raise EngineUnavailable(
                LlmCode.ENGINE_ERROR, f"the engine can't be started: {error}"
            ) from error
        except BaseException:
            self._give_up(seat)
            raise
        loop = asyncio.get_running_loop()
        seat.engine = engine
        seat.memory = engine.process.memory
        seat.loaded_at = seat.used_at = loop.time()
        engine.process.gone.add_done_callback(lambda _: self._lost(seat))
        self._changed()
        return engine

    async def _leave(self, seat: Seat) -> None:
        if seat.is_leaving or seat.engine is None:
            return
        seat.is_leaving = True
        closing = self._spawn(seat.engine.close())
        try:
            await asyncio.shield(closing)
        finally:
            if closing.done():
                self._give_up(seat)
            else:  # whoever made it leave was cancelled, and it goes all the same
                closing.add_done_callback(lambda _: self._give_up(seat))

    def _give_up(self, seat: Seat) -> None:
        if self._seats.get(seat.purpose) is seat:
            del self._seats[seat.purpose]
        self._changed()

    def _abandon(self, seat: Seat, loading: asyncio.Task[Engine]) -> None:
        """Nobody waits for it any more."""

        async def ended() -> None:
            await asyncio.wait([loading])

        loading.cancel()
        self._give_up(seat)
        self._spawn(ended())

    def _lost(self, seat: Seat) -> None:
        """Its process ended, whether we meant it to or not."""
        if seat.is_leaving or self._seats.get(seat.purpose) is not seat:
            return
        now = asyncio.get_running_loop().time()
        row = self._deaths.get(seat.purpose, (0, 0.0))[0]
        died_at_once = now - seat.loaded_at < _YOUNG
        self._deaths[seat.purpose] = (row + 1 if died_at_once else 0, now)
        self._give_up(seat)  # what is left of it needs no memory, and another may come
        self._spawn(self._leave(seat))

    async def _back_off(self, purpose: Purpose) -> None:
        """The first that dies is followed at once; those that die in a row, later and later."""
        row, when = self._deaths.get(purpose, (0, 0.0))
        left = when + back_off(row) - asyncio.get_running_loop().time()
        if row and left > 0:
            await asyncio.sleep(left)

    # -- room ------------------------------------------------------------------------------

    async def _make_room(self, seat: Seat) -> None:
        need = seat.purpose.size.memory
        seat.waits_since = asyncio.get_running_loop().time()
        try:
            while self._taken() + need > self._limit:
                idle = [one for one in self._seats.values() if one.is_idle]
                if idle:
                    await self._leave(min(idle, key=lambda one: one.used_at))
                elif not self._taken():
                    raise too_large(seat.purpose.model, need, self._limit)
                else:
                    seat.tell(0.0, "waiting for memory")
                    await self._change.wait()
            seat.memory = need
        finally:
            seat.waits_since = None

    def _taken(self) -> int:
        return sum(seat.memory for seat in self._seats.values())

    def _somebody_waits_long(self, seat: Seat) -> bool:
        now = asyncio.get_running_loop().time()
        return any(
            one is not seat and one.waits_since is not None and now - one.waits_since > _PATIENCE
            for one in self._seats.values()
        )

    def _look_for_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        for seat in list(self._seats.values()):
            if seat.is_idle and now - seat.used_at >= self._idle - _TICK:
                self._spawn(self._leave(seat))

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def back_off(row: int) -> float:
    """Seconds before the next one is started, after so many that died at once."""
    return min(_LONGEST_BACKOFF, 0.25 * 2.0 ** min(row - 2, 10)) if row > 1 else 0.0


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
