"""Answers as server-sent events, each piece as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from penstock.api.openai.answers import Chunk
from penstock.api.openai.errors import OpenAiError, tell
from penstock.api.openai.model_job import ModelJob
from penstock.api.openai.retelling import Heard
from penstock.api.openai.voices import Voice
from penstock.api.reply import encode
from penstock.core.errors import PenstockError
from penstock.workloads.llm.values import LlmResult

_DONE = b"data: [DONE]\n\n"


async def events(job: ModelJob, voice: Voice) -> AsyncGenerator[bytes, None]:
    """The first item is empty: it says that there is something to tell. What goes wrong before is
    raised, so that it can have a status; what goes wrong afterwards is an event, and the last.
    """
    heard, begun = Heard(), False
    try:
        async with aclosing(job.pieces()) as pieces:
            async for attempt, piece in pieces:
                if not begun:
                    begun = True
                    yield b""
                if frames := _frames(voice.pieces(heard.take(attempt, piece))):
                    yield frames
        result = await job.answer(LlmResult)
        if not begun:
            begun = True
            yield b""
        chunks: list[Chunk] = []
        rest = heard.finish(job.attempt, result.choices)
        for piece, choice in zip(rest, result.choices, strict=True):
            chunks += voice.pieces(piece)
            chunks += voice.end(piece.choice, choice)
        chunks += voice.usage(result)
        yield _frames(chunks) + _DONE
    except PenstockError as error:
        if not begun:
            raise
        yield b"data: %b\n\n" % encode(OpenAiError(tell(error).fault))
    finally:
        await job.leave()


def _frames(chunks: Iterable[Chunk]) -> bytes:
    return b"".join([b"data: %b\n\n" % encode(chunk) for chunk in chunks])
