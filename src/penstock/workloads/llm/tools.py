"""Tool calls by constrained decoding: for calls that are forced, and for models whose chat
template does not support tools.

The tools are described in the system message, and the answer follows a JSON schema of the calls
that are allowed. So a forced call is a call whatever the model would rather say, with any Runner
that holds an answer to a schema.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.workloads.llm.splice import whole_of
from penstock.workloads.llm.values import (
    ChatRequest,
    Choice,
    Completion,
    Delta,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    Message,
    ToolCall,
    ToolDelta,
    ToolFunction,
)

_MOST_CALLS = 16
_RESPONSE = "response"
_DEFS = ("$defs", "definitions")
_encode = msgspec.json.Encoder(order="deterministic").encode


class ToolPlan(Struct, frozen=True):
    """How one request with tools is asked."""

    request: ChatRequest
    """The same without tools, held to a schema of calls."""
    only: str = ""
    """The tool whose arguments are the whole answer."""


def wants_tools(request: GenerationRequest) -> bool:
    return (
        isinstance(request, ChatRequest) and bool(request.tools) and request.tool_choice != "none"
    )


def is_forced(request: GenerationRequest) -> bool:
    """Whether the answer must be a tool call."""
    if not (isinstance(request, ChatRequest) and wants_tools(request)):
        return False
    return request.tool_choice == "required" or isinstance(request.tool_choice, dict)


def plan_of(request: ChatRequest) -> ToolPlan:
    """Raises INVALID_SCHEMA."""
    tools = [_function(tool) for tool in request.tools]
    forced = is_forced(request)
    if isinstance(request.tool_choice, dict):
        function = request.tool_choice.get("function")
        named = function.get("name") if isinstance(function, dict) else None
        tools = [tool for tool in tools if tool["name"] == named]
        if not tools:
            raise LlmFailure(LlmCode.INVALID_SCHEMA, f"tool_choice: there is no tool {named!r}")
    if request.grammar is not None:
        raise LlmFailure(LlmCode.INVALID_SCHEMA, "a grammar can't be combined with tools")
    several = request.parallel_tool_calls is True
    if forced and len(tools) == 1 and not several:
        schema, only = _parameters(tools[0]), tools[0]["name"]
        how = f"Answer with the arguments of a call of {only} as JSON, and nothing else."
    else:
        schema, only = _calls_schema(request, tools, forced=forced, several=several), ""
        how = 'Answer with {"name": <tool>, "arguments": <arguments>} as JSON to call a tool'
        if several:
            how = 'Answer with a list of {"name": <tool>, "arguments": <arguments>} to call tools'
        how += "." if forced else ', or with {"response": <text>} to answer yourself.'
    text = "You can call these tools:\n" + "\n".join(_encode(tool).decode() for tool in tools)
    messages = _with_system(f"{text}\n{how}", [_plain(one) for one in request.messages])
    asked = replace(
        request,
        messages=messages,
        tools=(),
        tool_choice=None,
        parallel_tool_calls=None,
        schema=schema,
        json_object=False,
        logprobs=None,
    )
    return ToolPlan(asked, only)


class ToolAnswer:
    """Turns a constrained answer into tool calls. Arguments come as they are made where only one
    tool can be called; any other answer comes whole."""

    def __init__(self, plan: ToolPlan) -> None:
        self._only = plan.only
        self._id = _call_id()
        self._begun = False

    def add(self, piece: Delta) -> Delta | None:
        calls: tuple[ToolDelta, ...] = ()
        if self._only and piece.text:
            calls = (self._delta(piece.text),)
        if not (calls or piece.reasoning):
            return None
        return Delta(choice=piece.choice, reasoning=piece.reasoning, tool_calls=calls)

    def _delta(self, text: str) -> ToolDelta:
        if self._begun:
            return ToolDelta(index=0, arguments=text)
        self._begun = True
        return ToolDelta(index=0, id=self._id, name=self._only, arguments=text)

    def end(self, said: Completion) -> Iterator[Delta | Completion]:
        choice = self._choice(said.choice)
        if not self._only and (choice.text or choice.tool_calls):
            yield replace(whole_of(choice.index, choice), reasoning="")  # that was told
        yield replace(said, choice=choice)

    def _choice(self, choice: Choice) -> Choice:
        finish = choice.finish_reason
        ended: Any = "tool_calls" if finish == "stop" else finish
        if self._only:
            call = ToolCall(id=self._id, function=ToolFunction(self._only, choice.text))
            return replace(choice, text="", tool_calls=(call,), finish_reason=ended, logprobs=None)
        try:
            answer = msgspec.json.decode(choice.text)
        except msgspec.DecodeError:  # it was cut off at its limit
            return replace(choice, logprobs=None)
        if isinstance(answer, dict) and _RESPONSE in answer and "name" not in answer:
            said = answer[_RESPONSE]
            text = said if isinstance(said, str) else _encode(said).decode()
            return replace(choice, text=text, logprobs=None)
        calls = tuple(_call(one) for one in (answer if isinstance(answer, list) else [answer]))
        return replace(choice, text="", tool_calls=calls, finish_reason=ended, logprobs=None)


def _call(call: dict[str, Any]) -> ToolCall:
    arguments = _encode(call.get("arguments", {})).decode()
    return ToolCall(id=_call_id(), function=ToolFunction(call["name"], arguments))


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


# -- the schema of calls ------------------------------------------------------------


def _calls_schema(
    request: ChatRequest, tools: list[dict[str, Any]], *, forced: bool, several: bool
) -> dict[str, Any]:
    defs: dict[str, Any] = {}
    calls = [_call_schema(n, tool, defs) for n, tool in enumerate(tools)]
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = one
    if several:
        schema = {"type": "array", "items": one, "minItems": 1, "maxItems": _MOST_CALLS}
    if not forced:
        said: dict[str, Any] = {"type": "object"} if request.json_object else {"type": "string"}
        if request.schema is not None:
            said = _hoisted(request.schema, "answer", defs)
        answer = {
            "type": "object",
            "properties": {_RESPONSE: said},
            "required": [_RESPONSE],
            "additionalProperties": False,
        }
        schema = {"anyOf": [schema, answer]}
    return {**schema, "$defs": defs} if defs else schema


def _call_schema(number: int, tool: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool["name"]},
            "arguments": _hoisted(_parameters(tool), f"tool{number}", defs),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    given = tool.get("parameters") or {}
    return given if given.get("type") or "anyOf" in given else {"type": "object", **given}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise LlmFailure(LlmCode.INVALID_SCHEMA, "a tool has no function with a name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise LlmFailure(LlmCode.INVALID_SCHEMA, "the parameters of a tool must be a JSON schema")
    return {
        name: function[name] for name in ("name", "description", "parameters") if function.get(name)
    }


def _hoisted(schema: dict[str, Any], prefix: str, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema for use inside another: its definitions move to `defs` under new names."""
    for group in _DEFS:
        definitions = schema.get(group) or {}
        if not isinstance(definitions, dict):
            raise LlmFailure(LlmCode.INVALID_SCHEMA, f"{group} of a JSON schema must be an object")
        for name, value in definitions.items():
            defs[f"{prefix}.{name}"] = _renamed(value, prefix)
    rest = {name: value for name, value in schema.items() if name not in _DEFS}
    renamed: dict[str, Any] = _renamed(rest, prefix)
    return renamed


