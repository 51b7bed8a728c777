"""`/v1/responses`: OpenAI's newer API for conversations, mapped onto the same jobs as a chat.

A response is its job: `resp_` and the job's id. `previous_response_id` continues from that job's
input and answer, for as long as the job is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.api.openai.answers import JobOrigin
from penstock.api.openai.endpoints import endpoint
from penstock.api.openai.errors import Unanswered, tell
from penstock.api.openai.model_job import payload_of, result_of
from penstock.api.openai.requests import (
    Asking,
    ChatBody,
    ChatTurn,
    Count,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Parsed,
    TextFormat,
    ToolName,
    ToolWanted,
    chat_of,
    content_of,
    tools_of,
    unsupported,
)
from penstock.api.openai.streams import COMMENT
from penstock.api.operation import route
from penstock.api.reply import EVENT_STREAM, Reply, encode, json_reply
from penstock.core.errors import InvalidRequest, NotFound, PenstockError
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.workloads.llm.values import (
    ChatRequest,
    Choice,
    Delta,
    ImagePart,
    ImageUrl,
    LlmResult,
    Message,
    TextPart,
    ToolCall,
    ToolFunction,
    Usage,
    model_of,
    read_request,
)

if TYPE_CHECKING:
    from penstock.api.call import Call

_PREFIX = "resp_"
_LABEL = "openai.response"
"""Of jobs that are responses: whether their first message is `instructions`."""
_PREVIOUS = "openai.previous_response_id"
"""Of jobs that are responses: the one that they continue."""
_HISTORY = "previous messages"


# -- the request --------------------------------------------------------------------


class TextOptions(Struct, frozen=True):
    format: dict[str, Any] | None = None
    """`text`, `json_object`, or `json_schema` with `schema`."""
    verbosity: Any = None
    """Ignored."""


class Reasoning(Struct, frozen=True):
    effort: str | None = None
    summary: Any = None
    """Ignored."""


class ResponseBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to continue."""

    given = "input"
    input: str | tuple[dict[str, Any], ...] = ""
    """Text, or items: messages, function calls and their outputs."""
    instructions: str | None = None
    """The system message of this turn."""
    previous_response_id: str | None = None
    """Continues from that response."""
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0)] | None = None
    stream: bool | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    """Functions; tools that OpenAI runs itself are refused."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    """Becomes the job's labels."""

    background: bool | None = None
    """Refused if true: submit a batch, or a job."""
    conversation: Any = None
    """Refused: use `previous_response_id`."""
    prompt: Any = None
    """Refused."""

    include: Any = None
    """Ignored, as what follows."""
    max_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    top_logprobs: Any = None
    truncation: Any = None


class PreviousResponseNotFound(InvalidRequest):
    code = "PREVIOUS_RESPONSE_NOT_FOUND"


async def with_history(call: Call, parsed: Parsed) -> Parsed:
    """The request with the messages of the response that it continues. Raises NotFound."""
    previous = parsed.body.previous_response_id
    if previous is None:
        return parsed
    try:
        job = await _job(call, previous)
    except NotFound as missing:
        raise PreviousResponseNotFound("previous_response_id", missing.message) from None
    request = read_request(await payload_of(call.api, job.request.context_ptr))
    result = await result_of(call.api, job, LlmResult)
    if not isinstance(request, ChatRequest):
        raise _missing(previous)
    first = 1 if job.request.labels.get(_LABEL) == "instructions" else 0
    messages = (*request.messages[first:], _message(result.choices[0]))
    return replace(parsed, options={**parsed.options, _HISTORY: messages})


async def _job(call: Call, response_id: str) -> Job:
    if not response_id.startswith(_PREFIX):
        raise _missing(response_id)
    try:
        job = await call.api.get(response_id.removeprefix(_PREFIX))
    except (NotFound, InvalidRequest):
        raise _missing(response_id) from None
    if _LABEL not in job.request.labels:
        raise _missing(response_id)
    return job


def _missing(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id[:120]}' not found.")


