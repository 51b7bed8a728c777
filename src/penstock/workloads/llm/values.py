"""Language-model work as values: what is asked of a model, what it says, and why it could not.

The same values are a canonical job's input and result (`job.llm.<model>`, or `job.chat.<model>`
where the model is split over nodes), what a spooled job becomes, and what the OpenAI door makes of
a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.core.errors import InvalidRequest

TOPICS = "job.llm."
"""How the topics of models begin; the model's name follows."""
PIPE_TOPICS = "job.chat."
"""The same for models that are split over nodes."""
MODEL_TOPICS = (TOPICS, PIPE_TOPICS)
"""Where two serve the same name, the first has precedence."""
MAX_CHOICES = 128
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", re.ASCII)
_MAX_NAME = 120


class LlmCode(StrEnum):
    """Why a model did not answer."""

    CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
    """The prompt has more tokens than the model can look at; both counts are told."""
    INVALID_PROMPT = "INVALID_PROMPT"
    """What was asked can't be given to this model: empty, not UTF-8, roles out of order."""
    INVALID_SCHEMA = "INVALID_SCHEMA"
    """A JSON schema or grammar that no answer can be held to."""
    NOT_SUPPORTED = "NOT_SUPPORTED"
    """The model can't do this: images without a projector, tools that its template ignores."""
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    MODEL_INVALID = "MODEL_INVALID"
    """Its file is cut off, damaged, or no GGUF."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    ENGINE_MISSING = "ENGINE_MISSING"
    """llama.cpp is not installed, or can't be loaded here."""
    ENGINE_CRASHED = "ENGINE_CRASHED"
    """The process that computes died; the job may be tried again."""
    ENGINE_ERROR = "ENGINE_ERROR"
    """The engine refused or failed for a reason of its own."""
    JOB_MISSING = "JOB_MISSING"
    """A node of the pipe knows nothing of the job: it was restarted, or gave it up."""
    ORIGIN_MISMATCH = "ORIGIN_MISMATCH"
    """A job came to its head on a node that is not its origin."""
    END_MODEL_UNAVAILABLE = "END_MODEL_UNAVAILABLE"
    """The origin has no end model (any more)."""
    PREFILL_UPDATE_FAILED = "PREFILL_UPDATE_FAILED"
    """Nobody listened any more while the prompt was read."""
    NO_MODEL_FOR_NEXT_LAYER = "NO_MODEL_FOR_NEXT_LAYER"
    """No node of the pipe has the first layer."""
    NO_LOCAL_MODEL = "NO_LOCAL_MODEL"
    """A node was given a job for layers that it does not hold (any more)."""
    JOB_UPDATE_FAILED = "JOB_UPDATE_FAILED"
    """Nobody listened any more while the answer was made."""
    PIPE_UNAVAILABLE = "PIPE_UNAVAILABLE"
    """The nodes that are there do not hold all of the model's layers, or not the same weights."""
    NODE_LOST = "NODE_LOST"
    """A node of the pipe was lost, and no other has its layers."""
    NODE_STALLED = "NODE_STALLED"
    """A step did not come back in time, and no other way was left."""
    NO_ROOM = "NO_ROOM"
    """The nodes' caches stayed full, or too many jobs waited, for as long as a job may wait."""
    WRONG_COMPUTATION = "WRONG_COMPUTATION"
    """A node gave back what can't be right: not a number, another shape, or not what the origin
    computed itself."""


class LlmFailure(Exception):
    """A model did not answer."""

    def __init__(self, code: LlmCode, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.facts: Mapping[str, Any] = facts
        """For programs, as `prompt_tokens` and `context` of CONTEXT_EXCEEDED."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class EngineUnavailable(LlmFailure):
    """The engine can't compute anything for this model now: it is out of memory, can't load it, or
    keeps crashing. No job is to blame, and every job of the model can only wait."""


class EngineCrashed(LlmFailure):
    """The engine died under a job, which is to blame only if it ran alone."""

    def __init__(self, failure: LlmFailure, *, alone: bool) -> None:
        super().__init__(failure.code, failure.message, **failure.facts)
        self.alone = alone


def is_model_name(name: str) -> bool:
    """Letters, digits, `_` and `-`, in words with single dots between: a part of a topic."""
    return len(name) <= _MAX_NAME and _NAME.fullmatch(name) is not None


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


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ImageUrl(Struct, frozen=True):
    url: str
    """A `data:` URI: nothing is fetched."""


class ImagePart(Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl


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
    content: str | tuple[TextPart | ImagePart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Ask(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
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


class Chat(Ask, frozen=True, kw_only=True, tag_field="kind", tag="chat"):
    """A conversation, given to the model through its own chat template."""

    messages: Annotated[tuple[Message, ...], Meta(min_length=1)]
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may ask for, as OpenAI writes them."""
    tool_choice: str | dict[str, Any] | None = None


class Completion(Ask, frozen=True, kw_only=True, tag_field="kind", tag="completion"):
    """Text to go on from, as it is: no template."""

    prompts: Annotated[tuple[str | tuple[int, ...], ...], Meta(min_length=1, max_length=2048)]
    """Each text or tokens. The answers to the first come first."""


class Embedding(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="embedding"
):
    """Texts as vectors of length one."""

    inputs: Annotated[tuple[str | tuple[int, ...], ...], Meta(min_length=1, max_length=2048)]


Generation = Chat | Completion
LlmRequest = Chat | Completion | Embedding
"""The input of a job with the topic `job.llm.<model>` or `job.chat.<model>`."""
_decoder: msgspec.json.Decoder[LlmRequest] = msgspec.json.Decoder(LlmRequest)


def read_request(payload: bytes) -> LlmRequest:
    """Raises InvalidRequest, naming what is wrong."""
    try:
        return _decoder.decode(payload)
    except RecursionError:
        raise InvalidRequest("input", "is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("input", f"is no request to a language model: {error}") from error


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
        )


class ToolDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a tool call, as it comes."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Piece(Struct, frozen=True, kw_only=True, omit_defaults=True):
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


class Said(Struct, frozen=True, kw_only=True):
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


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What is known of a model."""

    name: str
    path: str = ""
    size: int = 0
    """Bytes of its file."""
    architecture: str = ""
    parameters: int = 0
    quantisation: str = ""
    train_context: int = 0
    """Tokens that it was made for."""
    context: int = 0
    """Tokens that one job may have here; 0 while it is not loaded."""
    slots: int = 0
    """Jobs that it computes at once; 0 while it is not loaded."""
    loaded: bool = False
    tools: bool | None = None
    """None while it is not known: the template tells when it is loaded."""
    vision: bool = False
    memory: int = 0
    """Bytes that it takes, estimated before it is loaded and read off afterwards."""
