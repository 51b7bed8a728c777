"""Ollama's API: a thin mapping onto the same jobs as OpenAI's, streaming as lines of JSON."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.api.decoding import explain
from penstock.api.openai.answers import JobOrigin, arguments_of, shortened
from penstock.api.openai.endpoints import endpoint
from penstock.api.openai.errors import ModelNotFound, tell
from penstock.api.openai.models import ServedModel, find_model
from penstock.api.openai.requests import (
    OPTIONS,
    Asking,
    ChatBody,
    ChatTurn,
    CompletionBody,
    Format,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Texts,
    Tool,
    chat_of,
    completion_of,
    texts_of,
)
from penstock.api.operation import Pace, route
from penstock.api.reply import JSON_HEADERS, NO_STORE, AnyReply, Headers, Reply, StreamReply, encode
from penstock.core.errors import InvalidRequest, NotPermitted, PenstockError, Unavailable
from penstock.models.pull import pull_public
from penstock.models.store import ModelStore
from penstock.ports.engine_api import KeyRole
from penstock.workloads.llm.values import (
    ChatRequest,
    Choice,
    CompletionRequest,
    Delta,
    EmbeddingRequest,
    EmbeddingResult,
    ImagePart,
    ImageUrl,
    LlmFailure,
    LlmResult,
    TextPart,
    ToolCall,
    ToolFunction,
)

if TYPE_CHECKING:
    from penstock.api.call import Call

_LINES: Headers = ((b"content-type", b"application/x-ndjson"), NO_STORE)
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "stop"),
)
"""Options that have the same name in OpenAI's requests."""
_NEWS = 0.25
"""Seconds between two lines about a download."""
_MS = 1_000_000
"""Nanoseconds of a millisecond."""


# -- requests -----------------------------------------------------------------------


class OllamaFunction(Struct, frozen=True):
    name: str = ""
    arguments: Any = {}


class OllamaCall(Struct, frozen=True):
    function: OllamaFunction
    id: str = ""


class OllamaMessage(Struct, frozen=True):
    role: str
    content: str = ""
    images: tuple[str, ...] | None = None
    """Base64, without a type."""
    tool_calls: tuple[OllamaCall, ...] | None = None
    tool_name: str | None = None
    thinking: Any = None
    """Ignored."""


class OllamaBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request for text."""

    stream: bool | None = None
    """Whether the answer comes in lines while it is made; yes by default."""
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    options: dict[str, Any] | None = None
    """How tokens are chosen. Options of the engine's start, as `num_ctx`, are ignored."""
    think: bool | str | None = None
    """Whether the model thinks first, where its chat template can be told."""
    keep_alive: Any = None
    """Ignored."""


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to continue."""

    given = "messages"
    messages: tuple[OllamaMessage, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt to answer."""

    given = "prompt"
    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is continued as it is, without the chat template."""
    images: tuple[str, ...] | None = None
    template: Any = None
    """Ignored."""
    context: Any = None
    """Ignored."""


class OllamaEmbedBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to turn into vectors of length one."""

    given = "input"
    input: Texts
    dimensions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    truncate: Any = None
    """Ignored."""
    options: Any = None
    keep_alive: Any = None


class OllamaModelBody(Struct, frozen=True, kw_only=True):
    model: str = ""
    name: str = ""
    """The older name of the same."""
    stream: bool | None = None
    verbose: Any = None
    insecure: Any = None


def chat_request(body: OllamaChatBody, options: Mapping[str, Any]) -> ChatRequest:
    """Raises InvalidRequest, naming the field."""
    if not body.messages:
        raise InvalidRequest("messages", "is empty")
    turns = tuple(_turn(f"messages[{n}]", one) for n, one in enumerate(body.messages))
    tools = _converted("tools", body.tools, tuple[Tool, ...]) if body.tools else None
    return _chat(body, ChatBody(messages=turns, tools=tools), options)


def generate_request(
    body: OllamaGenerateBody, options: Mapping[str, Any]
) -> ChatRequest | CompletionRequest:
    """Raises InvalidRequest, naming the field."""
    if not body.prompt:
        raise InvalidRequest("prompt", "is empty")
    core, own = _options(body)
    if body.raw or body.suffix:
        core.setdefault("max_tokens", -1)
        asked = CompletionBody(prompt=body.prompt, suffix=body.suffix, **core)
        request = completion_of(asked, {**options, **own})
        return replace(request, stream=body.stream is not False)
    system = (ChatTurn(role="system", content=body.system),) if body.system else ()
    turn = _turn("prompt", OllamaMessage("user", body.prompt, body.images))
    return _chat(body, ChatBody(messages=(*system, turn)), options)


