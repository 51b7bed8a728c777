"""How an answer is told in chunks, as a chat or as a completion."""

from __future__ import annotations

from typing import Protocol

from msgspec import UNSET, UnsetType

from penstock.api.openai.answers import (
    ChatDelta,
    Chunk,
    ChunkChoice,
    FunctionDelta,
    TextChoice,
    TokenUsage,
    ToolCallDelta,
)
from penstock.api.openai.bodies import ChatBody, CompletionBody, Generating
from penstock.api.openai.telling import Origin, chat_logprobs, echoed, legacy_logprobs
from penstock.workloads.llm.values import Choice, LlmResult, Piece, ToolDelta


class Voice(Protocol):
    def pieces(self, piece: Piece) -> list[Chunk]:
        """What a piece says; nothing if nothing of it is to be told."""

    def end(self, index: int, choice: Choice) -> list[Chunk]:
        """The last of one answer: why it ended."""

    def usage(self, result: LlmResult) -> list[Chunk]:
        """The tokens that all of them took, where that was asked for."""


class Chunks:
    """What every chunk of one answer has."""

    def __init__(self, name: str, kind: str, body: Generating, origin: Origin) -> None:
        self._id, self._kind = f"{name}-{origin.job_id}", kind
        self._created, self._model = origin.created, origin.model
        options = body.stream_options
        self._usage = options is not None and bool(options.include_usage)
        self._none: UnsetType | None = None if self._usage else UNSET

    def of(self, choice: ChunkChoice | TextChoice, fingerprint: str | UnsetType = UNSET) -> Chunk:
        return Chunk(
            id=self._id,
            object=self._kind,
            created=self._created,
            model=self._model,
            choices=(choice,),
            usage=self._none,
            system_fingerprint=fingerprint,
        )

    def usage(self, result: LlmResult) -> list[Chunk]:
        if not self._usage:
            return []
        used = Chunk(
            id=self._id,
            object=self._kind,
            created=self._created,
            model=self._model,
            choices=(),
            usage=TokenUsage.of(result.usage),
            system_fingerprint=result.engine,
        )
        return [used]


class ChatVoice:
    """See `Voice`."""

    def __init__(self, body: ChatBody, origin: Origin) -> None:
        self._body = body
        self._chunks = Chunks("chatcmpl", "chat.completion.chunk", body, origin)
        self._begun: set[int] = set()

    def pieces(self, piece: Piece) -> list[Chunk]:
        index = piece.choice
        told = [] if index in self._begun else [self._opening(index)]
        calls = tuple(_call(call) for call in piece.tool_calls if self._wanted(call))
        if piece.text or piece.reasoning or calls or piece.logprobs:
            delta = ChatDelta(
                content=piece.text or (UNSET if piece.reasoning or calls else ""),
                reasoning_content=piece.reasoning or UNSET,
                tool_calls=calls or UNSET,
            )
            logprobs = chat_logprobs(piece.logprobs) if self._body.logprobs else None
            told.append(self._chunks.of(ChunkChoice(index=index, delta=delta, logprobs=logprobs)))
        return told

    def _opening(self, index: int) -> Chunk:
        self._begun.add(index)
        delta = ChatDelta(role="assistant", content="")
        return self._chunks.of(ChunkChoice(index=index, delta=delta))

    def _wanted(self, call: ToolDelta) -> bool:
        said = bool(call.name or call.id or call.arguments)
        return said and not (call.index and self._body.parallel_tool_calls is False)

    def end(self, index: int, choice: Choice) -> list[Chunk]:
        last = ChunkChoice(index=index, delta=ChatDelta(), finish_reason=choice.finish_reason)
        return [self._chunks.of(last)]

    def usage(self, result: LlmResult) -> list[Chunk]:
        return self._chunks.usage(result)


def _call(delta: ToolDelta) -> ToolCallDelta:
    function = FunctionDelta(name=delta.name or UNSET, arguments=delta.arguments)
    kind: str | UnsetType = "function" if delta.name else UNSET
    return ToolCallDelta(index=delta.index, id=delta.id or UNSET, type=kind, function=function)


class TextVoice:
    """See `Voice`."""

    def __init__(self, body: CompletionBody, origin: Origin) -> None:
        self._body = body
        self._chunks = Chunks("cmpl", "text_completion", body, origin)
        self._begun: dict[int, int] = {}
        """Of each answer, how much of its text has logprobs already."""

    def pieces(self, piece: Piece) -> list[Chunk]:
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
        return [self._chunks.of(TextChoice(text=text, index=index, logprobs=logprobs))]

    def end(self, index: int, choice: Choice) -> list[Chunk]:
        last = TextChoice(text="", index=index, finish_reason=choice.finish_reason)
        return [self._chunks.of(last)]

    def usage(self, result: LlmResult) -> list[Chunk]:
        return self._chunks.usage(result)
