"""`/v1/messages`: Anthropic's API for conversations, mapped onto the same jobs as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.api.openai.answers import JobOrigin, arguments_of
from penstock.api.openai.endpoints import endpoint
from penstock.api.openai.errors import tell
from penstock.api.openai.requests import (
    Asking,
    ChatBody,
    ChatTurn,
    ToolName,
    ToolWanted,
    chat_of,
    content_of,
    tools_of,
    unsupported,
)
from penstock.api.reply import EVENT_STREAM, JSON_HEADERS, Reply, encode
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.workloads.llm.values import (
    ChatRequest,
    Choice,
    Delta,
    ImagePart,
    ImageUrl,
    LlmResult,
    TextPart,
    ToolCall,
    ToolFunction,
    Usage,
)

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; of the others, those below 500 are `invalid_request_error`, the rest `api_error`."""


class MessageTurn(Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | tuple[dict[str, Any], ...]
    """Text, or blocks: text, image, tool_use, tool_result, thinking."""


class MessagesBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to continue, as Anthropic writes it."""

    given = "messages"
    messages: Annotated[tuple[MessageTurn, ...], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)]
    system: str | tuple[dict[str, Any], ...] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    stop_sequences: tuple[str, ...] | None = None
    stream: bool | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    """Tools of the client's own; tools that Anthropic runs itself are refused."""
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    """`disabled` turns thinking off where the chat template can."""
    metadata: dict[str, Any] | None = None
    """`user_id` becomes the job's label `user`."""
    service_tier: Any = None
    """Ignored, as what follows."""
    cache_control: Any = None
    container: Any = None
    context_management: Any = None


def chat_request(body: MessagesBody, options: Mapping[str, Any]) -> ChatRequest:
    """Raises InvalidRequest, naming the field."""
    turns: list[ChatTurn] = []
    if body.system:
        turns.append(ChatTurn(role="system", content=_plain_text("system", body.system)))
    for index, turn in enumerate(body.messages):
        turns += _turns(f"messages[{index}]", turn)
    choice, parallel = _choice(body.tool_choice)
    thinking = (body.thinking or {}).get("type")
    chat = ChatBody(
        model=body.model,
        messages=tuple(turns),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        stream=body.stream,
        tools=tools_of(body.tools, "custom", "input_schema", default="custom"),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        chat_template_kwargs={"enable_thinking": thinking != "disabled"} if thinking else None,
    )
    return chat_of(chat, options)


def _plain_text(where: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list | tuple):
        raise InvalidRequest(where, "must be text or a list of blocks")
    for block in given:
        if not isinstance(block, dict) or block.get("type") != "text":
            raise unsupported(where, "only text is known here")
    return "\n".join(str(block.get("text", "")) for block in given)


def _turns(where: str, turn: MessageTurn) -> list[ChatTurn]:
    """One of ours, and one for each result of a tool."""
    if isinstance(turn.content, str):
        return [ChatTurn(role=turn.role, content=turn.content)]
    parts: list[TextPart | ImagePart] = []
    calls: list[ToolCall] = []
    results: list[ChatTurn] = []
    for index, block in enumerate(turn.content):
        place = f"{where}.content[{index}]"
        match block.get("type"):
            case "text":
                parts.append(TextPart(str(block.get("text", ""))))
            case "image":
                parts.append(_image(place, block.get("source")))
            case "tool_use":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                name = str(block.get("name", ""))
                calls.append(
                    ToolCall(id=str(block.get("id", "")), function=ToolFunction(name, arguments))
                )
            case "tool_result":
                text = _plain_text(f"{place}.content", block.get("content") or "")
                call_id = str(block.get("tool_use_id", ""))
                results.append(ChatTurn(role="tool", content=text, tool_call_id=call_id))
            case "thinking" | "redacted_thinking":
                pass
            case other:
                raise unsupported(f"{place}.type", f"{str(other)[:40]!r} is not known here")
    found = list(results)
    if parts or calls or not results:
        said, asked = content_of(parts), tuple(calls) or None
        found.append(ChatTurn(role=turn.role, content=said, tool_calls=asked))
    return found


def _image(where: str, source: Any) -> ImagePart:
    if isinstance(source, dict) and source.get("type") == "base64":
        kind, data = source.get("media_type"), source.get("data")
        return ImagePart(ImageUrl(f"data:{kind};base64,{data}"))
    if isinstance(source, dict) and source.get("type") == "url":
        return ImagePart(ImageUrl(str(source.get("url"))))
    raise InvalidRequest(f"{where}.source", "must be base64 or url")


def _choice(given: dict[str, Any] | None) -> tuple[Any, bool | None]:
    if given is None:
        return None, None
    parallel = False if given.get("disable_parallel_tool_use") else None
    match given.get("type"):
        case "auto" | "none" as same:
            return same, parallel
        case "any":
            return "required", parallel
        case "tool":
            return ToolWanted("function", ToolName(str(given.get("name", "")))), parallel
        case _:
            raise InvalidRequest("tool_choice.type", "must be auto, any, tool or none")


# -- the answer ---------------------------------------------------------------------


class MessageObject(Struct, frozen=True, kw_only=True):
    id: str
    """`msg_` and the id of the job."""
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None = None
    usage: dict[str, int]


def message_of(body: MessagesBody, origin: JobOrigin, result: LlmResult | None) -> MessageObject:
    """Without a result, as it stands at the beginning."""
    choice = result.choices[0] if result is not None else None
    return MessageObject(
        id=f"msg_{origin.job_id}",
        model=origin.model,
        content=[] if choice is None else _blocks(choice),
        stop_reason=None if choice is None else _STOPS[choice.finish_reason],
        usage=_usage(result.usage if result is not None else Usage()),
    )


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts what was read from a cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text or not choice.tool_calls:
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.tool_calls:
        function = call.function
        given = {"id": call.id, "name": function.name, "input": arguments_of(call)}
        blocks.append({"type": "tool_use", **given})
    return blocks


class MessageStream:
    """See `StreamFormat`: the events of one message. One block is open at a time."""

    headers = EVENT_STREAM
    heartbeat = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, body: MessagesBody, origin: JobOrigin) -> None:
        self._body, self._origin = body, origin
        self._open = ""
        self._index = -1

    def begin(self) -> bytes:
        return _event("message_start", message=message_of(self._body, self._origin, None))

    def piece(self, piece: Delta) -> bytes:
        if piece.choice:
            return b""
        out = b""
        if piece.reasoning:
            out += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out += self._delta(type="thinking_delta", thinking=piece.reasoning)
        if piece.text:
            out += self._block("text", {"type": "text", "text": ""})
            out += self._delta(type="text_delta", text=piece.text)
        for call in piece.tool_calls:
            given = {"id": call.id, "name": call.name, "input": {}}
            out += self._block(f"call {call.index}", {"type": "tool_use", **given})
            if call.arguments:
                out += self._delta(type="input_json_delta", partial_json=call.arguments)
        return out

    def _block(self, name: str, block: dict[str, Any]) -> bytes:
        if name == self._open:
            return b""
        ended = self._end_block()
        self._open = name
        self._index += 1
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> bytes:
        return _event("content_block_stop", index=self._index) if self._open else b""

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def finish(self, rest: list[Delta], result: LlmResult) -> bytes:
        out = b"".join(self.piece(piece) for piece in rest)
        if not self._open:
            out += self._block("text", {"type": "text", "text": ""})
        whole = message_of(self._body, self._origin, result)
        delta = {"stop_reason": whole.stop_reason, "stop_sequence": None}
        out += self._end_block() + _event("message_delta", delta=delta, usage=whole.usage)
        return out + _event("message_stop")

    def fail(self, error: PenstockError) -> bytes:
        return b"event: error\ndata: %b\n\n" % encode(_fault(error)[1])


def _event(kind: str, **facts: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **facts}))


class AnthropicFault(Struct, frozen=True):
    type: str
    message: str


class AnthropicError(Struct, frozen=True):
    """What went wrong, in Anthropic's shape."""

    error: AnthropicFault
    type: Literal["error"] = "error"


def _fault(error: BaseException) -> tuple[int, AnthropicError]:
    refusal = tell(error)
    status = refusal.status
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    fault = refusal.fault
    message = fault.message
    if fault.param and not message.startswith(fault.param):
        message = f"{fault.param}: {message}"
    return status, AnthropicError(AnthropicFault(kind, message))


def problem_reply(error: BaseException) -> Reply:
    status, fault = _fault(error)
    return Reply(encode(fault), status, (*JSON_HEADERS, *tell(error).headers))


@endpoint(
    "/v1/messages",
    request=chat_request,
    parts=MessageStream,
    problem=problem_reply,
    problem_kind=AnthropicError,
)
def create_message(body: MessagesBody, origin: JobOrigin, result: LlmResult) -> MessageObject:
    """Continue a conversation (Anthropic's messages).

    As Anthropic's: text, images, tools. One job, as for a chat.
    """
    return message_of(body, origin, result)