def _chat(body: OllamaBody, chat: ChatBody, options: Mapping[str, Any]) -> ChatRequest:
    core, own = _options(body)
    template: dict[str, Any] = {}
    if body.think is not None:
        template["enable_thinking"] = body.think is not False
        if isinstance(body.think, str):
            template["reasoning_effort"] = body.think
    asked = replace(
        chat,
        stream=body.stream is not False,
        response_format=_format(body.format),
        chat_template_kwargs=template or None,
        **core,
    )
    return chat_of(asked, {**options, **own})


def embed_request(body: OllamaEmbedBody, options: Mapping[str, Any]) -> EmbeddingRequest:
    return EmbeddingRequest(inputs=texts_of("input", body.input))


def _options(body: OllamaBody) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options in OpenAI's names, and those that are passed on to the engine."""
    given = {name: value for name, value in (body.options or {}).items() if value is not None}
    core = {name: given[name] for name in _SAMPLING if name in given}
    if (limit := given.get("num_predict")) is not None:
        core["max_tokens"] = -1 if isinstance(limit, int) and limit < 0 else limit
    checked = _converted("options", {"prompt": "x", **core}, CompletionBody)
    core = {name: getattr(checked, name) for name in core}
    return core, {name: given[name] for name in OPTIONS if name in given}


def _converted(where: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), value, kind, where) from None


def _format(given: str | dict[str, Any] | None) -> Format | None:
    if isinstance(given, dict):
        return JsonSchemaFormat(JsonSchema(schema=given))
    if given in (None, ""):
        return None
    if given == "json":
        return JsonObjectFormat()
    raise InvalidRequest("format", "must be json or a JSON schema")


_ROLES = ("system", "user", "assistant", "tool")


def _turn(where: str, message: OllamaMessage) -> ChatTurn:
    if message.role not in _ROLES:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    content: Any = message.content
    if message.images:
        images = [ImagePart(ImageUrl(_data_uri(image))) for image in message.images]
        content = (TextPart(message.content), *images)
    calls = [
        ToolCall(
            id=one.id or f"call_{number}",
            function=ToolFunction(one.function.name, encode(one.function.arguments).decode()),
        )
        for number, one in enumerate(message.tool_calls or ())
    ]
    return ChatTurn(
        role=message.role,  # type: ignore[arg-type]
        content=content,
        name=message.tool_name,
        tool_calls=tuple(calls) or None,
    )


def _data_uri(image: str) -> str:
    if image.startswith("data:"):
        return image
    kinds = {"iVBOR": "png", "/9j/": "jpeg", "R0lG": "gif", "UklGR": "webp"}
    kind = next((kind for start, kind in kinds.items() if image.startswith(start)), "png")
    return f"data:image/{kind};base64,{image}"


# -- answers ------------------------------------------------------------------------


def _chat_message(text: str, thinking: str, calls: tuple[ToolCall, ...]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return {"message": message}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": arguments_of(call)}
    return {"id": call.id, "function": function}


def _generated(text: str, thinking: str, calls: tuple[ToolCall, ...]) -> dict[str, Any]:
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


def _head(origin: JobOrigin) -> dict[str, Any]:
    return {"model": origin.model, "created_at": _time(origin.accepted_at)}


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def _end(result: LlmResult, choice: Choice) -> dict[str, Any]:
    timings = result.timings
    prompt, predicted = int(timings.prompt_ms * _MS), int(timings.predicted_ms * _MS)
    return {
        "done": True,
        "done_reason": "length" if choice.finish_reason == "length" else "stop",
        "total_duration": prompt + predicted,
        "load_duration": 0,
        "prompt_eval_count": result.usage.prompt_tokens,
        "prompt_eval_duration": prompt,
        "eval_count": result.usage.completion_tokens,
        "eval_duration": predicted,
    }


class _OllamaStream:
    """See `StreamFormat`: lines of JSON. Tool calls come whole, at the end."""

    headers = _LINES
    heartbeat = b""
    content = staticmethod(_chat_message)

    def __init__(self, body: OllamaBody, origin: JobOrigin) -> None:
        self._origin = origin

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: Delta) -> bytes:
        if not (piece.text or piece.reasoning):
            return b""
        content = self.content(piece.text, piece.reasoning, ())
        return _line({**_head(self._origin), **content, "done": False})

    def finish(self, rest: list[Delta], result: LlmResult) -> bytes:
        out = b"".join(self.piece(piece) for piece in rest)
        choice = result.choices[0]
        head = _head(self._origin)
        if choice.tool_calls:
            calls = self.content("", "", choice.tool_calls)
            out += _line({**head, **calls, "done": False})
        return out + _line({**head, **self.content("", "", ()), **_end(result, choice)})

    def fail(self, error: PenstockError) -> bytes:
        return _line({"error": tell(error).fault.message})


