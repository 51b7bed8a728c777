"""Language-model work as values: what is asked of a model, what it says, and why it could not.

The same values are a canonical job's input and result (`job.llm.<model>`, or `job.chat.<model>`
where the model is split over nodes), what a spooled job becomes, and what the OpenAI API makes of
a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.core.errors import InvalidRequest
from penstock.models.values import LlmCode as LlmCode
from penstock.models.values import LlmFailure as LlmFailure
from penstock.models.values import ModelFacts as ModelFacts
from penstock.models.values import is_model_name as is_model_name

TOPICS = "job.llm."
"""How the topics of models begin; the model's name follows."""
PIPE_TOPICS = "job.chat."
"""The same for models that are split over nodes."""
MODEL_TOPICS = (TOPICS, PIPE_TOPICS)
"""Where two serve the same name, the first has precedence."""
MAX_CHOICES = 128


class EngineUnavailable(LlmFailure):
    """The engine can't compute anything for this model now: it is out of memory, can't load it, or
    keeps crashing. No job is to blame, and every job of the model can only wait."""


class EngineCrashed(LlmFailure):
    """The engine died under a job, which is to blame only if it ran alone."""

    def __init__(self, failure: LlmFailure, *, alone: bool) -> None:
        super().__init__(failure.code, failure.message, **failure.facts)
        self.alone = alone


def topic_of(model: str) -> str:
    return TOPICS + model


def model_of(topic: str) -> str:
    """The model whose jobs have this topic; empty if it is none's."""
    for prefix in MODEL_TOPICS:
        if topic.startswith(prefix) and is_model_name(name := topic.removeprefix(prefix)):
            return name
    return ""


def topics_by_model(topics: Iterable[str]) -> dict[str, str]:
    """The topic of each model that can be asked, those that are whole first."""
    found: dict[str, str] = {}
    known = list(topics)
    for prefix in MODEL_TOPICS:
        for topic in known:
            if topic.startswith(prefix) and (name := model_of(topic)):
                found.setdefault(name, topic)
    return found


# -- what is asked ------------------------------------------------------------------


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the next token is chosen; what is None is left to the model and the engine."""

    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    """0 always takes the likeliest."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """0 means all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 32) - 2)] | None = None

    # What follows is llama.cpp's own, and passed on to it as it is.
    logit_bias: dict[str, float | bool] | None = None
    """By the token's number; False excludes it."""
    repeat_last_n: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    """Tokens that penalties look at; -1 means all."""
    typical_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=100)] | None = None
    dynatemp_range: Annotated[float, Meta(ge=0, le=5)] | None = None
    dynatemp_exponent: Annotated[float, Meta(ge=0, le=10)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    dry_sequence_breakers: Annotated[tuple[str, ...], Meta(min_length=1, max_length=64)] | None = (
        None
    )
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] | None = None
    mirostat_eta: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_keep: Annotated[int, Meta(ge=0, le=1000)] | None = None
    ignore_eos: bool | None = None
    """Whether the answer goes on until its limit."""
    samplers: Annotated[tuple[str, ...], Meta(max_length=32)] | None = None
    """Names of samplers, in their order."""


_FIELDS = Sampling.__struct_fields__
LLAMA_OPTIONS = _FIELDS[_FIELDS.index("logit_bias") :]
"""Fields of Sampling that only llama.cpp knows."""


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ImageUrl(Struct, frozen=True):
    url: str
    """A `data:` URI; over HTTP also an `https:` URL below one of the setting
    `openai.image_sources`."""