def _message(choice: Choice) -> Message:
    return Message(role="assistant", content=choice.text, tool_calls=choice.tool_calls)


def chat_request(body: ResponseBody, options: Mapping[str, Any]) -> ChatRequest:
    """Raises InvalidRequest, naming the field."""
    if body.background:
        raise unsupported("background", "submit a batch, or a job of the engine")
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise unsupported(name, "conversations are not stored; use previous_response_id")
    own = {name: value for name, value in options.items() if name != _HISTORY}
    history: tuple[Message, ...] = options.get(_HISTORY, ())
    turns = _turns(body.input)
    if not (turns or history):
        raise InvalidRequest("input", "is empty")
    chat = ChatBody(
        model=body.model,
        messages=turns or (ChatTurn(role="user", content=""),),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        tools=tools_of(body.tools, "function", "parameters"),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )
    request = chat_of(chat, own)
    messages = request.messages if turns else ()
    system = () if body.instructions is None else (_system(body.instructions),)
    return replace(request, messages=(*system, *history, *messages))


def _system(text: str) -> Message:
    return Message(role="system", content=text)


def _turns(given: str | tuple[dict[str, Any], ...]) -> tuple[ChatTurn, ...]:
    if isinstance(given, str):
        return (ChatTurn(role="user", content=given),) if given else ()
    turns: list[tuple[ChatTurn, list[ToolCall]]] = []
    for index, item in enumerate(given):
        where, kind = f"input[{index}]", item.get("type", "message")
        if kind == "message":
            turns.append((_turn(where, item), []))
        elif kind == "function_call":
            call = ToolCall(
                id=str(item.get("call_id", "")),
                function=ToolFunction(str(item.get("name", "")), str(item.get("arguments", ""))),
            )
            if not turns or turns[-1][0].role != "assistant":
                turns.append((ChatTurn(role="assistant"), []))
            turns[-1][1].append(call)
        elif kind == "function_call_output":
            output = item.get("output", "")
            text = output if isinstance(output, str) else _text(f"{where}.output", output)
            call_id = str(item.get("call_id", ""))
            turns.append((ChatTurn(role="tool", content=text, tool_call_id=call_id), []))
        elif kind != "reasoning":
            raise unsupported(f"{where}.type", f"{str(kind)[:40]!r} is not known here")
    return tuple(replace(turn, tool_calls=tuple(calls) or None) for turn, calls in turns)


_ROLES = ("user", "assistant", "system", "developer")


def _turn(where: str, item: dict[str, Any]) -> ChatTurn:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    if isinstance(content, str):
        return ChatTurn(role=role, content=content)
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content", "must be text or a list of parts")
    parts: list[TextPart | ImagePart] = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text"):
            parts.append(TextPart(str(part.get("text", ""))))
        elif kind == "refusal":
            parts.append(TextPart(str(part.get("refusal", ""))))
        elif kind == "input_image" and part.get("image_url"):
            parts.append(ImagePart(ImageUrl(str(part["image_url"]))))
        else:
            raise unsupported(f"{place}.type", f"{str(kind)[:40]!r} is not known here")
    return ChatTurn(role=role, content=content_of(parts))


def _text(where: str, parts: Any) -> str:
    if not isinstance(parts, list):
        raise InvalidRequest(where, "must be text or a list of parts")
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _choice(given: str | dict[str, Any] | None) -> Any:
    if given is None or given in ("none", "auto", "required"):
        return given
    if isinstance(given, dict) and given.get("type") == "function":
        return ToolWanted("function", ToolName(str(given.get("name", ""))))
    raise InvalidRequest("tool_choice", "must be none, auto, required or a function")


def _format(text: TextOptions | None) -> Any:
    shape = text.format if text is not None else None
    match (shape or {}).get("type", "text"):
        case "text":
            return TextFormat()
        case "json_object":
            return JsonObjectFormat()
        case "json_schema" if isinstance((shape or {}).get("schema"), dict):
            return JsonSchemaFormat(JsonSchema(schema=shape["schema"]))  # type: ignore[index]
        case _:
            raise InvalidRequest("text.format", "must be text, json_object or json_schema")


