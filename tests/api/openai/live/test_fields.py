"""Fields of requests: what reaches the model, what is ignored with a warning, what is forced."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_llm import FakeRunner
from tests.support.openai.door import door, said, saying

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import ChatRequest, Delta, LlmCode, LlmFailure

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
MUL = {"type": "function", "function": {"name": "mul", "parameters": {"type": "object"}}}


async def asked(folder: Path, **fields: Any) -> ChatRequest:
    """What a chat with these fields asks of its model."""
    runner = saying(Delta(text="x"), said("x"))
    async with door(folder, runner) as one:
        answer = await one.call("POST", CHAT, {"model": "fake", "messages": HELLO, **fields})
        assert answer.status == 200, answer.json
    (request,) = runner.asks
    assert isinstance(request, ChatRequest)
    return request


@run_async
async def test_options_of_the_engine_are_passed_on(tmp_path: Path) -> None:
    request = await asked(
        tmp_path,
        logit_bias={"42": -100},
        min_p=0.1,
        repetition_penalty=1.2,
        dry_multiplier=0.8,
        dry_sequence_breakers=["\n"],
        mirostat=2,
        ignore_eos=True,
        samplers=["top_k"],
    )
    sampling = request.sampling
    assert sampling.logit_bias == {"42": -100}
    assert (sampling.min_p, sampling.repeat_penalty, sampling.dry_multiplier) == (0.1, 1.2, 0.8)
    assert (sampling.mirostat, sampling.ignore_eos) == (2, True)
    assert (sampling.dry_sequence_breakers, sampling.samplers) == (("\n",), ("top_k",))


@run_async
async def test_thinking_can_be_turned_off(tmp_path: Path) -> None:
    own = await asked(tmp_path / "a", chat_template_kwargs={"enable_thinking": False})
    assert own.template_options == {"enable_thinking": False}
    none = await asked(tmp_path / "b", reasoning_effort="none")
    assert none.template_options == {"reasoning_effort": "none", "enable_thinking": False}
    low = await asked(tmp_path / "c", reasoning_effort="low")
    assert low.template_options == {"reasoning_effort": "low"}


LENIENT: dict[str, dict[str, Any]] = {
    "no limit": {"max_tokens": -1},
    "zero limit": {"max_tokens": 0},
    "top_p of zero": {"top_p": 0},
    "top_p above one": {"top_p": 1.5},
    "top_k of all": {"top_k": -1},
    "an empty stop": {"stop": ""},
    "a seed with a point": {"seed": 1.0},
    "options without a stream": {"stream_options": {"include_usage": True}},
    "a tool message without an id": {"messages": [*HELLO, {"role": "tool", "content": "x"}]},
    "the role function": {"messages": [*HELLO, {"role": "function", "name": "f", "content": "x"}]},
    "no content": {"messages": [{"role": "user", "content": None}]},
    "a message as a client dumps it": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None},
            *HELLO,
        ]
    },
    "no model": {"model": ""},
    "any model": {"model": "auto"},
    "a tag": {"model": "fake:latest"},
}


@pytest.mark.parametrize("case", LENIENT)
@run_async
async def test_values_that_other_servers_accept_are_accepted(tmp_path: Path, case: str) -> None:
    request = await asked(tmp_path, **LENIENT[case])
    assert request.max_tokens is None


@run_async
async def test_the_answer_names_the_model_by_its_own_name(tmp_path: Path) -> None:
    async with door(tmp_path) as one:
        for name in ("fake", "fake:latest", "auto"):
            answer = await one.call("POST", CHAT, {"model": name, "messages": HELLO})
            assert answer.json["model"] == "fake"


@run_async
async def test_unknown_fields_are_ignored_and_named_or_refused_where_that_is_set(
    tmp_path: Path,
) -> None:
    body = {"model": "fake", "messages": HELLO, "keep_alive": "5m", "num_ctx": 4096}
    async with door(tmp_path / "a") as one:
        answer = await one.call("POST", CHAT, body)
        assert answer.status == 200
        warning = answer.headers["x-penstock-warning"]
        assert warning == "unknown fields are ignored: keep_alive, num_ctx"
        plain = await one.call("POST", CHAT, {"model": "fake", "messages": HELLO})
        assert "x-penstock-warning" not in plain.headers
    async with door(tmp_path / "b", openai_strict=True) as one:
        answer = await one.call("POST", CHAT, body)
        assert answer.status == 400
        assert answer.json["error"]["code"] == "unknown_parameter"
        assert answer.json["error"]["param"] == "keep_alive"


@run_async
async def test_a_schema_that_the_grammar_can_not_hold_is_said(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "age": {"type": "number", "minimum": 0},
            "year": {"type": "integer", "minimum": 0},
            "code": {"type": "string", "pattern": "\\d+"},
            "word": {"type": "string", "pattern": "^[a-z]+$"},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        },
    }
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with door(tmp_path) as one:
        body = {"model": "fake", "messages": HELLO, "response_format": shape}
        answer = await one.call("POST", CHAT, body)
        assert answer.headers["x-penstock-warning"] == (
            "not enforced by the schema's grammar: tags.uniqueItems"
        )
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        answer = await one.call("POST", CHAT, {"model": "fake", "messages": HELLO, "tools": [tool]})
        assert answer.headers["x-penstock-warning"].endswith(": f.tags.uniqueItems")


@run_async
async def test_the_shapes_of_other_servers_are_understood(tmp_path: Path) -> None:
    schema = {"type": "object"}
    for number, fields in enumerate(
        (
            {"guided_json": schema},
            {"guided_json": json.dumps(schema)},
            {"json_schema": schema},
            {"structured_outputs": {"json": schema}},
            {"response_format": {"type": "json_object", "schema": schema}},
        )
    ):
        assert (await asked(tmp_path / str(number), **fields)).schema == schema
    request = await asked(tmp_path / "choice", guided_choice=["yes", "no"])
    assert request.grammar == 'root ::= "yes" | "no"'


class Toolless(FakeRunner):
    """Says a text; its template does not support tools."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.asks: list[ChatRequest] = []

    async def generate(self, model: str, ask: Any, choice: int = 0, watch: Any = None) -> Any:
        self.asks.append(ask)
        if ask.tools:
            raise LlmFailure(LlmCode.NOT_SUPPORTED, "no tools", tools=False)
        yield Delta(text=self._text[:3])
        yield Delta(text=self._text[3:])
        yield said(self._text)