class ImagePart(Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class InputAudio(Struct, frozen=True):
    data: str
    """Base64."""
    format: Literal["wav", "mp3"]


class AudioPart(Struct, frozen=True, tag_field="type", tag="input_audio"):
    input_audio: InputAudio


class ToolFunction(Struct, frozen=True):
    name: str
    arguments: str = ""
    """JSON, as the model wrote it."""


class ToolCall(Struct, frozen=True, kw_only=True):
    id: str = ""
    type: Literal["function"] = "function"
    function: ToolFunction


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[TextPart | ImagePart | AudioPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class GenerationOptions(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What every generation may say."""

    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """None means until the model ends, or its context is full."""
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """Strings at which the answer ends; they are not part of it."""
    sampling: Sampling = Sampling()
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """How many alternatives are told for each token; 0 tells the chosen one's alone."""
    schema: dict[str, Any] | None = None
    """A JSON schema that the answer follows."""
    grammar: str | None = None
    """A GBNF grammar that the answer follows."""
    json_object: bool = False
    """The answer is a JSON object of any shape."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """How many answers to each prompt."""
    stream: bool = False
    """Whether the answer is told piece by piece while it is made."""


class ChatRequest(GenerationOptions, frozen=True, kw_only=True, tag_field="kind", tag="chat"):
    """A conversation, given to the model through its own chat template."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1)]
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may ask for, as OpenAI writes them."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """Whether the model may call several tools at once; None leaves it to the template."""
    template_options: dict[str, Any] = {}
    """Variables of the chat template, as `enable_thinking` and `reasoning_effort`."""


class CompletionRequest(
    GenerationOptions, frozen=True, kw_only=True, tag_field="kind", tag="completion"
):
    """Text to go on from, as it is: no template."""

    prompts: Annotated[tuple[str | tuple[int, ...], ...], Meta(min_length=1, max_length=2048)]
    """Each text or tokens. The answers to the first come first."""
    suffix: str | None = None
    """Text after the answer: the model fills in what is between."""


class EmbeddingRequest(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="embedding"
):
    """Texts as vectors of length one."""

    inputs: Annotated[tuple[str | tuple[int, ...], ...], Meta(min_length=1, max_length=2048)]


GenerationRequest = ChatRequest | CompletionRequest


class TokenizeRequest(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="tokenize",
):
    """A text or a conversation to turn into tokens, or tokens to turn into text."""

    text: str | None = None
    messages: tuple[Message, ...] = ()
    """Written by the model's chat template first."""
    tokens: tuple[int, ...] = ()
    add_special: bool = False
    """Whether the tokens come first that the model expects at the beginning of a text."""
    parse_special: bool = True
    """Whether the names of special tokens in a text become these tokens."""


LlmRequest = ChatRequest | CompletionRequest | EmbeddingRequest | TokenizeRequest
"""The input of a job with the topic `job.llm.<model>` or `job.chat.<model>`."""
_decoder: msgspec.json.Decoder[LlmRequest] = msgspec.json.Decoder(LlmRequest)


def read_request(payload: bytes) -> LlmRequest:
    """Raises InvalidRequest, naming what is wrong."""
    try:
        return _decoder.decode(payload)
    except RecursionError:
        raise InvalidRequest("input", "is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("input", f"is not a request to a language model: {error}") from error


# -- what comes of it ---------------------------------------------------------------


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()


class Usage(Struct, frozen=True):
    """Counted in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those that were computed before."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


class Timings(Struct, frozen=True):
    """Milliseconds of the engine."""

    prompt_ms: float = 0.0
    predicted_ms: float = 0.0


class HopTime(Struct, frozen=True, kw_only=True):
    """What a job took of one node of its way, over all of its passes there."""

    node: str
    layers: str
    """As people write them, the last one included: `0-14`; `ends` are embedding, norm and head."""
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    """From its arrival to the beginning of its computation."""
    network_ms: float = 0.0
    """From the node before it to this one."""
    passes: int = 0
    tokens: int = 0
    wire: str = ""
    """In how many bits it sent hidden states on, if in fewer than it computes with."""
    wire_error: float = 0.0
    """By how much that changed them, as a share of their size: the most of all passes."""

    def __add__(self, other: HopTime) -> HopTime:
        """Of the same node and layers."""
        return HopTime(
            node=self.node,
            layers=self.layers,
            compute_ms=self.compute_ms + other.compute_ms,
            queue_ms=self.queue_ms + other.queue_ms,
            network_ms=self.network_ms + other.network_ms,
            passes=self.passes + other.passes,
            tokens=self.tokens + other.tokens,
            wire=self.wire or other.wire,
            wire_error=max(self.wire_error, other.wire_error),
        )

    @property
    def lossy(self) -> str:
        """For people, behind what else is said of it; empty if nothing was changed."""
        error = f", error {self.wire_error:.2g} of their size"
        return f", hidden states sent in {self.wire}{error}" if self.wire else ""


class ToolDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a tool call, as it comes."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model says next in one of its answers. Text is never cut inside a character."""

    choice: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class Choice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One whole answer."""

    index: int = 0
    text: str = ""
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """The end of one answer, with what it took."""

    choice: Choice
    usage: Usage = Usage()
    timings: Timings = Timings()
    hops: tuple[HopTime, ...] = ()
    """In the order of the layers, where the model is split over nodes."""


class LlmResult(Struct, frozen=True, kw_only=True):
    """The result of a Chat or a Completion."""

    model: str
    engine: str
    """Which engine answered, with its version: the same engine with the same settings gives the
    same greedy text."""
    choices: tuple[Choice, ...]
    usage: Usage = Usage()
    """A prompt with several answers is counted once."""
    timings: Timings = Timings()
    hops: tuple[HopTime, ...] = ()
    """The way it went, where the model is split over nodes; all answers together."""


class EmbeddingResult(Struct, frozen=True, kw_only=True):
    model: str
    engine: str
    vectors: tuple[tuple[float, ...], ...]
    usage: Usage = Usage()


class TokenizeResult(Struct, frozen=True, kw_only=True):
    model: str
    engine: str
    tokens: tuple[int, ...]
    text: str
