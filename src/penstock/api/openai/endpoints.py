"""The table of endpoints that answer with a model: how each request is read, what it asks of the
model, and how its answer is written, whole and in parts."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.api.openai.answers import (
    ChatCompletion,
    EmbeddingList,
    EmbeddingUsage,
    EmbeddingVector,
    JobOrigin,
    TextCompletion,
    TokenUsage,
    as_base64,
    chat_choice,
    shortened,
    text_choice,
)
from penstock.api.openai.errors import OpenAiError, job_headers, problem_reply
from penstock.api.openai.form import FORM, read_form
from penstock.api.openai.images import with_images
from penstock.api.openai.model_job import ModelJob, submit
from penstock.api.openai.requests import (
    Asking,
    ChatBody,
    ChatTurn,
    CompletionBody,
    EmbeddingBody,
    Parsed,
    Token,
    message_of,
    read_request,
    refuse_ignored,
    request_of,
    unsupported,
)
from penstock.api.openai.streams import ChatStream, StreamFormat, TextStream, stream
from penstock.api.operation import Operation, Pace
from penstock.api.problems import ProblemReply, Refused
from penstock.api.reply import JSON_HEADERS, AnyReply, Headers, Reply, StreamReply, encode
from penstock.core.check import check_finite
from penstock.core.errors import InvalidRequest
from penstock.ports.engine_api import KeyRole
from penstock.workloads.llm.schemas import not_enforced
from penstock.workloads.llm.values import (
    AudioPart,
    ChatRequest,
    EmbeddingRequest,
    EmbeddingResult,
    InputAudio,
    LlmRequest,
    LlmResult,
    Message,
    Sampling,
    TextPart,
    TokenizeRequest,
    TokenizeResult,
)

if TYPE_CHECKING:
    from penstock.api.call import Call

WARNING = b"x-penstock-warning"
_MOST_VECTORS = 16
"""More are written in a thread: a thousand long ones take a second."""


class Endpoint(Struct, frozen=True, kw_only=True):
    """One way to ask a model; made by `endpoint`."""

    path: str
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
    result: type[LlmResult | EmbeddingResult | TokenizeResult]
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

    def operation(self) -> Operation:
        async def handle(call: Call) -> AnyReply:
            parsed = await (call.json(self.body) if self.read is None else self.read(call))
            return await answer(call, self, parsed)

        handle.__doc__ = self.whole.__doc__
        return Operation(
            "POST",
            self.path,
            handle,
            name=self.whole.__name__,
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
        )


def endpoint(path: str, **fields: Any) -> Callable[[Callable[..., Any]], Endpoint]:
    """Declare an endpoint above the function that makes its answer of a body and a result.

    Its name and docstring are those of the operation, the types of its parameters and of what it
    returns those of body, result and answer; `fields` are the others of Endpoint.
    """

    def make(whole: Callable[..., Any]) -> Endpoint:
        body, _, result, answer = get_type_hints(whole).values()
        return Endpoint(path=path, body=body, result=result, answer=answer, whole=whole, **fields)

    return make


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
        found.append(loose)
    if not found:
        return ()
    text = "; ".join(found)[:1000].encode("ascii", "backslashreplace")
    return ((WARNING, bytes(byte for byte in text if 32 <= byte < 127)[:1000]),)


# -- chats, texts and vectors -------------------------------------------------------


@endpoint("/v1/chat/completions", parts=ChatStream)
def create_chat_completion(body: ChatBody, origin: JobOrigin, result: LlmResult) -> ChatCompletion:
    """Continue a conversation.

    As OpenAI's. The request is one job, named by the header `x-penstock-job`: the same rules,
    limits and journal hold as for any other. It is cancelled when the client leaves, unless there
    was an `Idempotency-Key`: the same request with the same key is answered with the same job then.
    """
    return ChatCompletion(
        id=f"chatcmpl-{origin.job_id}",
        created=origin.created,
        model=origin.model,
        choices=tuple(chat_choice(body, *numbered) for numbered in enumerate(result.choices)),
        usage=TokenUsage.of(result.usage),
        system_fingerprint=result.engine,
    )


@endpoint("/v1/completions", parts=TextStream, large=False)
def create_completion(body: CompletionBody, origin: JobOrigin, result: LlmResult) -> TextCompletion:
    """Continue a text.

    As OpenAI's, without a chat template. One job, as for a chat.
    """
    return TextCompletion(
        id=f"cmpl-{origin.job_id}",
        created=origin.created,
        model=origin.model,
        choices=tuple(text_choice(body, *numbered) for numbered in enumerate(result.choices)),
        usage=TokenUsage.of(result.usage),
        system_fingerprint=result.engine,
    )


@endpoint("/v1/embeddings", large=False)
def create_embedding(
    body: EmbeddingBody, origin: JobOrigin, result: EmbeddingResult
) -> EmbeddingList:
    """Turn texts into vectors.

    As OpenAI's; each vector has length one. One job, as for a chat.
    """
    in_bytes = body.encoding_format == "base64"
    vectors = [shortened(vector, body.dimensions) for vector in result.vectors]
    return EmbeddingList(
        data=tuple(
            EmbeddingVector(index=index, embedding=as_base64(vector) if in_bytes else vector)
            for index, vector in enumerate(vectors)
        ),
        model=origin.model,
        usage=EmbeddingUsage(result.usage.prompt_tokens, result.usage.prompt_tokens),
    )


BATCHED = {one.path: one for one in (create_chat_completion, create_completion, create_embedding)}
"""Endpoints that a batch can have."""


# -- documents by relevance ---------------------------------------------------------


class RerankDocument(Struct, frozen=True):
    text: str


class RerankBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A query, and documents to sort by relevance. As Cohere and Jina write it."""

    given = "documents"
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[tuple[str | RerankDocument, ...], Meta(min_length=1, max_length=2047)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    """Number of results; all by default."""
    return_documents: bool | None = None
    max_chunks_per_doc: Any = None
    """Ignored."""


class RerankResult(Struct, frozen=True, kw_only=True):
    index: int
    relevance_score: float
    """Cosine similarity of query and document, from -1 to 1."""
    document: RerankDocument | UnsetType = UNSET


class RerankList(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    model: str
    results: tuple[RerankResult, ...]
    usage: EmbeddingUsage


def rerank_request(body: RerankBody, options: Mapping[str, Any]) -> EmbeddingRequest:
    texts = tuple(_document_text(document) for document in body.documents)
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"documents[{index}]", "is empty")
    return EmbeddingRequest(inputs=(body.query, *texts))


def _document_text(document: str | RerankDocument) -> str:
    return document if isinstance(document, str) else document.text


@endpoint("/v1/rerank", request=rerank_request, large=False)
def create_rerank(body: RerankBody, origin: JobOrigin, result: EmbeddingResult) -> RerankList:
    """Sort documents by relevance to a query.

    By the cosine similarity of the model's embeddings. One job, as for a chat.
    """
    query, *documents = result.vectors
    scores = [sum(a * b for a, b in zip(query, one, strict=True)) for one in documents]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    used = result.usage.prompt_tokens
    return RerankList(
        id=f"rerank-{origin.job_id}",
        model=origin.model,
        results=tuple(
            RerankResult(
                index=index,
                relevance_score=scores[index],
                document=RerankDocument(_document_text(body.documents[index]))
                if body.return_documents
                else UNSET,
            )
            for index in order[: body.top_n]
        ),
        usage=EmbeddingUsage(used, used),
    )


# -- tokens: the shapes of llama.cpp's server and of vLLM at once -------------------


class TokenizeBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `content`, `prompt` and `messages`."""

    given = "content"
    content: str | None = None
    """The text, as llama.cpp's server names it."""
    prompt: str | None = None
    """The same, as vLLM names it."""
    messages: tuple[ChatTurn, ...] | None = None
    """A conversation, written by the model's chat template."""
    add_special: bool | None = None
    """Whether the model's first tokens come before those of a `content`; no by default."""
    add_special_tokens: bool | None = None
    """The same for a `prompt`; yes by default."""
    parse_special: bool = True
    """Whether the names of special tokens are these tokens."""


class TokenizeAnswer(Struct, frozen=True, kw_only=True):
    tokens: tuple[int, ...]
    count: int
    model: str


class DetokenizeBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    given = "tokens"
    tokens: tuple[Token, ...]


class DetokenizeAnswer(Struct, frozen=True, kw_only=True):
    content: str
    """As llama.cpp's server names it."""
    prompt: str
    """The same, as vLLM names it."""
    model: str


def tokenize_request(body: TokenizeBody, options: Mapping[str, Any]) -> TokenizeRequest:
    names = [n for n in ("content", "prompt", "messages") if getattr(body, n) is not None]
    if len(names) != 1:
        problem = "is missing" if not names else f"can't be combined with {names[1]}"
        raise InvalidRequest(names[0] if names else "content", problem)
    if body.messages is not None:
        turns = enumerate(body.messages)
        messages = tuple(message_of(f"messages[{n}]", one) for n, one in turns)
        if not messages:
            raise InvalidRequest("messages", "is empty")
        return TokenizeRequest(messages=messages, add_special=True)
    special = body.add_special
    if body.prompt is not None:
        special = body.add_special_tokens is not False
    text = body.prompt if body.prompt is not None else body.content
    return TokenizeRequest(text=text, add_special=bool(special), parse_special=body.parse_special)


@endpoint("/tokenize", request=tokenize_request, large=False)
def tokenize(body: TokenizeBody, origin: JobOrigin, result: TokenizeResult) -> TokenizeAnswer:
    """Turn a text or a conversation into tokens.

    As llama.cpp's server and vLLM have it. One job, as for a chat.
    """
    return TokenizeAnswer(tokens=result.tokens, count=len(result.tokens), model=origin.model)


def detokenize_request(body: DetokenizeBody, options: Mapping[str, Any]) -> TokenizeRequest:
    return TokenizeRequest(tokens=body.tokens)


@endpoint("/detokenize", request=detokenize_request, large=False)
def detokenize(body: DetokenizeBody, origin: JobOrigin, result: TokenizeResult) -> DetokenizeAnswer:
    """Turn tokens into text.

    As llama.cpp's server and vLLM have it. One job, as for a chat.
    """
    return DetokenizeAnswer(content=result.text, prompt=result.text, model=origin.model)


# -- recordings: a chat, as in llama.cpp's server, that is told to transcribe -------

_MAGIC: tuple[tuple[bytes, Literal["wav", "mp3"]], ...] = (
    *((b"RIFF", "wav"), (b"ID3", "mp3")),
    *((b"\xff\xfb", "mp3"), (b"\xff\xf3", "mp3"), (b"\xff\xf2", "mp3")),
)


class TranscriptionForm(Asking, frozen=True, kw_only=True):
    given = "file"
    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    """A recording: WAV or MP3."""
    language: Annotated[str, Meta(max_length=40)] = ""
    """As `en`: told to the model."""
    prompt: str = ""
    """Further instructions to the model."""
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    response_format: Literal["json"] = "json"
    stream: bool = False
    """Refused if true."""


class Transcription(Struct, frozen=True):
    text: str


def transcription_request(body: TranscriptionForm, options: Mapping[str, Any]) -> ChatRequest:
    kind = next((kind for magic, kind in _MAGIC if options["data"].startswith(magic)), None)
    if kind is None:
        raise InvalidRequest("file", "is not a WAV or MP3 recording")
    text = "Transcribe audio to text"
    text += f" (language: {body.language})" if body.language else ""
    text += f"\n{body.prompt}" if body.prompt else ""
    audio = AudioPart(InputAudio(b64encode(options["data"]).decode(), kind))
    return ChatRequest(
        messages=(Message(role="user", content=(TextPart(text), audio)),),
        sampling=Sampling(temperature=body.temperature),
    )


async def read_transcription(call: Call) -> Parsed:
    data = bytearray()
    most = call.services.options.max_upload // 4 * 3 - (64 << 10)  # as base64 it is longer

    async def keep(part: bytes) -> None:
        data.extend(part)
        if len(data) > most:
            raise Refused(413, "TOO_LARGE", f"the recording has more than {most} bytes")

    body = await read_form(call, TranscriptionForm, keep)
    if body.stream:
        raise unsupported("stream", "a transcription comes whole")
    check_finite("temperature", body.temperature)
    return Parsed(body, {"data": bytes(data)})


@endpoint(
    "/v1/audio/transcriptions",
    body_type=FORM,
    read=read_transcription,
    request=transcription_request,
)
def create_transcription(
    body: TranscriptionForm, origin: JobOrigin, result: LlmResult
) -> Transcription:
    """Turn a recording into text.

    By a model with an audio projector. One job, as for a chat.
    """
    return Transcription(result.choices[0].text)


MODEL_ENDPOINTS = (
    *BATCHED.values(),
    *(create_rerank, create_transcription, tokenize, detokenize),
)
