"""Answers in parts: server-sent events of chats and completions, and the loop that sends them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Protocol

from msgspec import UNSET, UnsetType

from penstock.api.openai.answers import (
    ChatDelta,
    Chunk,
    ChunkChoice,
    FunctionDelta,
    JobOrigin,
    TextChoice,
    TokenUsage,
    ToolCallDelta,
    chat_logprobs,
    echoed,
    legacy_logprobs,
)
from penstock.api.openai.errors import OpenAiError, tell
from penstock.api.openai.model_job import ModelJob
from penstock.api.openai.requests import ChatBody, CompletionBody, Generating
from penstock.api.reply import EVENT_STREAM, Headers, encode
from penstock.api.stream import with_pauses
from penstock.core.errors import PenstockError
from penstock.workloads.llm.splice import StreamSplice
from penstock.workloads.llm.values import Choice, Delta, LlmResult, ToolDelta

COMMENT = b": waiting\n\n"
"""A server-sent event that clients skip."""


class StreamFormat(Protocol):
    """Writes one answer in parts."""

    headers: Headers
    heartbeat: bytes
    """Sent while nothing else is; empty if the format has no such thing."""

    def begin(self) -> bytes:
        """Before anything else."""

    def piece(self, piece: Delta) -> bytes: ...

    def finish(self, rest: list[Delta], result: LlmResult) -> bytes:
        """The end; `rest` is what no piece has said of each answer."""

    def fail(self, error: PenstockError) -> bytes:
        """An error after the beginning, in the place of an end."""


async def stream(
    job: ModelJob, writer: StreamFormat, heartbeat: float
) -> AsyncGenerator[bytes, None]:
    """The first item is empty: the answer begins, or a heartbeat is due. An error before it is
    raised and can have a status; a later one is part of the stream, and its end."""
    heard, begun = StreamSplice(), False
    try:
        async with aclosing(with_pauses(job.pieces(), heartbeat)) as pieces:
            async for update in pieces:
                job.check_deadline()
                if not begun:
                    begun = True
                    yield b""
                    if opening := writer.begin():
                        yield opening
                data = writer.heartbeat if update is None else writer.piece(heard.take(*update))
                if data:
                    yield data
        result = await job.answer(LlmResult)
        opening = b""
        if not begun:
            begun = True
            yield b""
            opening = writer.begin()
        rest = heard.finish(job.attempt, result.choices)
        yield opening + writer.finish(rest, result)
    except PenstockError as error:
        if not begun:
            raise
        yield writer.fail(error)
    finally:
        await job.leave()


# -- OpenAI's chunks ----------------------------------------------------------------


class _Chunks:
    """Server-sent events with the chunks of one answer."""

    headers = EVENT_STREAM
    heartbeat = COMMENT

    def __init__(self, name: str, kind: str, body: Generating, origin: JobOrigin) -> None:
        self._id, self._kind = f"{name}-{origin.job_id}", kind
        self._created, self._model = origin.created, origin.model
        options = body.stream_options
        self._usage = options is not None and bool(options.include_usage)
        self._none: UnsetType | None = None if self._usage else UNSET

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: Delta) -> bytes:
        return _frames(self.chunks(piece))

    def finish(self, rest: list[Delta], result: LlmResult) -> bytes:
        chunks: list[Chunk] = []
        for piece, choice in zip(rest, result.choices, strict=True):
            chunks += self.chunks(piece)
            chunks.append(self.last(piece.choice, choice))
        if self._usage:
            usage = TokenUsage.of(result.usage)
            chunks.append(self._chunk((), usage=usage, fingerprint=result.engine))
        return _frames(chunks) + b"data: [DONE]\n\n"

    def fail(self, error: PenstockError) -> bytes:
        return b"data: %b\n\n" % encode(OpenAiError(tell(error).fault))

    def chunks(self, piece: Delta) -> list[Chunk]:
        raise NotImplementedError

    def last(self, index: int, choice: Choice) -> Chunk:
        raise NotImplementedError

    def _chunk(
        self,
        choices: tuple[ChunkChoice | TextChoice, ...],
        *,
        usage: TokenUsage | UnsetType | None = UNSET,
        fingerprint: str | UnsetType = UNSET,
    ) -> Chunk:
        return Chunk(
            id=self._id,
            object=self._kind,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._none if usage is UNSET else usage,
            system_fingerprint=fingerprint,
        )


class ChatStream(_Chunks):
    """See `StreamFormat`."""

    def __init__(self, body: ChatBody, origin: JobOrigin) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk", body, origin)
        self._body = body
        self._begun: set[int] = set()

    def chunks(self, piece: Delta) -> list[Chunk]:
        index = piece.choice
        found = [] if index in self._begun else [self._opening(index)]
        calls = tuple(_call(call) for call in piece.tool_calls if self._is_wanted(call))
        if piece.text or piece.reasoning or calls or piece.logprobs:
            delta = ChatDelta(
                content=piece.text or (UNSET if piece.reasoning or calls else ""),
                reasoning_content=piece.reasoning or UNSET,
                tool_calls=calls or UNSET,
            )
            logprobs = chat_logprobs(piece.logprobs) if self._body.logprobs else None
            found.append(self._chunk((ChunkChoice(index=index, delta=delta, logprobs=logprobs),)))
        return found

    def _opening(self, index: int) -> Chunk:
        self._begun.add(index)
        delta = ChatDelta(role="assistant", content="")
        return self._chunk((ChunkChoice(index=index, delta=delta),))

    def _is_wanted(self, call: ToolDelta) -> bool:
        says = bool(call.name or call.id or call.arguments)
        return says and not (call.index and self._body.parallel_tool_calls is False)

    def last(self, index: int, choice: Choice) -> Chunk:
        end = ChunkChoice(index=index, delta=ChatDelta(), finish_reason=choice.finish_reason)
        return self._chunk((end,))


def _call(delta: ToolDelta) -> ToolCallDelta:
    function = FunctionDelta(name=delta.name or UNSET, arguments=delta.arguments)
    kind: str | UnsetType = "function" if delta.name else UNSET
    return ToolCallDelta(index=delta.index, id=delta.id or UNSET, type=kind, function=function)


class TextStream(_Chunks):
    """See `StreamFormat`."""

    def __init__(self, body: CompletionBody, origin: JobOrigin) -> None:
        super().__init__("cmpl", "text_completion", body, origin)
        self._body = body
        self._begun: dict[int, int] = {}
        """Of each answer, how much of its text has logprobs already."""

    def chunks(self, piece: Delta) -> list[Chunk]:
        index, text = piece.choice, piece.text
        if index not in self._begun:
            self._begun[index] = 0
            text = echoed(self._body, index) + text
        if not (text or piece.logprobs):
            return []
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = legacy_logprobs(piece.logprobs, self._begun[index])
            self._begun[index] += sum(len(one.token) for one in piece.logprobs)
        return [self._chunk((TextChoice(text=text, index=index, logprobs=logprobs),))]

    def last(self, index: int, choice: Choice) -> Chunk:
        end = TextChoice(text="", index=index, finish_reason=choice.finish_reason)
        return self._chunk((end,))


def _frames(chunks: Iterable[Chunk]) -> bytes:
    return b"".join([b"data: %b\n\n" % encode(chunk) for chunk in chunks])
