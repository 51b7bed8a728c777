"""Follows one container from its start to its end: reads what it writes, whatever else happens.

An engine that goes away does not take its containers along for certain. It is looked for again
for a while; what the container wrote meanwhile may be lost, and the output says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from penstock.workloads.container.engine import (
    AttachSession,
    Chunk,
    ContainerEngine,
    ContainerNotFound,
    ContainerState,
    EngineError,
    EngineUnavailable,
    ExitStatus,
)
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.job import Stream
from penstock.workloads.container.timeouts import Late, done_within, drop, within

ENGINE_PATIENCE = 30.0
"""Seconds for which an engine may be away without its jobs being given up."""
_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_MOST_BREAKS = 10
"""So often in a row an engine may come back only to break off again."""
_CALL = 10.0
"""Seconds in which an engine that is there answers a simple question."""
_DOUBT = 0.1
"""Seconds in which a line that broke off is known to have done so."""
_LAST_WORDS = 2.0
"""Seconds in which the streams of a container that has ended come to their end."""

log = logging.getLogger(__name__)


class Lost(EngineUnavailable):
    """Nobody can tell what became of the container."""


class ContainerMonitor:
    """Call `attach`, then `exit`, then `finish`; `close` at any time, and always at last."""

    def __init__(
        self,
        engine: ContainerEngine,
        name: str,
        labels: Mapping[str, str],
        output: Output,
    ) -> None:
        self._engine, self._output = engine, output
        self._name, self._labels = name, labels
        self._attached: AttachSession | None = None
        self._reading: asyncio.Task[None] | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._let_go = self._unkept = False
        self._absent = ""
        """Who was not there while output may have been lost."""
        self._has_input = True
        self._broke: EngineUnavailable | None = None
        self._breaks = 0
        self._back_at = 0.0
        self.present = asyncio.Event()
        """Set while the engine answers, as far as is known."""
        self.present.set()

    async def attach(self, *, stdin: bool) -> None:
        """Take hold of its streams; from now on they are read."""
        await self._take_hold(self._engine.attach(self._name, stdin=stdin))

    async def _take_hold(self, attaching: Coroutine[Any, Any, AttachSession]) -> None:
        try:
            attached = await within(_CALL, attaching)
        except Late:
            raise EngineUnavailable(f"no answer to an attach for {_CALL:g} s") from None
        if self._attached is not None:
            self._attached.close()
        await drop(self._reading)
        self._attached = attached
        self._reading = asyncio.ensure_future(self._read(attached))

    async def resume(self) -> None:
        """Take hold of a container that runs, and was left alone for a while."""
        self._absent = "no worker was there"
        try:
            await self._attach_again()
        except EngineUnavailable as error:
            self._broke = error

    def feed(self, data: bytes) -> None:
        """Send it all, and then its end. A container that does not read holds up nothing."""
        if self._attached is not None and self._reading is not None:
            self._has_input = not data
            self._feeding = asyncio.ensure_future(self._feed(self._attached, self._reading, data))

    def broke_off(self, error: EngineUnavailable) -> None:
        """The engine went away while it was asked to start the container."""
        self._broke = error

    async def exit(self) -> ExitStatus:
        """How it ended, through absences of the engine. Raises Lost, EngineError."""
        while True:
            try:
                if self._broke is not None and not await self._come_back(self._broke):
                    # It has ended: an engine that is there can say how.
                    return await within(_CALL, self._exit_or_break())
                return await self._exit_or_break()
            except Late:
                self._broke = EngineUnavailable(f"no answer to a wait for {_CALL:g} s")
            except ContainerNotFound:
                raise Lost("the container is gone; it was removed from outside") from None
            except Lost:
                raise
            except EngineUnavailable as error:
                self._broke = error

    async def finish(self) -> None:
        """After its end: take its last words, but wait only a little for them."""
        if self._reading is not None:
            await done_within(_LAST_WORDS, self._reading)
        await self.close()

    def let_go(self) -> None:
        """Close its streams at once, and leave them closed; the container goes on."""
        self._let_go = True
        if self._attached is not None:
            self._attached.close()

    async def close(self) -> None:
        self.let_go()
        await drop(self._reading, self._feeding)

    async def _read(self, attached: AttachSession) -> None:
        try:
            async for chunk in attached.output():
                if chunk.gap:
                    self._tell_gap(self._absent)
                if chunk.data:
                    self._keep(chunk)
        except (EngineError, OSError) as error:
            raise EngineUnavailable(f"its streams broke off: {error}") from error

    async def _feed(
        self, attached: AttachSession, reading: asyncio.Future[None], data: bytes
    ) -> None:
        try:
            if data:
                await attached.send(data)
            await attached.end_input()
        except (EngineError, OSError) as error:
            log.info("%s did not take all of its input: %s", self._name, error)
            return
        # To send to an engine that has just died looks like success for a moment.
        doubtful = await done_within(_DOUBT, reading)
        self._has_input = not (data and doubtful)

    def _keep(self, chunk: Chunk) -> None:
        try:
            self._output.write(chunk.stream, chunk.data)
        except Exception:
            # A disk that is full must not make the container stand still.
            if not self._unkept:
                log.exception("output of %s can't be kept", self._name)
            self._unkept = True
            self._note_gap()

    def _tell_gap(self, why: str) -> None:
        """Where it belongs, among what the job itself wrote to be read by people."""
        self._note_gap()
        with suppress(Exception):
            line = f"[what was written here while {why} may be missing]\n"
            self._output.write(Stream.STDERR, line.encode())

    def _note_gap(self) -> None:
        with suppress(OSError):
            self._output.missed()

    async def _exit_or_break(self) -> ExitStatus:
        """Raises EngineUnavailable also when only the streams broke off."""
        waiting = asyncio.ensure_future(self._engine.wait(self._name))
        try:
            if self._reading is not None:
                both = (waiting, self._reading)
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done() and not self._let_go:
                    self._reading.result()
            return await waiting
        finally:
            await drop(waiting)

    async def _come_back(self, error: EngineUnavailable) -> bool:
        """Wait for the engine, and take hold of the container again. Whether it still runs."""
        now = asyncio.get_running_loop().time()
        self._breaks = self._breaks + 1 if now - self._back_at < ENGINE_PATIENCE else 1
        if self._breaks > _MOST_BREAKS:
            raise Lost(f"the container engine breaks off again and again: {error}") from error
        self.present.clear()
        state = await self._look_for_it(error, now + ENGINE_PATIENCE)
        if state is None:
            raise Lost("the container engine was away, and came back without the container")
        if state is ContainerState.CREATED:
            raise Lost(f"the container engine went away before it started the container: {error}")
        if state is ContainerState.RUNNING and not self._has_input:
            raise Lost(f"the container engine went away before the job had its input: {error}")
        if state is ContainerState.RUNNING:
            self.present.set()  # of one that has ended, the exit status comes first
        self._back_at = asyncio.get_running_loop().time()
        self._absent = "the container engine was away"
        if not self._let_go:
            await self._attach_again()
        return state is ContainerState.RUNNING

    async def _attach_again(self) -> None:
        counts = {stream: self._output.count(stream) for stream in Stream}
        if any(count.gap for count in counts.values()):
            self._tell_gap(self._absent)  # offsets are not exact any more
        received = {stream: count.bytes for stream, count in counts.items()}
        try:
            await self._take_hold(self._engine.reattach(self._name, received))
        except EngineUnavailable:
            raise
        except EngineError as error:  # it may have ended just now, and then there is nothing
            log.info("no more output of %s: %s", self._name, error)
            await drop(self._reading)
            self._reading = None

    async def _look_for_it(self, error: EngineUnavailable, until: float) -> ContainerState | None:
        pause = min(_PAUSE * 2**self._breaks, _LONGEST_PAUSE)
        while True:
            await asyncio.sleep(pause)
            try:
                return await state_of(self._engine, self._name, self._labels)
            except EngineUnavailable as again:
                error = again
            if asyncio.get_running_loop().time() >= until:
                raise Lost(
                    f"the container engine did not answer for {ENGINE_PATIENCE:g} s while the job "
                    f"ran, so its outcome is unknown: {error}"
                ) from error
            pause = min(pause * 2, _LONGEST_PAUSE)


async def state_of(
    engine: ContainerEngine, name: str, labels: Mapping[str, str]
) -> ContainerState | None:
    """None if the engine has no such container."""
    try:
        found = await within(_CALL, engine.find(labels))
    except Late:
        raise EngineUnavailable(f"no answer for {_CALL:g} s") from None
    return next((one.state for one in found if one.name == name), None)
