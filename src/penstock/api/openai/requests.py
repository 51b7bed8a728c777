"""Requests of OpenAI's API: a typed core, the engine's own options, and what they ask of a model.

A field of the core that would change the answer and can't be honoured is refused by name. A
field that is no part of the core is passed on if it is an option of the engine (a field of
`Sampling`, or an alias). Any other is ignored, and the answer's header `x-penstock-warning` names
it; the setting `openai.strict` refuses it instead. `null` is as good as leaving a field out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.api.decoding import decoder, explain, fields_of, read_json, scan, unknown_field
from penstock.core.check import check_finite, check_pairs
from penstock.core.errors import InvalidRequest
from penstock.workloads.llm.values import (
    MAX_CHOICES,
    AudioPart,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ImagePart,
    ImageUrl,
    LlmRequest,
    Message,
    Sampling,
    TextPart,
    ToolCall,
)

MAX_TIMEOUT = 3600.0
TIMEOUT = 600.0
MAX_STOPS = 16
MAX_INPUTS = 2048
_SEEDS = (1 << 32) - 1
_COMPLETION = 16
"""Tokens of a completion that names no number."""
_IMAGE = re.compile(r"(data:image/(png|jpe?g|gif|webp);base64,|https://)", re.IGNORECASE)

Seconds = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT)]
Count = Annotated[int, Meta(ge=-1, le=1_000_000)]
"""Tokens; 0 and -1 mean no limit, as with llama.cpp."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Texts = str | tuple[str | Token | tuple[Token, ...], ...]
"""A text, texts, tokens, or lists of tokens."""


# -- the typed core -----------------------------------------------------------------


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    """Whether a last chunk reports the tokens used."""
    include_obfuscation: bool | None = None
    """Ignored."""