@run_async
async def test_a_named_tool_is_called_whatever_the_model_would_say(tmp_path: Path) -> None:
    runner = Toolless('{"a": 1}')
    choice = {"type": "function", "function": {"name": "add"}}
    body = {"model": "fake", "messages": HELLO, "tools": [ADD, MUL], "tool_choice": choice}
    async with door(tmp_path, runner) as one, one.client() as client:
        answer = await one.call("POST", CHAT, body)
        (call,) = answer.json["choices"][0]["message"]["tool_calls"]
        assert (call["type"], call["function"]) == (
            "function",
            {"name": "add", "arguments": '{"a": 1}'},
        )
        assert call["id"].startswith("call_")
        assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
        assert answer.json["choices"][0]["message"]["content"] is None
        (request,) = runner.asks
        assert request.schema == ADD["function"]["parameters"]  # type: ignore[index]
        parts = []
        async for chunk in await client.chat.completions.create(stream=True, **body):  # type: ignore[call-overload]
            parts += [c.function for c in chunk.choices[0].delta.tool_calls or ()]
        assert [part.name for part in parts] == ["add", None]
        assert "".join(part.arguments for part in parts) == '{"a": 1}'


@run_async
async def test_one_of_several_tools_is_forced(tmp_path: Path) -> None:
    runner = Toolless('{"name": "mul", "arguments": {"b": 2}}')
    body = {"model": "fake", "messages": HELLO, "tools": [ADD, MUL], "tool_choice": "required"}
    async with door(tmp_path, runner) as one:
        answer = await one.call("POST", CHAT, body)
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "mul", "arguments": '{"b":2}'}
    (request,) = runner.asks
    assert request.schema is not None
    names = [one["properties"]["name"]["const"] for one in request.schema["anyOf"]]
    assert names == ["add", "mul"]


@run_async
async def test_a_model_without_tools_in_its_template_is_told_of_them_in_words(
    tmp_path: Path,
) -> None:
    called = Toolless('{"name": "add", "arguments": {"a": 1}}')
    body = {"model": "fake", "messages": HELLO, "tools": [ADD]}
    async with door(tmp_path / "a", called) as one:
        answer = (await one.call("POST", CHAT, body)).json["choices"][0]
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "add"
        first = called.asks[-1].messages[0]
        assert first.role == "system"
        assert '"name":"add"' in str(first.content)
    async with door(tmp_path / "b", Toolless('{"response": "no need"}')) as one:
        answer = (await one.call("POST", CHAT, body)).json["choices"][0]
        assert answer["message"]["content"] == "no need"
        assert answer["finish_reason"] == "stop"


@run_async
async def test_a_stream_says_that_it_waits_before_the_first_token(tmp_path: Path) -> None:
    free = asyncio.Event()
    async with door(tmp_path, saying(free, Delta(text="x"), said("x")), heartbeat=0.05) as one:
        body = {"model": "fake", "messages": HELLO, "stream": True}
        asked = asyncio.ensure_future(one.call("POST", CHAT, body))
        await asyncio.sleep(0.3)
        free.set()
        text = (await asked).body.decode()
    assert text.startswith(": waiting\n\n")
    assert text.endswith("data: [DONE]\n\n")


