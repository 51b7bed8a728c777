"""Programs that speak OpenAI's, Anthropic's and Ollama's APIs, unmodified, with a real model.

litellm and instructor need other versions of `openai` than the rest: they run as programs, in an
environment of their own (`make test-all` makes it).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from tests.api.openai.live.conftest import Running

CLIENTS = Path(__file__).parents[4] / ".venv-clients" / "bin" / "python"
COUNT = "Count from one to five."
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


class Animal(BaseModel):
    name: Literal["cat", "dog"]
    legs: int


ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


def said(client: OpenAI, model: str) -> str:
    """What the plainest request is answered with."""
    asked: Any = [{"role": "user", "content": COUNT}]
    answer = client.chat.completions.create(model=model, messages=asked, **SHORT)
    text = answer.choices[0].message.content
    assert text
    return text


# -- openai -------------------------------------------------------------------------


def test_openai_responses(client: OpenAI, model: str) -> None:
    first = client.responses.create(
        model=model, input=COUNT, temperature=0, max_output_tokens=12, instructions=None
    )
    assert first.output_text == said(client, model)
    assert first.usage is not None
    assert first.usage.output_tokens <= 12
    second = client.responses.create(
        model=model,
        input="Go on.",
        previous_response_id=first.id,
        instructions="Be brief.",
        temperature=0,
        max_output_tokens=4,
    )
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    kept = client.responses.retrieve(second.id)
    assert kept.output_text == second.output_text
    assert (kept.previous_response_id, kept.instructions) == (first.id, "Be brief.")
    assert (kept.max_output_tokens, kept.temperature) == (4, 0)


def test_openai_responses_stream(client: OpenAI, model: str) -> None:
    with client.responses.stream(
        model=model, input=COUNT, temperature=0, max_output_tokens=12
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == said(client, model)


def test_openai_responses_stream_helper_ends_with_the_response(client: OpenAI, model: str) -> None:
    short: Any = {"model": model, "input": COUNT, "temperature": 0}
    with client.responses.stream(**short, text_format=Animal, max_output_tokens=80) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Animal)


def test_openai_responses_call_tools_and_read_their_output(client: OpenAI, model: str) -> None:
    items: list[Any] = [{"role": "user", "content": "Add 2 and 3"}]
    tools: Any = [ADD]
    answer = client.responses.create(
        model=model, input=items, tools=tools, tool_choice="required", temperature=0
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"a", "b"}
    items += [item.model_dump() for item in answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    last = client.responses.create(
        model=model, input=items, tools=tools, tool_choice="none", max_output_tokens=8
    )
    assert last.output_text
    kinds = []
    with client.responses.stream(
        model=model, input="Add 2 and 3", tools=tools, tool_choice="required", temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-1] == "response.completed"


def test_openai_chat_stream_helper_and_parse(client: OpenAI, model: str) -> None:
    asked: Any = [{"role": "user", "content": "Describe a cat as JSON."}]
    with client.chat.completions.stream(
        model=model, messages=asked, response_format=Animal, max_tokens=60, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Animal)


def test_openai_chat_tools_by_loop(client: OpenAI, model: str) -> None:
    """As programs write it: the message as it came is appended, then the tool's result."""
    function = {name: value for name, value in ADD.items() if name != "type"}
    tools: Any = [{"type": "function", "function": function}]
    messages: Any = [{"role": "user", "content": "Add 2 and 3"}]
    first = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="required", temperature=0
    )
    message = first.choices[0].message
    assert message.tool_calls
    messages.append(message.model_dump())
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"})
    last = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=8
    )
    assert last.choices[0].message.content


def test_openai_async(running: Running, client: OpenAI, model: str) -> None:
    async def ask() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key=running.token) as one:
            asked: Any = [{"role": "user", "content": COUNT}]
            stream = await one.chat.completions.create(
                model=model, messages=asked, stream=True, **SHORT
            )
            text = "".join([c.choices[0].delta.content or "" async for c in stream])
            answer = await one.responses.create(
                model=model, input=COUNT, temperature=0, max_output_tokens=12
            )
            return text, answer.output_text

    assert asyncio.run(ask()) == (said(client, model),) * 2