class Asking(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request."""

    given: ClassVar[str]
    """The field with the model's input."""
    model: str = ""
    """One of `GET /v1/models`; may be left out where only one is served."""
    user: str | None = None
    """Becomes the job's label `user`."""
    timeout: Seconds | None = None
    """Time limit for the answer in seconds (default 600). Not OpenAI's."""


class Generating(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request for text."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """0 always takes the likeliest token."""
    top_p: Annotated[float, Meta(ge=0)] | None = None
    """0 always takes the likeliest token; 1 or more means all."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Number of answers."""
    stop: str | tuple[str, ...] | None = None
    """Up to 16 texts that end the answer; they are not part of it."""
    seed: Annotated[float, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool | None = None
    """Whether the answer comes in parts, as server-sent events, while it is made."""
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float | bool] | None = None
    """Added to the score of a token; `false` or -100 excludes it."""
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    """0 and -1 mean all. Not OpenAI's."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Not OpenAI's."""
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    """Not OpenAI's."""
    grammar: str | None = None
    """A GBNF grammar that the answer follows. Not OpenAI's."""
    metadata: dict[str, str] | None = None
    """Becomes the job's labels."""


class TextFormat(Struct, frozen=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    schema: dict[str, Any] | None = None
    """A JSON schema, as llama.cpp takes it. Not OpenAI's."""


class JsonSchema(Struct, frozen=True, kw_only=True):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    """Ignored: the answer always follows the schema."""


class JsonSchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat


class ToolDescription(Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(Struct, frozen=True):
    type: Literal["function"]
    function: ToolDescription


class ToolName(Struct, frozen=True):
    name: str


class ToolWanted(Struct, frozen=True):
    type: Literal["function"]
    function: ToolName


class RefusalPart(Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class ChatTurn(Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | tuple[TextPart | ImagePart | AudioPart | RefusalPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None


class ChatBody(Generating, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to continue."""

    given = "messages"
    messages: Annotated[tuple[ChatTurn, ...], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    """Without it, until the model ends or its context is full."""
    max_tokens: Count | None = None
    """The older name of the same."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Needs `logprobs`."""
    response_format: Format | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolWanted | None = None
    """`required` and a named tool are forced by a grammar."""
    parallel_tool_calls: bool | None = None
    """With false, at most one tool is called."""
    reasoning_effort: str | None = None
    """Passed to the chat template; `none` turns thinking off."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, as `{"enable_thinking": false}`. Not OpenAI's."""

    audio: Any = None
    """Refused."""
    functions: Any = None
    """Refused: use `tools`."""
    function_call: Any = None
    """Refused: use `tool_choice`."""
    modalities: tuple[str, ...] | None = None
    """Refused unless it is text."""
    moderation: Any = None
    """Refused."""
    web_search_options: Any = None
    """Refused."""

    prediction: Any = None
    """Ignored, as what follows: it would not change the answer."""
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None


class CompletionBody(Generating, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text to continue, as it is: no chat template."""

    given = "prompt"
    prompt: Texts
    """Text, texts, tokens or lists of tokens."""
    max_tokens: Count | None = None
    """16 by default, as with OpenAI."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Number of alternatives reported for each token."""
    echo: bool | None = None
    """Whether the prompt, if it is text, comes before the answer; not with `logprobs`."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Refused unless it equals `n`."""
    suffix: str | None = None
    """Text after the answer, for models that were trained to fill in the middle."""


class EmbeddingBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to turn into vectors of length one."""

    given = "input"
    input: Texts
    """Text, texts, tokens or lists of tokens."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` is 32-bit floats, little-endian."""
    dimensions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Vectors are cut to this length and normalised again."""


AnyBody = ChatBody | CompletionBody | EmbeddingBody
B = TypeVar("B", bound=Struct)


# -- reading ------------------------------------------------------------------------


class Parsed(Struct, frozen=True):
    """A request as it was read."""

    body: Any
    options: Mapping[str, Any] = {}
    """Fields beyond the typed core that the engine knows."""
    ignored: tuple[str, ...] = ()
    """Fields that nobody knows."""


_ALIASES = {
    "repetition_penalty": "repeat_penalty",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
}
_SHAPES = ("json_schema", "guided_json", "guided_grammar", "guided_choice", "structured_outputs")
"""Names by which llama.cpp's server and vLLM constrain an answer."""


def read_request(
    data: bytes,
    kind: type[Any],
    *,
    max_depth: int = 64,
    prefix: str = "",
    parsed_depth: int | None = None,
) -> Parsed:
    """Read a body of `kind`. Raises as `read_json` does, but never for an unknown field."""
    try:
        return Parsed(read_json(data, kind, max_depth=max_depth, prefix=prefix))
    except InvalidRequest as wrong:
        if wrong.problem != "unknown field":
            raise
    given = decoder(dict[str, Raw]).decode(data)
    known = set(fields_of(kind))
    for alias, name in _ALIASES.items():
        if alias in given and name in known:
            value = given.pop(alias)
            given.setdefault(name, value)
    core = {name: value for name, value in given.items() if name in known}
    body = read_json(_encode(core), kind, max_depth=max_depth, prefix=prefix)
    options, ignored = {}, []
    for name, value in given.items():
        if name in known:
            continue
        if (name in OPTIONS or name in _SHAPES) and issubclass(kind, Generating):
            options[name] = msgspec.json.decode(value)
        else:
            ignored.append(name)
    return Parsed(body, options, tuple(ignored))


OPTIONS = frozenset(fields_of(Sampling)) - frozenset(fields_of(Generating))
"""Fields of `Sampling` beyond the typed core: passed on to the engine."""
_encode = msgspec.json.Encoder().encode


def refuse_ignored(kind: type[Struct], parsed: Parsed) -> None:
    """For `openai.strict`. Raises InvalidRequest."""
    for name in parsed.ignored:
        raise unknown_field(name, name, [*fields_of(kind), *sorted(OPTIONS)])


# -- what is asked of the model -----------------------------------------------------

_UNSUPPORTED = {
    "audio": "this server generates no audio",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "moderation": "this server does not moderate",
    "web_search_options": "this server does not search the web",
}
"""Fields that would change the answer; `null` passes."""


class Unsupported(InvalidRequest):
    """A field of OpenAI's that can't be honoured here."""

    code = "UNSUPPORTED_PARAMETER"


def unsupported(field: str, why: str) -> Unsupported:
    return Unsupported(field, f"is not supported: {why}", hint="leave it out")


def request_of(body: AnyBody, options: Mapping[str, Any] | None = None) -> LlmRequest:
    """What a body asks of its model. Raises InvalidRequest, naming the field."""
    match body:
        case ChatBody():
            return chat_of(body, options or {})
        case CompletionBody():
            return completion_of(body, options or {})
        case EmbeddingBody():
            return EmbeddingRequest(inputs=texts_of("input", body.input))


def labels_of(body: Any) -> dict[str, str]:
    """The labels of its job."""
    labels = {} if getattr(body, "user", None) is None else {"user": body.user}
    for name, value in (getattr(body, "metadata", None) or {}).items():
        if isinstance(value, str):
            labels["user" if name == "user_id" else name] = value
    if labels:
        check_pairs("metadata", labels)
    return labels


def chat_of(body: ChatBody, options: Mapping[str, Any]) -> ChatRequest:
    for name, why in _UNSUPPORTED.items():
        if getattr(body, name) is not None:
            raise unsupported(name, why)
    if body.modalities not in (None, (), ("text",)):
        raise unsupported("modalities", "this server generates only text")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    return ChatRequest(
        **_common(body, options, body.response_format),
        messages=tuple(message_of(f"messages[{n}]", one) for n, one in enumerate(body.messages)),
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tools=tuple(msgspec.to_builtins(tool) for tool in body.tools or ()),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls if body.tools else None,
        template_options=_template_options(body),
    )


def _max_tokens(body: ChatBody) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if None not in (new, old) and new != old:
        raise InvalidRequest("max_tokens", "differs from max_completion_tokens: give one of them")
    return positive(old if new is None else new)


def positive(count: int | None) -> int | None:
    """A number of tokens; None means no limit."""
    return count if count is not None and count > 0 else None


def _template_options(body: ChatBody) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
    return options


def _tool_choice(body: ChatBody) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "needs tools")
        return None
    if not isinstance(choice, ToolWanted):
        return choice
    if choice.function.name not in [tool.function.name for tool in body.tools]:
        name = choice.function.name[:64]
        raise InvalidRequest("tool_choice.function.name", f"there is no tool {name!r}")
    wanted: dict[str, Any] = msgspec.to_builtins(choice)
    return wanted


def message_of(where: str, turn: ChatTurn) -> Message:
    content = turn.content
    if turn.tool_calls and turn.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls", "are only for the role assistant")
    role = "tool" if turn.role == "function" else turn.role
    return Message(
        role=role,
        content=content if isinstance(content, str) else _parts(where, turn.role, content),
        name=turn.name,
        tool_calls=turn.tool_calls or (),
        tool_call_id=turn.tool_call_id,
    )


def _parts(
    where: str,
    role: str,
    content: tuple[TextPart | ImagePart | AudioPart | RefusalPart, ...] | None,
) -> str | tuple[TextPart | ImagePart | AudioPart, ...] | None:
    if not content:
        return None if content is None and role == "assistant" else ""
    found: list[TextPart | ImagePart | AudioPart] = []
    for index, part in enumerate(content):
        if isinstance(part, RefusalPart):
            found.append(TextPart(part.refusal))
        elif isinstance(part, ImagePart):
            found.append(image_of(f"{where}.content[{index}].image_url", role, part.image_url.url))
        elif isinstance(part, AudioPart) and role != "user":
            raise InvalidRequest(f"{where}.content[{index}]", "audio is only for the role user")
        else:
            found.append(part)
    return tuple(found)


def content_of(parts: Sequence[TextPart | ImagePart]) -> str | tuple[TextPart | ImagePart, ...]:
    """One text, where there is nothing but text."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "".join(texts) if len(texts) == len(parts) else tuple(parts)


def tools_of(
    given: Sequence[Mapping[str, Any]] | None,
    kind: str,
    parameters: str,
    default: str | None = None,
) -> tuple[Tool, ...] | None:
    """Tools that another API describes: each has the type `kind`, or else `default`, and its JSON
    schema under the name `parameters`. Raises InvalidRequest."""
    tools = []
    for index, tool in enumerate(given or ()):
        if (found := tool.get("type", default)) != kind:
            why = f"{str(found)[:40]!r}: only the client's own functions can be called"
            raise unsupported(f"tools[{index}].type", why)
        fields = {name: tool.get(name) for name in ("name", "description", "strict")}
        fields["parameters"] = tool.get(parameters)
        try:
            tools.append(Tool("function", msgspec.convert(fields, ToolDescription)))
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"tools[{index}]", str(error)) from None
    return tuple(tools) or None


def image_of(where: str, role: str, url: str) -> ImagePart:
    if role not in ("user", "tool"):
        raise InvalidRequest(where, "images are only for the role user")
    if not _IMAGE.match(url[:40]):
        raise InvalidRequest(
            f"{where}.url",
            "must be an image as a data: URI (png, jpeg, gif, webp) or an https: URL",
        )
    return ImagePart(ImageUrl(url))


def completion_of(body: CompletionBody, options: Mapping[str, Any]) -> CompletionRequest:
    prompts = texts_of("prompt", body.prompt)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "every answer is returned, so it must equal n")
    if body.echo:
        if body.logprobs is not None:
            raise unsupported("echo", "not together with logprobs")
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise unsupported("echo", "needs prompts that are text")
    if body.suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise unsupported("suffix", "needs prompts that are text")
    if body.suffix and body.logprobs is not None:
        raise unsupported("suffix", "not together with logprobs")
    return CompletionRequest(
        **_common(body, options, None),
        prompts=prompts,
        max_tokens=_COMPLETION if body.max_tokens is None else positive(body.max_tokens),
        logprobs=body.logprobs,
        suffix=body.suffix or None,
    )


def texts_of(field: str, given: Texts) -> tuple[str | tuple[int, ...], ...]:
    """The inputs, each text or tokens."""
    if isinstance(given, str):
        given = (given,)
    if given and all(isinstance(one, int) for one in given):
        given = (given,)  # type: ignore[assignment]
    if not given:
        raise InvalidRequest(field, "is empty")
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(field, f"{len(given)} inputs; at most {MAX_INPUTS} are allowed")
    for index, one in enumerate(given):
        if isinstance(one, int) or type(one) is not type(given[0]):
            raise InvalidRequest(f"{field}[{index}]", "texts and tokens can't be mixed")
        if not one:
            raise InvalidRequest(f"{field}[{index}]" if len(given) > 1 else field, "is empty")
    return given  # type: ignore[return-value]


def _common(body: Generating, options: Mapping[str, Any], shape: Format | None) -> dict[str, Any]:
    return {
        "stop": _stops(body.stop),
        "sampling": sampling_of(body, options),
        **shape_of(shape, body.grammar, options),
        "n": body.n or 1,
        "stream": bool(body.stream),
    }


def sampling_of(body: Generating, options: Mapping[str, Any]) -> Sampling:
    """The core's fields and the options that are the engine's own. Raises InvalidRequest."""
    top_p = body.top_p
    sampling = Sampling(
        temperature=0.0 if top_p == 0 else body.temperature,
        top_p=None if top_p == 0 else min(1.0, top_p) if top_p is not None else None,
        top_k=None if body.top_k is None else max(0, body.top_k),
        min_p=body.min_p,
        repeat_penalty=body.repeat_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=None if body.seed is None else int(body.seed) % _SEEDS,
        logit_bias=_logit_bias(body.logit_bias),
    )
    own = {name: value for name, value in options.items() if name in OPTIONS}
    if not own:
        return sampling
    try:
        extended = msgspec.convert(own, Sampling)
    except msgspec.ValidationError as error:
        raise explain(str(error), own, Sampling) from None
    for name, value in own.items():
        check_finite(name, value)
    return msgspec.structs.replace(sampling, **{name: getattr(extended, name) for name in own})


def _logit_bias(given: dict[str, float | bool] | None) -> dict[str, float | bool] | None:
    for token, bias in (given or {}).items():
        if not token.isdecimal() or len(token) > 10:
            raise InvalidRequest(f"logit_bias.{token[:40]}", "is not the number of a token")
        if bias is not False and not -100 <= bias <= 100:
            raise InvalidRequest(f"logit_bias.{token}", "must be between -100 and 100")
    return given or None


def _stops(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else given or ()
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"{len(stops)} texts; at most {MAX_STOPS} are allowed")
    return tuple(stop for stop in stops if stop)


def shape_of(
    shape: Format | None, grammar: str | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The schema or grammar that the answer follows. Raises InvalidRequest."""
    if shape is None and grammar is None and not options:
        return {}
    found: dict[str, tuple[str, Any]] = {}
    if isinstance(shape, JsonSchemaFormat):
        found["response_format"] = ("schema", shape.json_schema.schema)
    elif isinstance(shape, JsonObjectFormat):
        schema = shape.schema
        found["response_format"] = ("schema", schema) if schema else ("json_object", True)
    if grammar is not None:
        found["grammar"] = ("grammar", grammar)
    given = {name: options[name] for name in _SHAPES if options.get(name) is not None}
    structured = given.pop("structured_outputs", None) or {}
    if not isinstance(structured, dict):
        raise InvalidRequest("structured_outputs", "must be an object")
    for name, value in structured.items():
        given[f"guided_{name}"] = value
    for name, value in given.items():
        if name in ("json_schema", "guided_json"):
            found[name] = ("schema", _schema(name, value))
        elif name == "guided_grammar":
            found[name] = ("grammar", str(value))
        elif name == "guided_choice":
            found[name] = ("grammar", _choice(name, value))
        else:
            raise unsupported(name, "use response_format or grammar")
    if len(found) > 1:
        *_, last = sorted(found, key=lambda name: name != "response_format")
        raise InvalidRequest(last, f"can't be combined with {next(iter(found))}")
    return dict(found.values())


def _schema(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        scan(value.encode())
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            value = None
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be a JSON schema (an object)")
    return value


def _choice(name: str, value: Any) -> str:
    """A grammar that allows these texts and no others."""
    if not (isinstance(value, list) and value and all(isinstance(one, str) for one in value)):
        raise InvalidRequest(name, "must be a list of texts")
    return "root ::= " + " | ".join(msgspec.json.encode(one).decode() for one in value)