# -- the response -------------------------------------------------------------------


class ResponseObject(Struct, frozen=True, kw_only=True):
    id: str
    """`resp_` and the id of the job."""
    object: Literal["response"] = "response"
    created_at: int
    status: str
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float | None = None
    truncation: str = "disabled"
    usage: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, str] = {}


def response_of(body: ResponseBody, origin: JobOrigin, result: LlmResult | None) -> ResponseObject:
    """Without a result, as it stands while it is made."""
    status, details, output, usage = "in_progress", None, [], None
    if result is not None:
        choice = result.choices[0]
        is_cut = choice.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        output, usage = _items(origin, choice), _usage(result.usage)
    return ResponseObject(
        id=_PREFIX + origin.job_id,
        created_at=origin.created,
        status=status,
        incomplete_details=details,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=origin.model,
        output=output,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        temperature=body.temperature,
        text={"format": (body.text.format if body.text else None) or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=list(body.tools or ()),
        top_p=body.top_p,
        usage=usage,
        user=body.user,
        metadata=body.metadata or {},
    )


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _items(origin: JobOrigin, choice: Choice) -> list[dict[str, Any]]:
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        items.append(_reasoning_item(origin, choice.reasoning))
    if choice.text or not choice.tool_calls:
        items.append(_message_item(origin, [_text_part(choice.text)], status))
    for number, call in enumerate(choice.tool_calls):
        items.append(_call_item(origin, number, call, status))
    return items


def _reasoning_item(origin: JobOrigin, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{origin.job_id}", "type": "reasoning", "summary": [], "content": content}


def _message_item(origin: JobOrigin, content: list[Any], status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{origin.job_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(origin: JobOrigin, number: int, call: ToolCall, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{origin.job_id}_{number}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.function.name,
        "arguments": call.function.arguments,
        "status": status,
    }


class ResponseStream:
    """See `StreamFormat`: the events of one response."""

    headers = EVENT_STREAM
    heartbeat = COMMENT

    def __init__(self, body: ResponseBody, origin: JobOrigin) -> None:
        self._body, self._origin = body, origin
        self._number = 0
        self._open: list[str] = []
        """Items that have begun, in their order: `reasoning`, `message`, and calls by number."""

    def begin(self) -> bytes:
        response = response_of(self._body, self._origin, None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: Delta) -> bytes:
        if piece.choice:
            return b""
        out = b""
        if piece.reasoning:
            if "reasoning" not in self._open:
                item = {**_reasoning_item(self._origin, ""), "content": []}
                out += self._begin_item("reasoning", item)
            out += self._event(
                "response.reasoning_text.delta",
                item_id=f"rs_{self._origin.job_id}",
                output_index=self._open.index("reasoning"),
                content_index=0,
                delta=piece.reasoning,
            )
        if piece.text:
            out += self._begin_message()
            out += self._event(
                "response.output_text.delta",
                **self._in_message(),
                delta=piece.text,
                logprobs=[],
            )
        for delta in piece.tool_calls:
            name = f"call {delta.index}"
            if name not in self._open:
                call = ToolCall(id=delta.id, function=ToolFunction(delta.name))
                item = _call_item(self._origin, delta.index, call, "in_progress")
                out += self._begin_item(name, item)
            if delta.arguments:
                out += self._event(
                    "response.function_call_arguments.delta",
                    item_id=f"fc_{self._origin.job_id}_{delta.index}",
                    output_index=self._open.index(name),
                    delta=delta.arguments,
                )
        return out

    def _begin_item(self, name: str, item: dict[str, Any]) -> bytes:
        self._open.append(name)
        index = len(self._open) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _begin_message(self) -> bytes:
        if "message" in self._open:
            return b""
        begun = self._begin_item("message", _message_item(self._origin, [], "in_progress"))
        part = self._event("response.content_part.added", **self._in_message(), part=_text_part(""))
        return begun + part

    def _in_message(self) -> dict[str, Any]:
        return {
            "item_id": f"msg_{self._origin.job_id}",
            "output_index": self._open.index("message"),
            "content_index": 0,
        }

    def finish(self, rest: list[Delta], result: LlmResult) -> bytes:
        out = b"".join(self.piece(piece) for piece in rest)
        choice = result.choices[0]
        if not self._open:
            out += self._begin_message()
        items = {_name(item): item for item in _items(self._origin, choice)}
        for index, name in enumerate(self._open):
            if (item := items.get(name)) is None:
                continue  # it was begun, and is not in the result
            if name == "message":
                text = choice.text
                out += self._event(
                    "response.output_text.done", **self._in_message(), text=text, logprobs=[]
                )
                out += self._event(
                    "response.content_part.done", **self._in_message(), part=_text_part(text)
                )
            elif name != "reasoning":
                out += self._event(
                    "response.function_call_arguments.done",
                    item_id=item["id"],
                    output_index=index,
                    name=item["name"],
                    arguments=item["arguments"],
                )
            out += self._event("response.output_item.done", output_index=index, item=item)
        told = [items[name] for name in self._open if name in items]
        response = replace(response_of(self._body, self._origin, result), output=told)
        return out + self._event(f"response.{response.status}", response=response)

    def fail(self, error: PenstockError) -> bytes:
        failed = _failed(response_of(self._body, self._origin, None), error)
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **facts: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **facts}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(event))


def _failed(response: ResponseObject, error: PenstockError) -> ResponseObject:
    fault = tell(error).fault
    told = {"code": fault.code or "server_error", "message": fault.message}
    return replace(response, status="failed", error=told)


def _name(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return f"call {item['id'].rpartition('_')[2]}"
    return str(item["type"])


# -- operations ---------------------------------------------------------------------


@route("GET /v1/responses/{response_id}", answer=ResponseObject, refusals=(404,))
async def get_response(call: Call) -> Reply:
    """Get a response.

    What its job has answered; for as long as the job is kept.
    """
    job = await _job(call, call.params["response_id"])
    origin = JobOrigin(job.job_id, job.accepted_at, model_of(job.request.topic))
    body = await _body_of(call, job)
    result = None
    if job.is_final:
        try:
            result = await result_of(call.api, job, LlmResult)
        except Unanswered as error:
            response = _failed(response_of(body, origin, None), error)
            if job.state is JobState.CANCELLED:
                response = replace(response, status="cancelled")
            return json_reply(response)
    return json_reply(response_of(body, origin, result))


async def _body_of(call: Call, job: Job) -> ResponseBody:
    """What its job was asked with, without the messages."""
    request = read_request(await payload_of(call.api, job.request.context_ptr))
    if not isinstance(request, ChatRequest):
        raise _missing(_PREFIX + job.job_id)
    labels = dict(job.request.labels)
    first = request.messages[0].content if labels.pop(_LABEL) == "instructions" else None
    return ResponseBody(
        instructions=str(first) if first is not None else None,
        previous_response_id=labels.pop(_PREVIOUS, None),
        max_output_tokens=request.max_tokens,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        tools=tuple({"type": "function", **tool["function"]} for tool in request.tools),
        parallel_tool_calls=request.parallel_tool_calls,
        user=labels.pop("user", None),
        metadata=labels,
    )


def _labels(body: ResponseBody) -> dict[str, str]:
    labels = {_LABEL: "plain" if body.instructions is None else "instructions"}
    if body.previous_response_id is not None:
        labels[_PREVIOUS] = body.previous_response_id
    return labels


@endpoint(
    "/v1/responses",
    prepare=with_history,
    request=chat_request,
    labels=_labels,
    parts=ResponseStream,
)
def create_response(body: ResponseBody, origin: JobOrigin, result: LlmResult) -> ResponseObject:
    """Continue a conversation (responses).

    As OpenAI's: text, function tools, structured output. One job, as for a chat.
    """
    return response_of(body, origin, result)
