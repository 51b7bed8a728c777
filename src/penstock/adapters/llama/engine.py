"""One loaded model: its process, the conversation with it, and what it can do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from itertools import takewhile
from typing import Any

import aiohttp
import msgspec

from penstock.adapters.llama import failures, protocol
from penstock.adapters.llama.process import EngineProcess, EngineSpec
from penstock.workloads.llm.runner import Loading
from penstock.workloads.llm.tools import wants_tools
from penstock.workloads.llm.values import (
    AudioPart,
    Completion,
    Delta,
    GenerationRequest,
    ImagePart,
    LlmCode,
    LlmFailure,
    TokenizeRequest,
    Usage,
)

log = logging.getLogger(__name__)

Call = Callable[[str, bytes], Awaitable[dict[str, Any]]]
_HOST = "http://llama"
_PREFIX_FILE = "prefix"
_SHORTEST_PREFIX = 8
"""Characters of a template that are worth sharing."""
_encode = msgspec.json.encode
_LOST = (aiohttp.ClientError, ConnectionError)
_NONSENSE = (
    *(msgspec.DecodeError, ValueError, RecursionError),
    *(LookupError, TypeError, AttributeError),
)
_DYING = 2.0
"""Seconds that a process which hung up may take to be gone."""


class Departed(Exception):
    """The process was gone before anything was asked of it: another one can be."""


class Engine:
    """Answers with one model, as many at once as it has slots."""

    def __init__(self, process: EngineProcess, stall: float) -> None:
        self.process = process
        self.spec = process.spec
        self.tools = self.vision = self.audio = False
        self.context = self.spec.size.context
        self._watchdog = Watchdog(stall, process.kill)
        self._room = asyncio.Semaphore(self.spec.size.slots + self.spec.waiting)
        self._slots = Slots(self.spec.size.slots)
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
    async def start(
        cls, spec: EngineSpec, on_progress: Loading, timeout: float, stall: float
    ) -> Engine:
        """Raises LlmFailure with nothing left behind."""
        process = EngineProcess(spec)
        try:
            await process.start(on_progress, timeout)
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
        on_progress(1.0, "loaded")
        return engine

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    async def generate(
        self, ask: GenerationRequest, choice: int, tenant: str = ""
    ) -> AsyncGenerator[Delta | Completion, None]:
        """Raises Departed if nothing came of it, not even a beginning."""
        self._check(ask)
        answer, is_constrained = protocol.AnswerReader(ask, choice), protocol.is_constrained(ask)
        async with self._working(), self._slots.take(tenant) as slot:
            path, body = protocol.request_of(ask, choice, slot)  # not before: many may wait here
            if (schema := protocol.schema_check(ask)) is not None:
                await self._call(protocol.TEMPLATE, schema, is_constrained=True)
            events = self._events(path, body, is_constrained=is_constrained)
            with self._understood():
                async with aclosing(events):
                    async for event in events:
                        if (piece := answer.add(event)) is not None:
                            yield piece
        if not answer.is_done:
            raise await self._broken()
        with self._understood():
            said = answer.said()
        protocol.check_guided(ask, said.choice)
        yield said

    async def embed(self, text: str | tuple[int, ...]) -> tuple[tuple[float, ...], Usage]:
        """One text as a vector. Raises Departed as `generate` does."""
        async with self._working():
            reply = await self._call(protocol.EMBEDDINGS, protocol.embedding_request(text))
        with self._understood():
            return protocol.embedded(reply)

    async def tokenize(self, ask: TokenizeRequest) -> tuple[tuple[int, ...], str]:
        """Tokens, and the text that they are of. Raises Departed as `generate` does."""
        async with self._working():
            text, tokens = ask.text or "", ask.tokens
            if ask.messages:
                template = protocol.template_request(ask.messages)
                reply = await self._call(protocol.TEMPLATE, template)
                with self._understood():
                    text = str(reply["prompt"])
            path, body = protocol.tokenize_request(text, ask)
            reply = await self._call(path, body)
            with self._understood():
                if tokens:
                    text = str(reply["content"])
                else:
                    tokens = tuple(reply["tokens"])
        return tokens, text

    async def close(self) -> None:
        """End its process, and with it whatever it was answering."""
        self._watchdog.close()
        await self.process.close()
        # Those who read must hear of the end first: a closed session tells them nothing.
        with suppress(TimeoutError):
            async with asyncio.timeout(_DYING):
                await self._is_quiet.wait()
        await self._session.close()

    def _check(self, ask: GenerationRequest) -> None:
        protocol.check_constraints(ask)
        if wants_tools(ask) and not self.tools:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                f"the chat template of {self.spec.model} does not support tools",
                tools=False,
            )
        if protocol.has_part(ask, AudioPart) and not self.audio:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                f"{self.spec.model} does not support audio: there is no audio projector"
                " (mmproj) beside its file",
            )
        if protocol.has_part(ask, ImagePart) and not self.vision:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                f"{self.spec.model} does not support images: there is no projector (mmproj)"
                " beside its file",
            )

    async def _look(self) -> None:
        """What its template and its projector allow."""
        props = await self._call("/props")
        with self._understood():
            self.context = props.get("default_generation_settings", {}).get("n_ctx", self.context)
            self.tools = bool(props.get("chat_template_caps", {}).get("supports_tools"))
            self.vision = bool(props.get("modalities", {}).get("vision"))
            self.audio = bool(props.get("modalities", {}).get("audio"))
        if not self.spec.embedding:
            with self._understood():
                await prime(self._call, self.spec.size.slots)
            self.process.beside(_PREFIX_FILE).unlink(missing_ok=True)
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
        self, path: str, body: bytes, *, is_constrained: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Everything that it says to one request. Leaving ends the computation."""
        events = protocol.EventParser()
        try:
            async with self._session.post(_HOST + path, data=body) as response:
                if response.status != 200:
                    raise _refused(
                        response.status, await response.read(), is_constrained=is_constrained
                    )
                async for data in response.content.iter_any():
                    for event in events.feed(data):
                        self._watchdog.sign()
                        if "error" in event:
                            raise failures.of_reply(500, event, is_constrained=is_constrained)
                        yield event
        except _LOST as lost:
            raise await self._broken() from lost

    async def _call(
        self, path: str, body: bytes | None = None, *, is_constrained: bool = False
    ) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, _HOST + path, data=body) as response:
                data = await response.read()
        except _LOST as lost:
            raise await self._broken() from lost
        self._watchdog.sign()
        with self._understood():
            if response.status != 200:
                raise _refused(response.status, data, is_constrained=is_constrained)
            reply: dict[str, Any] = msgspec.json.decode(data)
        return reply

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Raises ENGINE_ERROR for an answer that is not what llama.cpp says, as of a version that
        we don't know."""
        try:
            yield
        except _NONSENSE as error:
            raise LlmFailure(
                LlmCode.ENGINE_ERROR,
                f"the engine of {self.spec.model} said what can't be understood: {error!r}"[:500],
            ) from error

    async def _broken(self) -> LlmFailure:
        try:
            async with asyncio.timeout(_DYING):
                death = await self.process.death()
        except TimeoutError:
            return LlmFailure(
                LlmCode.ENGINE_CRASHED, f"the engine of {self.spec.model} hung up on an answer"
            )
        if self._watchdog.has_bitten:
            return failures.of_stall(self.spec.model, self._watchdog.patience)
        return death