def test_openai_batches(client: OpenAI, model: str, tmp_path: Path) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": COUNT}], **SHORT}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": {**body, "keep_alive": 1}}
    lines = [json.dumps({"custom_id": str(n), **line}) for n in range(3)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with (tmp_path / "in.jsonl").open("rb") as file:
        kept = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(
        input_file_id=kept.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < until:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch.errors
    assert batch.output_file_id is not None
    found = [json.loads(one) for one in client.files.content(batch.output_file_id).iter_lines()]
    texts = {one["response"]["body"]["choices"][0]["message"]["content"] for one in found}
    assert texts == {said(client, model)}


# -- others -------------------------------------------------------------------------


def test_langchain(running: Running, client: OpenAI, model: str) -> None:
    openai = pytest.importorskip("langchain_openai")
    with httpx.Client(timeout=50) as http:  # langchain closes no client of its own
        given = {
            "base_url": f"{running.url}/v1",
            "api_key": running.token,
            "model": model,
            "http_client": http,
        }
        chat = openai.ChatOpenAI(**given, **SHORT)
        assert chat.invoke(COUNT).content == said(client, model)
        assert "".join(str(part.content) for part in chat.stream(COUNT)) == said(client, model)
        responses = openai.ChatOpenAI(**given, temperature=0, max_tokens=12, use_responses_api=True)
        assert responses.invoke(COUNT).text == said(client, model)
        long = openai.ChatOpenAI(**given, temperature=0, max_tokens=60)
        shaped = long.with_structured_output(Animal)
        assert isinstance(shaped.invoke("Describe a cat."), Animal)
        bound = long.bind_tools([Animal], tool_choice="Animal")
        (call,) = bound.invoke("Describe a cat.").tool_calls
        assert (call["name"], set(call["args"])) == ("Animal", {"name", "legs"})
        vectors = openai.OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
        assert len(vectors.embed_query("a cat")) > 100


def test_pydantic_ai(running: Running, model: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    settings = {"temperature": 0.0, "max_tokens": 60}

    async def ask() -> None:  # run_sync would leave a loop and its connections open
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key=running.token) as one:
            provider = OpenAIProvider(openai_client=one)
            for kind in (OpenAIChatModel, OpenAIResponsesModel):
                agent = pydantic_ai.Agent(
                    kind(model, provider=provider), output_type=Animal, model_settings=settings
                )
                answer = await agent.run("Describe a cat.")
                assert isinstance(answer.output, Animal)
                assert answer.usage.output_tokens > 0

    asyncio.run(ask())


def test_llm(running: Running, client: OpenAI, model: str, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: local\n  model_name: {model}\n  api_base: {running.url}/v1\n"
        "  api_key_name: local\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    for more in ([], ["--no-stream"]):
        options = ["-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "12", *more]
        ran = subprocess.run(
            [sys.executable, "-m", "llm", "prompt", COUNT, "--key", running.token, *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip() == said(client, model).strip()


def test_anthropic(running: Running, client: OpenAI, model: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=running.url, api_key=running.token, max_retries=0) as one:
        asked = {"model": model, "messages": [{"role": "user", "content": COUNT}]}
        short = {"max_tokens": 12, "extra_body": {"temperature": 0}}
        answer = one.messages.create(**asked, **short)
        assert answer.content[0].text == said(client, model)
        assert (answer.stop_reason, answer.model) == ("max_tokens", model)
        with one.messages.stream(**asked, **short) as stream:
            assert "".join(stream.text_stream) == said(client, model)
        tool = {"name": "add", "description": "Add", "input_schema": ADD["parameters"]}
        called = one.messages.create(
            **asked, max_tokens=60, tools=[tool], tool_choice={"type": "any"}
        )
        assert called.stop_reason == "tool_use"
        assert set(called.content[0].input) == {"a", "b"}
        with one.messages.stream(
            **asked, max_tokens=60, tools=[tool], tool_choice={"type": "tool", "name": "add"}
        ) as stream:
            assert set(stream.get_final_message().content[0].input) == {"a", "b"}
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            one.messages.create(**{**asked, "model": "nobody"}, max_tokens=1)
    with (
        anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0) as one,
        pytest.raises(anthropic.AuthenticationError),
    ):
        one.messages.create(**asked, max_tokens=1)


def test_ollama(running: Running, client: OpenAI, model: str) -> None:
    ollama = pytest.importorskip("ollama")
    key = {"Authorization": f"Bearer {running.token}"}
    with ollama.Client(host=running.url, headers=key) as one:
        options = {"temperature": 0, "num_predict": 12, "num_ctx": 2048}
        asked = [{"role": "user", "content": COUNT}]
        answer = one.chat(model=model, messages=asked, options=options)
        assert answer.message.content == said(client, model)
        assert (answer.done, answer.done_reason, answer.model) == (True, "length", model)
        assert answer.eval_count == 12
        parts = list(
            one.chat(model=f"{model}:latest", messages=asked, options=options, stream=True)
        )
        assert "".join(part.message.content for part in parts) == said(client, model)
        assert parts[-1].done
        assert one.generate(model=model, prompt=COUNT, options=options).response == said(
            client, model
        )
        schema = Animal.model_json_schema()
        shaped = one.chat(model=model, messages=asked, format=schema, options={"num_predict": 80})
        Animal.model_validate_json(shaped.message.content)
        (listed,) = one.list().models
        assert (listed.model, listed.details.quantization_level) == (model, "Q4_1")
        assert one.show(model).modelinfo["llama.context_length"] == 8192
        (vector,) = one.embed(model=model, input="a cat").embeddings
        assert sum(number * number for number in vector) == pytest.approx(1, abs=1e-3)
        assert one.pull(model).status == "success"
        with pytest.raises(ollama.ResponseError, match="no models can be pulled here"):
            one.pull("nobody")
        with pytest.raises(ollama.ResponseError, match="does not exist"):
            one.chat(model="nobody", messages=asked)


# -- litellm and instructor ---------------------------------------------------------


@pytest.fixture
def clients() -> Iterator[str]:
    if not CLIENTS.exists():
        message = "there is no .venv-clients: 'make .venv-clients/.installed' makes it"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return str(CLIENTS)


def _ran(python: str, program: str, running: Running, model: str) -> dict[str, Any]:
    ran = subprocess.run(
        [python, "-c", program, f"{running.url}/v1", running.token, model],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


LITELLM = """
import json, sys, litellm
url, key, model = sys.argv[1:]
given = dict(model="openai/" + model, api_base=url, api_key=key, max_retries=0)
asked = [{"role": "user", "content": "Count from one to five."}]
short = dict(temperature=0, max_tokens=12)
found = {}
found["chat"] = litellm.completion(**given, messages=asked, **short).choices[0].message.content
parts = litellm.completion(**given, messages=asked, stream=True, **short)
found["stream"] = "".join(part.choices[0].delta.content or "" for part in parts)
answer = litellm.responses(**given, input=asked[0]["content"], temperature=0, max_output_tokens=12)
found["responses"] = answer.output[0].content[0].text
found["vector"] = len(litellm.embedding(**given, input=["a"]).data[0]["embedding"])
try:
    litellm.completion(**given, messages=[{"role": "user", "content": "word " * 5000}])
except litellm.ContextWindowExceededError:
    found["long"] = True
try:
    litellm.completion(**{**given, "api_key": "wrong"}, messages=asked)
except litellm.AuthenticationError:
    found["key"] = True
print(json.dumps(found))
"""


@pytest.mark.timeout(240)  # importing litellm alone takes many seconds
def test_litellm(clients: str, running: Running, client: OpenAI, model: str) -> None:
    found = _ran(clients, LITELLM, running, model)
    text = said(client, model)
    assert (found["chat"], found["stream"]) == (text, text)
    assert found["responses"].startswith(text)  # litellm asks for 16 tokens at least
    assert found["vector"] > 100
    assert found["long"] is found["key"] is True


INSTRUCTOR = """
import json, sys, instructor, openai
from pydantic import BaseModel
from typing import Literal
url, key, model = sys.argv[1:]
class Animal(BaseModel):
    name: Literal["cat", "dog"]
    legs: int
found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=key), mode=mode)
    animal = client.chat.completions.create(
        model=model, response_model=Animal, max_tokens=60, temperature=0, max_retries=0,
        messages=[{"role": "user", "content": "Describe a cat."}],
    )
    found[mode.value] = animal.model_dump()
print(json.dumps(found))
"""


@pytest.mark.timeout(240)
def test_instructor(clients: str, running: Running, model: str) -> None:
    found = _ran(clients, INSTRUCTOR, running, model)
    assert len(found) == 2
    for animal in found.values():
        Animal.model_validate(animal)
