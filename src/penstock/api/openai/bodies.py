"""What may be asked: OpenAI's requests, field by field, and a few fields of our own.

A field that would change the answer and can't be honoured is refused by name, one that would not
is passed over, and one that nobody knows is refused as OpenAI refuses it: a misspelt name must
not be an answer that nobody asked for. `null` is as good as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from penstock.workloads.llm.values import MAX_CHOICES, Message

MAX_TIMEOUT = 3600.0
TIMEOUT = 600.0
MAX_STOPS = 16
MAX_INPUTS = 2048

Seconds = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Texts = str | tuple[str | Token | tuple[Token, ...], ...]
"""A text, texts, tokens, or lists of tokens."""


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    """Whether a last chunk tells the tokens used."""
    include_obfuscation: bool | None = None
    """Passed over."""


class Asking(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every request may say."""

    given: ClassVar[str]
    """The field with what the model is given."""
    model: str
    """One of `GET /v1/models`."""
    user: str | None = None
    """Becomes the job's label `user`."""
    timeout: Seconds | None = None
    """Seconds within which the answer must be there, 600 unless told. Not OpenAI's."""


class Generating(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every request for text may say."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """0 always takes the likeliest token."""
    top_p: Share | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """How many answers."""
    stop: str | tuple[str, ...] | None = None
    """Up to 16 texts at which the answer ends; they are not part of it."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool | None = None
    """Whether the answer comes in parts, as server-sent events, while it is made."""
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """0 means all. Not OpenAI's."""
    min_p: Share | None = None
    """Not OpenAI's."""
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    """Not OpenAI's."""
    grammar: str | None = None
    """A GBNF grammar that the answer follows. Not OpenAI's."""
    metadata: dict[str, str] | None = None
    """Becomes the job's labels."""
    logit_bias: dict[str, Any] | None = None
    """Refused unless empty."""


class TextFormat(Struct, frozen=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Struct, frozen=True, kw_only=True):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    """The answer follows the schema whatever this says."""


class JsonSchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


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


class ChatBody(Generating, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation, and how it is to go on."""

    given = "messages"
    messages: Annotated[tuple[Message, ...], Meta(min_length=1)]
    """Images are `data:` URIs: nothing is fetched."""
    max_completion_tokens: Count | None = None
    """Without it, until the model ends or its context is full."""
    max_tokens: Count | None = None
    """The older name of the same."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Needs `logprobs`."""
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolWanted | None = None
    parallel_tool_calls: bool | None = None
    """With false, at most one tool is called."""

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
    reasoning_effort: Any = None
    """Refused."""
    verbosity: Any = None
    """Refused."""
    web_search_options: Any = None
    """Refused."""

    prediction: Any = None
    """Passed over, as what follows: it would not change the answer."""
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None


class CompletionBody(Generating, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text to go on from, as it is: no chat template."""

    given = "prompt"
    prompt: Texts
    """Text, texts, tokens or lists of tokens."""
    max_tokens: Count | None = None
    """16 unless told, as with OpenAI."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """How many alternatives are told for each token."""
    echo: bool | None = None
    """Whether the prompt, if it is text, is told before the answer; not with `logprobs`."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Refused unless it equals `n`."""
    suffix: str | None = None
    """Refused unless empty."""


class EmbeddingBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to be made vectors of length one."""

    given = "input"
    input: Texts
    """Text, texts, tokens or lists of tokens."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` is 32-bit floats, little-endian."""
    dimensions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Refused unless it is what the model has."""


TextBody = ChatBody | CompletionBody
AnyBody = ChatBody | CompletionBody | EmbeddingBody
