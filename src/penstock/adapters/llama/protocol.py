"""Between our values and the JSON of llama.cpp's server. Plain values in, plain values out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.workloads.llm.schemas import guided_grammar, hold_of
from penstock.workloads.llm.tools import wants_tools
from penstock.workloads.llm.values import (
    AudioPart,
    ChatRequest,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    GenerationOptions,
    GenerationRequest,
    ImagePart,
    LlmCode,
    LlmFailure,
    Message,
    Timings,
    TokenizeRequest,
    TokenLogprob,
    ToolCall,
    ToolDelta,
    ToolFunction,
    TopLogprob,
    Usage,
)

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
INFILL = "/infill"
TEMPLATE = "/apply-template"
EMBEDDINGS = "/v1/embeddings"
_SEEDS = (1 << 32) - 1
"""One less than there are: the last means a random one."""
_END = b"\n\n"
LARGEST = 64 << 10
"""Bytes of a schema, of a grammar, of all tools together. Definitions that refer to each other
could be read at 85,000 bytes, and not at 340,000."""
DEEPEST = 1000
"""Parentheses of a grammar within each other."""
_PLAIN = re.compile(r'"(?:[^"\\]|\\.)*"?|\[(?:[^\]\\]|\\.)*\]?|#[^\n]*|[^()"\[#]+', re.S)
"""What says nothing of depth: literals, classes of characters, comments. Each is passed over even
if it is not closed, so that nothing is looked at twice."""
_JSON_STARTS = tuple('{["-0123456789tfn')
_encode = msgspec.json.Encoder().encode


# -- what is asked ------------------------------------------------------------------


def request_of(
    ask: GenerationRequest, choice: int, slot: Mapping[str, Any] | None = None
) -> tuple[str, bytes]:
    """Where to post, and what; `slot` as `Slots.take` gives it. Raises INVALID_PROMPT."""
    if isinstance(ask, ChatRequest):
        path, body = CHAT, {**_common(ask, choice % ask.n), **_chat(ask)}
    else:
        path = COMPLETION if ask.suffix is None else INFILL
        body = {**_common(ask, choice % ask.n), **_completion(ask, choice)}
    return path, encoded({**body, **(slot or {})})


def encoded(body: dict[str, Any]) -> bytes:
    try:
        return _encode(body)
    except UnicodeEncodeError:
        raise LlmFailure(LlmCode.INVALID_PROMPT, "the prompt is not valid Unicode") from None


def embedding_request(text: str | tuple[int, ...]) -> bytes:
    return encoded({"input": _not_empty(text), "encoding_format": "float"})


def template_request(messages: Sequence[Message]) -> bytes:
    """To be posted to TEMPLATE, which writes the conversation as its prompt."""
    return encoded({"messages": [_message(one) for one in messages]})


def tokenize_request(text: str, ask: TokenizeRequest) -> tuple[str, bytes]:
    """Where to post, and what."""
    if ask.tokens:
        return "/detokenize", encoded({"tokens": ask.tokens})
    special = {"add_special": ask.add_special, "parse_special": ask.parse_special}
    return "/tokenize", encoded({"content": text, **special})


def check_guided(ask: GenerationRequest, choice: Choice) -> None:
    """Raises INVALID_SCHEMA for an answer that is no JSON: llguidance could not read the schema."""
    if not is_guided(ask) or not choice.text:
        return
    is_json = choice.text.lstrip()[:1] in _JSON_STARTS
    if is_json and choice.finish_reason == "stop" and not ask.stop:
        try:
            msgspec.json.decode(choice.text)
        except msgspec.DecodeError:
            is_json = False
    if not is_json:
        raise LlmFailure(LlmCode.INVALID_SCHEMA, "no answer can follow the JSON schema")


def schema_check(ask: GenerationRequest) -> bytes | None:
    """To be posted to TEMPLATE first, which refuses a schema that a raw completion or llguidance
    would simply not follow."""
    if ask.schema is None or (isinstance(ask, ChatRequest) and not is_guided(ask)):
        return None
    message = {"role": "user", "content": "."}
    return encoded({"messages": [message], "response_format": _format(ask.schema)})


def has_part(ask: GenerationRequest, kind: type[ImagePart] | type[AudioPart]) -> bool:
    return isinstance(ask, ChatRequest) and any(
        isinstance(part, kind)
        for message in ask.messages
        for part in (message.content if isinstance(message.content, tuple) else ())
    )


def is_guided(ask: GenerationRequest) -> bool:
    """Whether llguidance holds the answer to its schema. It says nothing of a schema that it can't
    read: such an answer is free."""
    return ask.schema is not None and not wants_tools(ask) and hold_of(ask.schema).guided


def is_constrained(ask: GenerationRequest) -> bool:
    """Whether the answer is to follow a schema or a grammar."""
    return ask.schema is not None or ask.grammar is not None or ask.json_object


def _common(ask: GenerationOptions, number: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        # Before the first token only these tell that something goes on.
        "return_progress": True,
    }
    sampling = {name: value for name, value in _pairs(ask.sampling) if value is not None}
    if "seed" in sampling:
        sampling["seed"] = (sampling["seed"] + number) % _SEEDS
    body |= sampling
    if ask.max_tokens is not None:
        body["max_tokens"] = ask.max_tokens
    if ask.stop:
        body["stop"] = ask.stop
    if ask.grammar is not None:
        body["grammar"] = _grammar(ask.grammar)
    return body


def _grammar(text: str) -> str:
    if not text.strip():
        raise LlmFailure(LlmCode.INVALID_SCHEMA, "the grammar is empty")
    return text


def _pairs(sampling: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(sampling, name)) for name in sampling.__struct_fields__)


def _chat(ask: ChatRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [_message(one) for one in ask.messages]}
    if ask.logprobs is not None:
        # None are told when none are asked for, not even the chosen one's.
        body |= {"logprobs": True, "top_logprobs": max(1, ask.logprobs)}
    if ask.schema is not None and is_guided(ask):
        body["grammar"] = guided_grammar(ask.schema)
    elif ask.schema is not None:
        body["response_format"] = _format(ask.schema)
    elif ask.json_object:
        body["response_format"] = {"type": "json_object"}
    if wants_tools(ask):
        body["tools"] = ask.tools
        if ask.tool_choice is not None:
            body["tool_choice"] = ask.tool_choice
        if ask.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = ask.parallel_tool_calls
    if ask.template_options:
        body["chat_template_kwargs"] = ask.template_options
    return body


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _message(message: Message) -> dict[str, Any]:
    for part in message.content if isinstance(message.content, tuple) else ():
        if isinstance(part, ImagePart) and not part.image_url.url.startswith("data:"):
            raise LlmFailure(
                LlmCode.INVALID_PROMPT, "an image is given as a data: URI, nothing is fetched"
            )
    body = msgspec.to_builtins(message)
    body.setdefault("content", None)
    if message.role == "developer":  # a newer word, which templates don't know
        body["role"] = "system"
    return dict(body)


def _completion(ask: CompletionRequest, choice: int) -> dict[str, Any]:
    number = choice // ask.n
    if number >= len(ask.prompts):
        raise ValueError(f"there is no choice {choice}")
    prompt = _not_empty(ask.prompts[number])
    body: dict[str, Any] = {"prompt": prompt}
    if ask.suffix is not None:
        body = {"input_prefix": prompt, "input_suffix": ask.suffix}
    if ask.logprobs is not None:
        body["logprobs"] = max(1, ask.logprobs)
    if ask.schema is not None and is_guided(ask):
        body["grammar"] = guided_grammar(ask.schema)
    elif ask.schema is not None:
        body["json_schema"] = ask.schema
    elif ask.json_object:
        body["json_schema"] = {"type": "object"}
    return body


def _not_empty(prompt: str | tuple[int, ...]) -> str | tuple[int, ...]:
    if not prompt:
        raise LlmFailure(LlmCode.INVALID_PROMPT, "the prompt is empty")
    return prompt


# -- what comes of it ---------------------------------------------------------------


class EventParser:
    """A stream of server-sent events, cut into the JSON of each."""

    def __init__(self) -> None:
        self._part = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        *events, self._part = (self._part + data).split(_END)
        for event in events:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                yield msgspec.json.decode(event[6:])


class AnswerReader:
    """One answer while it comes: events in, Deltas out, and in the end a Completion."""

    def __init__(self, ask: GenerationRequest, choice: int) -> None:
        self._choice = choice
        self._alternatives = ask.logprobs
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._calls: dict[int, list[ToolDelta]] = {}
        self._finish: str | None = None
        self._usage = Usage()
        self._timings = Timings()
        self.is_done = False

    def add(self, event: dict[str, Any]) -> Delta | None:
        """What the event adds; None if nothing that can be read."""
        if usage := event.get("usage"):
            self._usage = _usage(usage)
            self.is_done = True
        if timings := event.get("timings"):
            self._timings = Timings(timings["prompt_ms"], timings["predicted_ms"])
        if "stop" in event:  # of INFILL, which has a form of its own
            self._finish = "length" if event.get("stop_type") == "limit" else self._finish
            if event["stop"]:
                used = event.get("tokens_evaluated", 0), event.get("tokens_predicted", 0)
                self._usage, self.is_done = Usage(*used), True
            return self._piece(event)
        for one in event.get("choices", ()):
            self._finish = one.get("finish_reason") or self._finish
            return self._piece(one)
        return None

    def said(self) -> Completion:
        return Completion(
            choice=Choice(
                index=self._choice,
                text="".join(self._text),
                finish_reason=_finish_reason(self._finish),
                reasoning="".join(self._reasoning),
                tool_calls=tuple(_call(parts) for _, parts in sorted(self._calls.items())),
                logprobs=None if self._alternatives is None else tuple(self._logprobs),
            ),
            usage=self._usage,
            timings=self._timings,
        )

    def _piece(self, one: dict[str, Any]) -> Delta | None:
        delta = one.get("delta") or one
        text = delta.get("content") or delta.get("text") or ""
        reasoning = delta.get("reasoning_content") or ""
        calls = tuple(_delta(call) for call in delta.get("tool_calls") or ())
        logprobs = self._told(one.get("logprobs"))
        if not (text or reasoning or calls or logprobs):
            return None
        self._text.append(text)
        self._reasoning.append(reasoning)
        self._logprobs += logprobs
        for call in calls:
            self._calls.setdefault(call.index, []).append(call)
        return Delta(
            choice=self._choice,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            logprobs=logprobs,
        )

    def _told(self, logprobs: dict[str, Any] | None) -> tuple[TokenLogprob, ...]:
        most = self._alternatives
        if most is None or not logprobs:
            return ()
        return tuple(
            TokenLogprob(
                one["token"],
                one["logprob"],
                _bytes(one),
                tuple(
                    TopLogprob(top["token"], top["logprob"], _bytes(top))
                    for top in one["top_logprobs"][:most]
                ),
            )
            for one in logprobs.get("content") or ()
        )


def embedded(reply: dict[str, Any]) -> tuple[tuple[float, ...], Usage]:
    """A vector, and what it took."""
    [row] = reply["data"]
    return tuple(row["embedding"]), Usage(prompt_tokens=reply["usage"]["prompt_tokens"])


def _usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens", 0)
    )


def _finish_reason(said: str | None) -> Any:
    return said if said in ("length", "tool_calls") else "stop"


def _bytes(one: dict[str, Any]) -> tuple[int, ...] | None:
    return tuple(one["bytes"]) if one.get("bytes") is not None else None


def _delta(call: dict[str, Any]) -> ToolDelta:
    function = call.get("function") or {}
    return ToolDelta(
        index=call.get("index", 0),
        id=call.get("id") or "",
        name=function.get("name") or "",
        arguments=function.get("arguments") or "",
    )


def _call(parts: Sequence[ToolDelta]) -> ToolCall:
    return ToolCall(
        id="".join(part.id for part in parts),
        function=ToolFunction(
            "".join(part.name for part in parts), "".join(part.arguments for part in parts)
        ),
    )


# -- constrained decoding -----------------------------------------------------------


def check_constraints(ask: GenerationRequest) -> None:
    """Refuse a schema or grammar that is too large or deep: llama.cpp reads them by recursion,
    without a limit, and one of them could overflow its stack and take every answer with it.
    Raises INVALID_SCHEMA."""
    if ask.grammar is not None:
        _check_size("grammar", ask.grammar.encode("utf-8", "replace"))
        if _depth(ask.grammar) > DEEPEST:
            raise _too_complex("grammar", f"more than {DEEPEST} parentheses within each other")
    if ask.schema is not None:
        _check_size("schema", msgspec.json.encode(ask.schema))
    if isinstance(ask, ChatRequest) and ask.tools:
        _check_size("tools", msgspec.json.encode(ask.tools))


def _check_size(what: str, data: bytes) -> None:
    if len(data) > LARGEST:
        raise _too_complex(what, f"{len(data):,} bytes, and at most {LARGEST:,} can be followed")


def _depth(grammar: str) -> int:
    depth = deepest = 0
    for character in _PLAIN.sub("", grammar):
        depth += {"(": 1, ")": -1}.get(character, 0)
        deepest = max(deepest, depth)
    return deepest


def _too_complex(what: str, has: str) -> LlmFailure:
    return LlmFailure(LlmCode.INVALID_SCHEMA, f"the {what} has {has}")