def _renamed(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_renamed(one, prefix) for one in value]
    if not isinstance(value, dict):
        return value
    found = {name: _renamed(one, prefix) for name, one in value.items()}
    reference = value.get("$ref")
    for group in _DEFS:
        if isinstance(reference, str) and reference.startswith(f"#/{group}/"):
            found["$ref"] = f"#/$defs/{prefix}.{reference.removeprefix(f'#/{group}/')}"
    return found


# -- messages that every template knows ---------------------------------------------


def _with_system(text: str, messages: list[Message]) -> tuple[Message, ...]:
    first = messages[0]
    if first.role in ("system", "developer") and isinstance(first.content, str):
        return (replace(first, content=f"{first.content}\n\n{text}"), *messages[1:])
    return (Message(role="system", content=text), *messages)


def _plain(message: Message) -> Message:
    """The same in roles that every template knows: calls and results as text."""
    if message.tool_calls:
        calls = [
            {
                "name": one.function.name,
                "arguments": msgspec.Raw(one.function.arguments.encode() or b"{}"),
            }
            for one in message.tool_calls
        ]
        said = message.content if isinstance(message.content, str) else ""
        text = "\n".join(filter(None, (said, *(_text(call) for call in calls))))
        return Message(role="assistant", content=text)
    if message.role == "tool":
        content = message.content
        text = (
            content
            if isinstance(content, str)
            else "".join(getattr(part, "text", "") for part in content or ())
        )
        return Message(role="user", content=f"Result of the tool call: {text}")
    return message


def _text(call: dict[str, Any]) -> str:
    return _encode(call).decode("utf-8", "replace")