@run_async
async def test_dimensions_cut_vectors_and_keep_their_length(tmp_path: Path) -> None:
    async with door(tmp_path) as one:
        whole = await one.call("POST", "/v1/embeddings", {"model": "fake", "input": "a"})
        size = len(whole.json["data"][0]["embedding"])
        body = {"model": "fake", "input": "a", "dimensions": 2}
        cut = (await one.call("POST", "/v1/embeddings", body)).json["data"][0]["embedding"]
        assert len(cut) == 2
        assert sum(number * number for number in cut) == pytest.approx(1)
        too_many = await one.call("POST", "/v1/embeddings", {**body, "dimensions": size + 1})
        assert (too_many.status, too_many.json["error"]["param"]) == (400, "dimensions")


@run_async
async def test_what_is_not_there_is_told_in_the_shape_of_the_api_that_was_called(
    tmp_path: Path,
) -> None:
    async with door(tmp_path) as one:
        for path in ("/v1/nothing", "/v1/audio/speech", "/v1/models/x/y", "/chat/nothing"):
            answer = await one.call("POST", path, {})
            error = answer.json["error"]
            assert answer.status == 404
            assert error["message"].startswith(f"Invalid URL (POST /v1{path.removeprefix('/v1')})")
            assert set(error) == {"message", "type", "param", "code"}
        wrong = await one.call("PUT", "/v1/models", {})
        assert (wrong.status, wrong.json["error"]["code"]) == (405, "method_not_allowed")
        ollama = await one.call("POST", "/api/create", {})
        assert (ollama.status, list(ollama.json)) == (404, ["error"])
        for path in ("/v1/jobs/a/b/c", "/nothing"):
            ours = await one.call("GET", path)
            assert ours.json["code"] == "NOT_FOUND"


@run_async
async def test_a_base_url_without_its_version_and_the_paths_of_other_servers_work(
    tmp_path: Path,
) -> None:
    async with door(tmp_path) as one, one.client() as client:
        short = client.with_options(base_url=one.url)
        answer = await short.chat.completions.create(model="fake", messages=HELLO)
        assert answer.choices[0].message.content == "HELLO"
        assert [model.id async for model in await short.models.list()] == ["fake"]
        assert (await one.call("GET", "/health", token="")).json == {"status": "ok", "problems": []}
        assert (await one.call("GET", "/v1/models/")).json["data"][0]["id"] == "fake"
        assert "version" in (await one.call("GET", "/version")).json


@run_async
async def test_models_tell_their_context_and_a_prompt_far_beyond_it_is_refused_at_once(
    tmp_path: Path,
) -> None:
    async with door(tmp_path, FakeRunner(context=100)) as one:
        async with asyncio.timeout(10):
            while True:
                (model,) = (await one.call("GET", "/v1/models")).json["data"]
                if model["max_model_len"]:
                    break
                await asyncio.sleep(0.05)
        assert (model["max_model_len"], model["context_length"]) == (100, 100)
        long = [{"role": "user", "content": "x" * (100 * 256 + 1)}]
        answer = await one.call("POST", CHAT, {"model": "fake", "messages": long})
        assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 100 tokens" in answer.json["error"]["message"]


# -- tokens, documents ------------------------------------------------------------------------


@run_async
async def test_texts_become_tokens_and_tokens_text_as_llama_cpp_and_vllm_have_it(
    tmp_path: Path,
) -> None:
    async with door(tmp_path) as one:

        async def post(path: str, **body: Any) -> Any:
            return (await one.call("POST", path, {"model": "fake", **body})).json

        cat = [99, 97, 116]
        assert (await post("/tokenize", content="cat"))["tokens"] == cat
        assert await post("/tokenize", prompt="cat") == {
            "tokens": cat,
            "count": 3,
            "model": "fake",
        }
        message = {"role": "user", "content": "cat"}
        assert (await post("/tokenize", messages=[message]))["tokens"] == cat
        told = await post("/detokenize", tokens=cat)
        assert (told["content"], told["prompt"]) == ("cat", "cat")
        error = (await post("/tokenize", content="a", prompt="b"))["error"]
        assert (error["param"], error["type"]) == ("content", "invalid_request_error")
        assert (await post("/tokenize"))["error"]["code"] == "missing_required_parameter"


@run_async
async def test_documents_are_sorted_by_how_near_they_are_to_a_query(tmp_path: Path) -> None:
    async with door(tmp_path) as one:
        body = {"model": "fake", "query": "aaaa", "documents": ["oooo", "aaaa", "aaoo"]}
        more = {"top_n": 2, "return_documents": True}
        told = (await one.call("POST", "/v1/rerank", {**body, **more})).json
        assert [result["index"] for result in told["results"]] == [1, 2]
        assert told["results"][0]["document"] == {"text": "aaaa"}
        assert told["results"][0]["relevance_score"] == pytest.approx(1.0)