def _refused(status: int, data: bytes, *, is_constrained: bool) -> LlmFailure:
    try:
        reply = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        reply = {"message": data.decode("utf-8", "replace") or f"status {status}"}
    return failures.of_reply(status, reply, is_constrained=is_constrained)


class Watchdog:
    """Awake while it is entered, by however many at once; a sign to one is a sign to all."""

    def __init__(self, patience: float, bite: Callable[[], None]) -> None:
        self.patience = patience
        """Seconds; 0 means for ever."""
        self.has_bitten = False
        self._bite = bite
        self._loop = asyncio.get_running_loop()
        self._awake = 0
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def sign(self) -> None:
        self._last = self._loop.time()

    def __enter__(self) -> None:
        self._awake += 1
        if self._awake == 1:
            self.sign()
        if self._timer is None and self.patience:
            self._timer = self._loop.call_later(self.patience, self._look)

    def __exit__(self, *_: object) -> None:
        self._awake -= 1

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._awake:
            return
        left = self._last + self.patience - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.has_bitten = True
            self._bite()


async def prime(call: Call, slots: int) -> None:
    """Compute the common beginning of all templated prompts once, and give it to every slot.

    llama.cpp reuses what a slot has computed, but each slot computes its own first. So the first
    one does, its state goes through a file, and the others begin with it. If it fails, only speed
    is lost.
    """
    try:
        prefix = _shared(await _templated(call, "a"), await _templated(call, "Z"))
        if slots > 1 and len(prefix) >= _SHORTEST_PREFIX:
            await _share(call, prefix, slots)
    except LlmFailure as failure:
        log.debug("slots begin without the template: %s", failure)


def _shared(one: str, other: str) -> str:
    """How both begin."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in same)


async def _templated(call: Call, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}]}
    return str((await call("/apply-template", _encode(body)))["prompt"])


async def _share(call: Call, prefix: str, slots: int) -> None:
    body = {"prompt": prefix, "n_predict": 0, "id_slot": 0, "cache_prompt": True}
    await call("/completion", _encode(body))
    file = _encode({"filename": _PREFIX_FILE})
    await call("/slots/0?action=save", file)
    for slot in range(1, slots):
        await call(f"/slots/{slot}?action=restore", file)


class Slots:
    """While only one tenant asks, llama.cpp chooses its slots itself. As soon as there is a second
    one, each answer gets its slot from here."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        """The one that was used last comes last."""
        self._room = asyncio.Semaphore(count)
        self._owners: dict[int, str] = {}
        self._first: str | None = None
        self._unassigned = 0
        self._assigned = asyncio.Event()
        """There is no answer any more for which llama.cpp has chosen the slot."""
        self._assigned.set()
        self._has_several = False

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[dict[str, Any]]:
        """The fields of a request that say which slot it uses, and whether what the slot holds."""
        if self._first is None:
            self._first = tenant
        if tenant != self._first and not self._has_several:
            self._has_several = True
            self._owners = dict.fromkeys(self._free, self._first)
        if not self._has_several:
            self._unassigned += 1
            self._assigned.clear()
            try:
                yield {"cache_prompt": True}
            finally:
                self._unassigned -= 1
                if not self._unassigned:
                    self._assigned.set()
            return
        await self._assigned.wait()
        async with self._room:
            slot = self._choose(tenant)
            is_own = self._owners.get(slot) == tenant
            self._owners[slot] = tenant
            try:
                yield {"cache_prompt": is_own, "id_slot": slot}
            finally:
                self._free.append(slot)

    def _choose(self, tenant: str) -> int:
        """The tenant's own that was used last, else the one that was used longest ago."""
        own = [slot for slot in self._free if self._owners.get(slot) == tenant]
        slot = own[-1] if own else self._free[0]
        self._free.remove(slot)
        return slot