class OllamaGenerateStream(_OllamaStream):
    """See `StreamFormat`."""

    content = staticmethod(_generated)


def _line(value: Any) -> bytes:
    return encode(value) + b"\n"


class OllamaError(Struct, frozen=True):
    """What went wrong, in Ollama's shape."""

    error: str


def problem_reply(error: BaseException) -> Reply:
    refusal = tell(error)
    headers = (*JSON_HEADERS, *refusal.headers)
    return Reply(encode(OllamaError(refusal.fault.message)), refusal.status, headers)


ERRORS: dict[str, Any] = {"problem": problem_reply, "problem_kind": OllamaError}
_SHARED = {**ERRORS, "stream_type": "application/x-ndjson"}


@endpoint("/api/chat", request=chat_request, parts=_OllamaStream, **_SHARED)
def ollama_chat(body: OllamaChatBody, origin: JobOrigin, result: LlmResult) -> dict[str, Any]:
    """Continue a conversation (Ollama's chat).

    As Ollama's. One job, as for OpenAI's.
    """
    choice = result.choices[0]
    content = _chat_message(choice.text, choice.reasoning, choice.tool_calls)
    return {**_head(origin), **content, **_end(result, choice)}


@endpoint("/api/generate", request=generate_request, parts=OllamaGenerateStream, **_SHARED)
def ollama_generate(
    body: OllamaGenerateBody, origin: JobOrigin, result: LlmResult
) -> dict[str, Any]:
    """Answer a prompt (Ollama's generate).

    As Ollama's. One job, as for OpenAI's.
    """
    choice = result.choices[0]
    content = _generated(choice.text, choice.reasoning, ())
    return {**_head(origin), **content, **_end(result, choice)}


@endpoint("/api/embed", request=embed_request, **_SHARED)
def ollama_embed(
    body: OllamaEmbedBody, origin: JobOrigin, result: EmbeddingResult
) -> dict[str, Any]:
    """Turn texts into vectors (Ollama's embed).

    As Ollama's. One job, as for OpenAI's.
    """
    return {
        "model": origin.model,
        "embeddings": [shortened(vector, body.dimensions) for vector in result.vectors],
        "total_duration": 0,
        "load_duration": 0,
        "prompt_eval_count": result.usage.prompt_tokens,
    }


# -- models -------------------------------------------------------------------------


@route("GET /api/tags")
async def list_ollama_models(call: Call) -> Reply:
    """List the models (Ollama's tags)."""
    served = await call.services.models.list(call.api)
    return Reply(encode({"models": [_model(one) for one in served]}))


@route("GET /api/ps")
async def list_running_models(call: Call) -> Reply:
    """List loaded models (Ollama's ps)."""
    served = await call.services.models.list(call.api)
    loaded = [one for one in served if one.facts.get("state") == "ready"]
    models = [
        {**_model(one), "expires_at": "0001-01-01T00:00:00Z", "size_vram": 0}
        | {"context_length": one.facts.get("context", 0)}
        for one in loaded
    ]
    return Reply(encode({"models": models}))


@route("POST /api/show", body=OllamaModelBody, refusals=(404,))
async def show_ollama_model(call: Call) -> Reply:
    """Describe a model (Ollama's show)."""
    body = await call.json(OllamaModelBody)
    model = await find_model(call, body.model or body.name)
    facts = model.facts
    architecture = str(facts.get("architecture") or "unknown")
    context = facts.get("train_context") or facts.get("context") or 0
    about = {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "",
        "template": "",
        "details": _details(model),
        "model_info": {
            "general.architecture": architecture,
            "general.parameter_count": facts.get("parameters", 0),
            f"{architecture}.context_length": context,
        },
        "capabilities": ["completion", "tools", *(["vision"] if facts.get("vision") else [])],
        "modified_at": _time(model.since),
    }
    return Reply(encode(about))


