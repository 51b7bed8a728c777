"""One loaded model: its process, the conversation with it, and what it can do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec

from penstock.workloads.llm.runner import Loading
from penstock.workloads.llm.values import (
    Generation,
    LlmCode,
    LlmFailure,
    Piece,
    Said,
    Usage,
)
from penstock.workloads.spool.llama import reasons, wire
from penstock.workloads.spool.llama.holding import check_held
from penstock.workloads.spool.llama.priming import PREFIX_FILE, prime
from penstock.workloads.spool.llama.process import EngineProcess, Purpose
from penstock.workloads.spool.llama.slots import Slots
from penstock.workloads.spool.llama.watchdog import Watchdog

_HOST = "http://llama"
_LOST = (aiohttp.ClientError, ConnectionError)
_DYING = 2.0
"""Seconds that a process which hung up may take to be gone."""


class Departed(Exception):
    """The process was gone before anything was asked of it: another one can be."""


class Engine:
    """Answers with one model, as many at once as it has slots."""

    def __init__(self, process: EngineProcess, stall: float) -> None:
        self.process = process
        self.purpose = process.purpose
        self.tools = self.vision = False
        self.context = self.purpose.size.context
        self._watchdog = Watchdog(stall, process.kill)
        self._room = asyncio.Semaphore(self.purpose.size.slots + self.purpose.waiting)
        self._slots = Slots(self.purpose.size.slots)
        self._under_way = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._session = aiohttp.ClientSession(
            # A connection that is kept may be closed by the other side just when it is used.
            connector=aiohttp.UnixConnector(str(process.socket), limit=0, force_close=True),
            headers={"Authorization": f"Bearer {process.key}", "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @classmethod
    async def start(cls, purpose: Purpose, told: Loading, timeout: float, stall: float) -> Engine:
        """Raises LlmFailure with nothing left behind."""
        process = EngineProcess(purpose)
        try:
            await process.start(told, timeout)
            engine = cls(process, stall)
        except BaseException:
            await process.close()
            raise
        try:
            with engine._watchdog:
                await engine._look()
        except BaseException:
            await engine.close()
            raise
        told(1.0, "loaded")
        return engine

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    async def generate(
        self, ask: Generation, choice: int, tenant: str = ""
    ) -> AsyncGenerator[Piece | Said, None]:
        """Raises Departed if nothing came of it, not even a beginning."""
        self._check(ask)
        answer, is_held = wire.Answer(ask, choice), wire.is_held(ask)
        async with self._working(), self._slots.take(tenant) as slot:
            path, body = wire.request_of(ask, choice, slot)  # not before: many may wait here
            if (schema := wire.schema_check(ask)) is not None:
                await self._call(wire.TEMPLATE, schema, is_held=True)
            async with aclosing(self._events(path, body, is_held=is_held)) as events:
                async for event in events:
                    if (piece := answer.add(event)) is not None:
                        yield piece
        if not answer.is_done:
            raise await self._broken()
        yield answer.said()

    async def embed(self, text: str | tuple[int, ...]) -> tuple[tuple[float, ...], Usage]:
        """One text as a vector. Raises Departed as `generate` does."""
        async with self._working():
            reply = await self._call(wire.EMBEDDINGS, wire.embedding_request(text))
        return wire.embedded(reply)

    async def close(self) -> None:
        """End its process, and with it whatever it was answering."""
        self._watchdog.close()
        await self.process.close()
        # Those who read must hear of the end first: a closed session tells them nothing.
        with suppress(TimeoutError):
            async with asyncio.timeout(_DYING):
                await self._is_quiet.wait()
        await self._session.close()

    def _check(self, ask: Generation) -> None:
        check_held(ask)
        if wire.wants_tools(ask) and not self.tools:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                f"the chat template of {self.purpose.model} knows no tools",
            )
        if wire.has_images(ask) and not self.vision:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                f"{self.purpose.model} can't see: there is no projector (mmproj) beside its file",
            )

    async def _look(self) -> None:
        """What its template and its projector allow."""
        props = await self._call("/props")
        self.context = props.get("default_generation_settings", {}).get("n_ctx", self.context)
        self.tools = bool(props.get("chat_template_caps", {}).get("supports_tools"))
        self.vision = bool(props.get("modalities", {}).get("vision"))
        if not self.purpose.embedding:
            await prime(self._call, self.purpose.size.slots)
            self.process.beside(PREFIX_FILE).unlink(missing_ok=True)
        if not self.is_alive:
            raise await self._broken()

    @asynccontextmanager
    async def _working(self) -> AsyncGenerator[None, None]:
        async with self._room:
            if not self.is_alive:
                raise Departed
            if not self._under_way:
                self.process.begin_answer()
            self._under_way += 1
            self._is_quiet.clear()
            try:
                with self._watchdog:
                    yield
            finally:
                self._under_way -= 1
                if not self._under_way:
                    self._is_quiet.set()

    async def _events(
        self, path: str, body: bytes, *, is_held: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Everything that it says to one request. Leaving ends the computation."""
        events = wire.Events()
        try:
            async with self._session.post(_HOST + path, data=body) as response:
                if response.status != 200:
                    raise _refused(response.status, await response.read(), is_held=is_held)
                async for data in response.content.iter_any():
                    for event in events.feed(data):
                        self._watchdog.sign()
                        if "error" in event:
                            raise reasons.of_reply(500, event, is_held=is_held)
                        yield event
        except _LOST as lost:
            raise await self._broken() from lost

    async def _call(
        self, path: str, body: bytes | None = None, *, is_held: bool = False
    ) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, _HOST + path, data=body) as response:
                data = await response.read()
        except _LOST as lost:
            raise await self._broken() from lost
        self._watchdog.sign()
        if response.status != 200:
            raise _refused(response.status, data, is_held=is_held)
        reply: dict[str, Any] = msgspec.json.decode(data)
        return reply

    async def _broken(self) -> LlmFailure:
        try:
            async with asyncio.timeout(_DYING):
                death = await self.process.death()
        except TimeoutError:
            return LlmFailure(
                LlmCode.ENGINE_CRASHED, f"the engine of {self.purpose.model} hung up on an answer"
            )
        if self._watchdog.has_bitten:
            return reasons.of_stall(self.purpose.model, self._watchdog.patience)
        return death


def _refused(status: int, data: bytes, *, is_held: bool) -> LlmFailure:
    try:
        reply = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        reply = {"message": data.decode("utf-8", "replace") or f"status {status}"}
    return reasons.of_reply(status, reply, is_held=is_held)
