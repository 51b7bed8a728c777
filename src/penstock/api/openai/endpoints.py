"""The table of endpoints that answer with a model: how each request is read, what it asks of the
model, and how its answer is written, whole and in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.api.openai.answers import (
    ChatCompletion,
    EmbeddingList,
    JobOrigin,
    TextCompletion,
    chat_completion,
    embedding_list,
    text_completion,
)
from penstock.api.openai.errors import OpenAiError, job_headers, problem_reply
from penstock.api.openai.images import with_images
from penstock.api.openai.model_job import ModelJob, submit
from penstock.api.openai.requests import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    Parsed,
    read_request,
    refuse_ignored,
    request_of,
)
from penstock.api.openai.schemas import not_enforced
from penstock.api.openai.streams import ChatStream, StreamFormat, TextStream, stream
from penstock.api.operation import Operation, Pace
from penstock.api.problems import ProblemReply
from penstock.api.reply import JSON_HEADERS, AnyReply, Headers, Reply, StreamReply, encode
from penstock.ports.engine_api import KeyRole
from penstock.workloads.llm.values import EmbeddingResult, LlmRequest, LlmResult, TokenizeResult

if TYPE_CHECKING:
    from penstock.api.call import Call

WARNING = b"x-penstock-warning"
_MOST_VECTORS = 16
"""More are written in a thread: a thousand long ones take a second."""


class Endpoint(Struct, frozen=True, kw_only=True):
    """One way to ask a model."""

    path: str
    name: str
    """Of the operation."""
    body: type[Any]
    body_type: str = "application/json"
    read: Callable[[Call], Awaitable[Parsed]] | None = None
    """Reads a body that is no JSON."""
    request: Callable[[Any, Mapping[str, Any]], LlmRequest] = request_of
    """What a body, with options beyond its core, asks of the model. Raises InvalidRequest."""
    prepare: Callable[[Call, Parsed], Awaitable[Parsed]] | None = None
    """Completes a request with what only the engine knows."""
    labels: Callable[[Any], Mapping[str, str]] | None = None
    """Labels of its job, besides those that the body has."""
    result: type[LlmResult | EmbeddingResult | TokenizeResult] = LlmResult
    """What its job ends with."""
    answer: Any
    """What it answers with, for the documentation."""
    whole: Callable[[Any, JobOrigin, Any], Any]
    """The answer, made of the body and the result."""
    parts: Callable[[Any, JobOrigin], StreamFormat] | None = None
    """How it is written in parts."""
    stream_type: str = "text/event-stream"
    large: bool = True
    """Whether the body may be as large as an upload, as one with images."""
    problem: ProblemReply = problem_reply
    problem_kind: type[Struct] = OpenAiError
    summary: str
    description: str = ""

    def operation(self) -> Operation:
        async def handle(call: Call) -> AnyReply:
            parsed = await (call.json(self.body) if self.read is None else self.read(call))
            return await answer(call, self, parsed)

        return Operation(
            "POST",
            self.path,
            handle,
            name=self.name,
            role=KeyRole.SUBMIT,
            body=self.body,
            body_type=self.body_type,
            reader=read_request,
            large=self.large,
            answer=self.answer,
            other_types=() if self.parts is None else (self.stream_type,),
            refusals=(404, 408, 409, 429),
            problem=self.problem,
            problem_kind=self.problem_kind,
            pace=Pace.WAITS,
            summary=self.summary,
            description=self.description,
        )


async def answer(call: Call, endpoint: Endpoint, parsed: Parsed) -> AnyReply:
    """The answer to a request, whole or in parts."""
    body = parsed.body
    if parsed.ignored and call.services.options.openai_strict:
        refuse_ignored(endpoint.body, parsed)
    if endpoint.prepare is not None:
        parsed = await endpoint.prepare(call, parsed)
    request = await with_images(call, endpoint.request(body, parsed.options))
    labels = endpoint.labels(body) if endpoint.labels is not None else None
    job = await submit(call, body, request, labels)
    headers = (*job_headers(job.origin.job_id), *_warnings(parsed, request))
    if endpoint.parts is not None and getattr(request, "stream", False):
        return await _in_parts(call, job, endpoint.parts(body, job.origin), headers)
    try:
        with call.attending():
            result = await job.answer(endpoint.result)
    finally:
        await job.leave()
    if isinstance(result, EmbeddingResult) and len(result.vectors) > _MOST_VECTORS:
        written = await asyncio.to_thread(_written, endpoint, body, job, result)
    else:
        written = _written(endpoint, body, job, result)
    return Reply(written, 200, (*JSON_HEADERS, *headers))


def _written(endpoint: Endpoint, body: Any, job: ModelJob, result: Any) -> bytes:
    return encode(endpoint.whole(body, job.origin, result))


async def _in_parts(
    call: Call, job: ModelJob, writer: StreamFormat, headers: Headers
) -> StreamReply:
    content = stream(job, writer, call.services.options.heartbeat)
    try:
        with call.attending():
            await anext(content)
    except BaseException:
        await job.leave()  # a generator that never began does not run its end
        raise
    return StreamReply(content, (*writer.headers, *headers), counted=True, whole=True)


def _warnings(parsed: Parsed, request: LlmRequest) -> Headers:
    found = []
    if parsed.ignored:
        found.append("unknown fields are ignored: " + ", ".join(parsed.ignored))
    if loose := not_enforced(request):
        found.append("not enforced by the schema's grammar: " + ", ".join(loose))
    if not found:
        return ()
    text = "; ".join(found)[:1000].encode("ascii", "backslashreplace")
    return ((WARNING, bytes(byte for byte in text if 32 <= byte < 127)[:1000]),)


CHAT = Endpoint(
    path="/v1/chat/completions",
    name="create_chat_completion",
    body=ChatBody,
    answer=ChatCompletion,
    whole=chat_completion,
    parts=ChatStream,
    summary="Continue a conversation",
    description=(
        "As OpenAI's. The request is one job, named by the header `x-penstock-job`: the same "
        "rules, limits and journal hold as for any other. It is cancelled when the client "
        "leaves, unless there was an `Idempotency-Key`: the same request with the same key "
        "is answered with the same job then."
    ),
)
COMPLETIONS = Endpoint(
    path="/v1/completions",
    name="create_completion",
    body=CompletionBody,
    answer=TextCompletion,
    whole=text_completion,
    parts=TextStream,
    large=False,
    summary="Continue a text",
    description="As OpenAI's, without a chat template. One job, as for a chat.",
)
EMBEDDINGS = Endpoint(
    path="/v1/embeddings",
    name="create_embedding",
    body=EmbeddingBody,
    result=EmbeddingResult,
    answer=EmbeddingList,
    whole=embedding_list,
    large=False,
    summary="Turn texts into vectors",
    description="As OpenAI's; each vector has length one. One job, as for a chat.",
)
BATCHED = {one.path: one for one in (CHAT, COMPLETIONS, EMBEDDINGS)}
"""Endpoints that a batch can have."""