@route(
    "POST /api/pull",
    body=OllamaModelBody,
    role=KeyRole.SUBMIT,
    other_types=("application/x-ndjson",),
    refusals=(403, 404),
    pace=Pace.WAITS,
)
async def pull_ollama_model(call: Call) -> AnyReply:
    """Pull a model (Ollama's pull).

    A model that is served is there. Another is fetched from the Hugging Face hub into the store of
    the engine's machine, which needs the role `admin`; it is served once the engine is started with
    it.
    """
    body = await call.json(OllamaModelBody)
    name = body.model or body.name
    if not name:
        raise InvalidRequest("model", "is missing", hint="it is required")
    try:
        await find_model(call, name)
        news = _served_already()
    except ModelNotFound:
        news = _pulled(name, _store(call, name))
    if body.stream is False:
        with call.attending():
            async with aclosing(news):
                async for _ in news:
                    pass
        return Reply(encode({"status": "success"}))
    content = _lines(news)
    await anext(content)  # what is wrong at once is told with its status
    return StreamReply(content, _LINES, counted=True, whole=True)


async def _served_already() -> AsyncGenerator[dict[str, Any], None]:
    yield {"status": "pulling manifest"}


def _store(call: Call, name: str) -> ModelStore:
    """Raises NotPermitted unless the caller may change what is on the machine."""
    folder = call.services.options.models_dir
    if folder is None or call.session is None or call.session.require is None:
        raise NotPermitted("no models can be pulled here")
    try:
        call.session.require(KeyRole.ADMIN, "model.pull", name[:128])
    except NotPermitted as refused:
        raise NotPermitted(
            f"the model {name[:120]!r} is not served here, and only a key with the role admin may"
            " pull one",
            hint="ask who runs the engine: penstock model pull, penstock up --model",
        ) from refused
    return ModelStore(folder)


async def _lines(news: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """An empty one first, once the first news are there. Raises PenstockError before it."""
    async with aclosing(news):
        first = await anext(news)
        yield b""
        yield _line(first)
        try:
            async for one in news:
                yield _line(one)
        except PenstockError as error:
            yield _line({"error": tell(error).fault.message})
        else:
            yield _line({"status": "success"})


async def _pulled(name: str, store: ModelStore) -> AsyncGenerator[dict[str, Any], None]:
    """A download in a thread, told as Ollama tells it. Closing it breaks the download off; the
    next pull resumes it. Raises PenstockError."""
    news: dict[str, Any] = {}
    is_left = False

    def tell_step(step: str, done: int, total: int) -> None:
        nonlocal news
        if is_left:
            raise Unavailable("the client has left")
        news = {"status": f"{step} {name[:120]}", "total": total, "completed": done}

    work = asyncio.ensure_future(asyncio.to_thread(pull_public, name, store, tell_step))
    told: dict[str, Any] = {}
    try:
        while not work.done():
            if news and not told:
                yield {"status": "pulling manifest"}
            if news != told:
                told = news
                yield told
            await asyncio.wait([work], timeout=_NEWS)
        kept = (await work).name
    except LlmFailure as failure:
        raise Unavailable(str(failure)) from failure
    finally:
        is_left = True
        work.cancel()
    if not told:
        yield {"status": "pulling manifest"}
    yield {"status": f"kept as {kept}: serve it with penstock up --model"}


@route("GET /api/version")
async def get_ollama_version(call: Call) -> Reply:
    """Get the version (Ollama's)."""
    return Reply(encode({"version": metadata.version("penstock")}))


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _time(model.since),
        "size": model.facts.get("size", 0),
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    facts = model.facts
    family = str(facts.get("architecture") or "")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _parameters(facts.get("parameters") or 0),
        "quantization_level": str(facts.get("quantisation") or ""),
    }


def _parameters(count: int) -> str:
    if count >= 1_000_000_000:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.0f}M" if count else ""


ENDPOINTS = (ollama_chat, ollama_generate, ollama_embed)
