"""OpenAI's client, unmodified, and a real model behind the whole engine."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel
from tests.api.openai.live.conftest import Running

COUNT: list[Any] = [{"role": "user", "content": "Count from one to five."}]
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 1}


def chat(client: OpenAI, model: str, **fields: Any) -> Any:
    given = {"model": model, "messages": COUNT, "max_tokens": 24, **GREEDY, **fields}
    return client.chat.completions.create(**given)


def test_a_chat_is_answered_and_streaming_says_the_same(client: OpenAI, model: str) -> None:
    whole = chat(client, model)
    (choice,) = whole.choices
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage.prompt_tokens > 5
    assert 0 < whole.usage.completion_tokens <= 24
    chunks = list(chat(client, model, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 5


def test_the_same_prefix_is_not_computed_twice(client: OpenAI, model: str) -> None:
    chat(client, model)
    again = chat(client, model)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_tenant_is_never_told_what_another_has_asked(running: Running, model: str) -> None:
    secret: list[Any] = [{"role": "user", "content": "Patient Jane Roe has " + "a cough and " * 20}]

    def cached(client: OpenAI) -> int:
        usage = chat(client, model, messages=secret, max_tokens=1).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    with running.tenant("hospital") as hospital, running.tenant("stranger") as stranger:
        prompt = chat(hospital, model, messages=secret, max_tokens=1).usage.prompt_tokens
        assert cached(hospital) == prompt - 1
        assert cached(stranger) == 0
        assert cached(hospital) == prompt - 1
        assert cached(stranger) == prompt - 1


def test_an_answer_ends_at_a_stop_string_and_at_its_length(client: OpenAI, model: str) -> None:
    whole = chat(client, model).choices[0].message.content
    word = whole.split()[2]
    stopped = chat(client, model, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == whole[: whole.index(word)]
    short = chat(client, model, max_tokens=3)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 3


def test_several_answers_with_logprobs(client: OpenAI, model: str) -> None:
    answer = chat(client, model, n=2, max_tokens=4, logprobs=True, top_logprobs=3)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == choice.message.content
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)
    assert answer.usage.completion_tokens == 8


class Animal(BaseModel):
    name: str
    legs: int


def test_an_answer_follows_a_schema(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe a cat as JSON."}],
        response_format=Animal,
        max_tokens=60,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)
    anything = chat(client, model, response_format={"type": "json_object"}, max_tokens=100)
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content), dict)


def test_an_answer_follows_what_llama_cpps_own_grammars_can_not_hold(
    client: OpenAI, model: str
) -> None:
    properties: dict[str, Any] = {
        "share": {"type": "number", "minimum": 5, "maximum": 6},
        "week": {"type": "integer", "multipleOf": 7, "maximum": 100},
        "code": {"type": "string", "pattern": r"^\d{3}-[A-Z]$"},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(client, model, response_format=shape, max_tokens=60, temperature=0)
    found = json.loads(answer.choices[0].message.content)
    assert 5 <= found["share"] <= 6
    assert found["week"] % 7 == 0
    assert re.fullmatch(r"\d{3}-[A-Z]", found["code"])

    properties["share"]["maximum"] = 4
    with pytest.raises(openai.BadRequestError, match="no answer can follow"):
        chat(client, model, response_format=shape, max_tokens=60, temperature=0)


def test_an_answer_follows_a_grammar(client: OpenAI, model: str) -> None:
    answer = chat(client, model, extra_body={"grammar": 'root ::= "yes" | "no"'})
    assert answer.choices[0].message.content in ("yes", "no")


def test_a_text_goes_on(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=["One, two,", "Red, green,"], max_tokens=4, logprobs=2, **GREEDY
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or ()) == choice.text
    stream = client.completions.create(
        model=model, prompt="One, two,", max_tokens=4, stream=True, **GREEDY
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_texts_become_vectors_of_length_one(client: OpenAI, model: str) -> None:
    answer = client.embeddings.create(model=model, input=["a cat", "a kitten", "tax law"])
    vectors = [one.embedding for one in answer.data]
    for vector in vectors:
        assert sum(number * number for number in vector) == pytest.approx(1.0, abs=1e-3)
    assert answer.usage.prompt_tokens > 0
    assert _like(vectors[0], vectors[1]) > _like(vectors[0], vectors[2])


def _like(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too long": (
        {"messages": [{"role": "user", "content": "word " * 3000}]},
        "context_length_exceeded",
    ),
    "a schema that can't be": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            }
        },
        "invalid_schema",
    ),
    "a grammar that is none": ({"extra_body": {"grammar": "root ::= ("}}, "invalid_schema"),
    "an image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="},
                        }
                    ],
                }
            ]
        },
        "unsupported_value",
    ),
    "a wrong bias": ({"extra_body": {"logit_bias": {"99999999": "x"}}}, "invalid_value"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_the_model_can_not_do_is_refused_plainly(
    client: OpenAI, model: str, case: str, stream: bool
) -> None:
    fields, code = WRONG[case]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, model, stream=stream, **fields)
    assert caught.value.code == code
    if case == "too long":
        numbers = [
            int(word) for word in str(caught.value).replace(",", "").split() if word.isdigit()
        ]
        assert min(numbers) == 1024 or 1024 in numbers
        assert max(numbers) > 3000


def test_who_leaves_stops_the_computation(running: Running, client: OpenAI, model: str) -> None:
    stream = chat(client, model, stream=True, max_tokens=900, extra_body={"min_p": 0.1})
    job_id = next(iter(stream)).id.removeprefix("chatcmpl-")
    stream.close()
    assert running.ended(job_id).state == "CANCELLED"
    assert chat(client, model, max_tokens=2).choices  # the slot is free


def test_each_request_is_in_the_journal(running: Running, client: OpenAI, model: str) -> None:
    before = {job.job_id for job in running.jobs()}
    answer = chat(client, model, max_tokens=2)
    new = [job for job in running.jobs() if job.job_id not in before]
    assert [f"chatcmpl-{job.job_id}" for job in new] == [answer.id]
    assert new[0].request.topic == f"job.llm.{model}"
