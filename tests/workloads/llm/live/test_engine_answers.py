"""What a real model answers, through everything between."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from penstock.workloads.llm.runner import answer
from penstock.workloads.llm.values import (
    ChatRequest,
    CompletionRequest,
    Delta,
    EmbeddingRequest,
    Message,
    Sampling,
    TokenizeRequest,
    TokenizeResult,
)

if TYPE_CHECKING:
    from tests.workloads.llm.live.conftest import Kept

GREEDY = Sampling(temperature=0)
SUBJECTS = [
    *("cats", "rain", "bread", "iron", "maps", "ships", "books", "clocks", "birds"),
    *("rivers", "stars", "sand", "tea", "wool", "ink", "kites"),
]


def chat(text: str, **more: Any) -> ChatRequest:
    more.setdefault("sampling", GREEDY)
    more.setdefault("max_tokens", 7)
    return ChatRequest(messages=(Message(role="user", content=text),), **more)


def raw(*prompts: str | tuple[int, ...], **more: Any) -> CompletionRequest:
    more.setdefault("sampling", GREEDY)
    more.setdefault("max_tokens", 7)
    return CompletionRequest(prompts=prompts, **more)


def text(kept: Kept, ask: ChatRequest | CompletionRequest) -> str:
    return kept.answer(ask).choices[0].text


@pytest.mark.seed("004", "13.3")
def test_greedy_text_is_the_same_in_company_and_alone(kept: Kept) -> None:
    asks = [
        (raw if number % 2 else chat)(f"Tell me one thing about {subject}.")
        for number, subject in enumerate(SUBJECTS)
    ]

    async def together() -> list[str]:
        done = await asyncio.gather(*(answer(kept.runner, "", ask) for ask in asks))
        return [one.choices[0].text for one in done]

    alone = [text(kept, ask) for ask in asks]
    assert kept.run(together()) == alone
    assert len(set(alone)) > len(asks) / 2


@pytest.mark.seed("004", "13.3")
def test_what_the_template_begins_with_is_computed_once(kept: Kept) -> None:
    result = kept.answer(chat("Name a colour.", n=8, max_tokens=1))
    again = kept.answer(chat("Name a fruit.", n=8, max_tokens=1))

    assert again.usage.prompt_tokens > again.usage.cached_tokens >= 25
    assert result.usage.completion_tokens == 8


@pytest.mark.seed("004", "14.9")
@pytest.mark.parametrize(
    "ask",
    [
        chat("Write a line with many emoji 😀🌟🎉 and the word naïve", max_tokens=20),
        chat("Count from one to twenty", stop=("five", "seven"), max_tokens=24),
        raw("日本語のテキスト", max_tokens=18),
        raw("🌟🌟🌟", max_tokens=7),
        raw("one two three", stop=(" ",), max_tokens=9),
        raw("a b c d e f g", stop=("k l", "i j k"), max_tokens=20),
        chat("Hello", sampling=Sampling(seed=4, temperature=3.0, top_k=0), max_tokens=24),
    ],
    ids=["emoji", "stop", "japanese", "cut-emoji", "stop-at-once", "two-stops", "wild"],
)
def test_pieces_make_up_the_text_and_cut_no_character(
    kept: Kept, ask: ChatRequest | CompletionRequest
) -> None:
    told: list[Delta] = []
    [choice] = kept.answer(ask, told).choices

    assert "".join(piece.text for piece in told) == choice.text
    for piece in told:
        piece.text.encode()
    assert not any(stop in choice.text for stop in ask.stop)


def test_an_answer_ends_before_a_stop_string_and_says_so(kept: Kept) -> None:
    whole = text(kept, raw("1, 2, 3, 4,", max_tokens=12))
    [choice] = kept.answer(raw("1, 2, 3, 4,", max_tokens=12, stop=("7",))).choices

    assert "7" in whole
    assert choice.text == whole[: whole.index("7")]
    assert choice.finish_reason == "stop"


def test_the_token_limit_holds_and_is_told(kept: Kept) -> None:
    result = kept.answer(chat("Tell me a long story", max_tokens=5))

    assert result.choices[0].finish_reason == "length"
    assert result.usage.completion_tokens == 5
    assert result.timings.prompt_ms > 0 < result.timings.predicted_ms


def test_a_full_context_ends_an_answer_with_its_reason(kept: Kept) -> None:
    prompt = " ".join(["word"] * 245)
    result = kept.answer(raw(prompt, max_tokens=1000, sampling=Sampling(temperature=0)))

    assert result.choices[0].finish_reason == "length"
    assert result.choices[0].text
    assert result.usage.prompt_tokens + result.usage.completion_tokens == 256


@pytest.mark.seed("004", "14.8")
def test_the_same_seed_gives_the_same_answer_and_none_another(kept: Kept) -> None:
    def said(seed: int | None) -> str:
        return text(kept, raw("Once", sampling=Sampling(seed=seed, temperature=1.5), max_tokens=16))

    assert said(7) == said(7)
    assert len({said(None) for _ in range(3)}) > 1


def test_each_of_several_answers_has_its_own_seed(kept: Kept) -> None:
    sampling = Sampling(seed=3, temperature=1.5)
    ask = raw("Once", "Twice", n=3, sampling=sampling, max_tokens=10)
    first, second = kept.answer(ask), kept.answer(ask)

    assert [one.text for one in first.choices] == [one.text for one in second.choices]
    assert [one.index for one in first.choices] == list(range(6))
    assert len({one.text for one in first.choices}) > 4
    later = Sampling(seed=4, temperature=1.5)
    assert text(kept, raw("Once", sampling=later, max_tokens=10)) == first.choices[1].text
    assert len({one.text for one in kept.answer(raw("Once", n=3, sampling=Sampling())).choices}) > 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=5, top_k=1),
        Sampling(temperature=5, top_p=1e-6),
        Sampling(temperature=5, min_p=1.0),
    ],
    ids=["top-k", "top-p", "min-p"],
)
def test_narrow_sampling_at_any_temperature_is_greedy(kept: Kept, sampling: Sampling) -> None:
    assert text(kept, raw("The sea is", sampling=sampling)) == text(kept, raw("The sea is"))


@pytest.mark.seed("004", "14.8")
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, repeat_penalty=5),
        Sampling(temperature=0, presence_penalty=2),
        Sampling(temperature=0, frequency_penalty=2),
    ],
    ids=["repeat", "presence", "frequency"],
)
def test_penalties_change_what_repeats(kept: Kept, sampling: Sampling) -> None:
    ask = raw("la la la la la la la la", max_tokens=10)
    punished = raw("la la la la la la la la", max_tokens=10, sampling=sampling)

    assert text(kept, ask) != text(kept, punished)


def test_logprobs_are_told_with_as_many_alternatives_as_asked(kept: Kept) -> None:
    [none] = kept.answer(chat("Hi", max_tokens=3, logprobs=0)).choices
    [some] = kept.answer(raw("Hi", max_tokens=3, logprobs=4)).choices
    [unasked] = kept.answer(raw("Hi", max_tokens=3)).choices

    assert unasked.logprobs is None
    assert none.logprobs is not None
    assert some.logprobs is not None
    assert [len(one.top_logprobs) for one in none.logprobs] == [0, 0, 0]
    assert [len(one.top_logprobs) for one in some.logprobs] == [4, 4, 4]
    for one in some.logprobs:
        assert one.logprob <= 0
        assert one.token == one.top_logprobs[0].token
        assert bytes(one.bytes or ()).decode() == one.token


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "size": {"type": "boolean"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "ask",
    [
        chat("Describe a city", schema=SCHEMA, max_tokens=60),
        raw("A city:", schema=SCHEMA, max_tokens=60),
    ],
    ids=["chat", "raw"],
)
def test_an_answer_follows_its_schema(kept: Kept, ask: ChatRequest | CompletionRequest) -> None:
    said = json.loads(text(kept, ask))

    assert said["city"] in ("Oslo", "Rome")
    assert said["size"] in (True, False)


def test_an_answer_follows_its_grammar_or_is_a_json_object(kept: Kept) -> None:
    grammar = 'root ::= ("yes" | "no") "!"'

    assert text(kept, chat("Is it so?", grammar=grammar)) in ("yes!", "no!")
    assert text(kept, raw("Is it so?", grammar=grammar)) in ("yes!", "no!")
    assert text(kept, chat("Give JSON", json_object=True)).lstrip().startswith("{")
    assert text(kept, raw("Give JSON", json_object=True)).lstrip().startswith("{")


def test_a_prompt_may_be_tokens(kept: Kept) -> None:
    assert text(kept, raw((504, 3575, 282, 4649, 314))) == text(
        kept, raw("The capital of France is")
    )


def test_a_system_prompt_and_earlier_turns_are_seen(kept: Kept) -> None:
    def asked(*messages: Message) -> int:
        ask = ChatRequest(messages=messages, max_tokens=1, sampling=GREEDY)
        return kept.answer(ask).usage.prompt_tokens

    last = Message(role="user", content="And now?")
    brief = asked(Message(role="system", content="Hm."), last)
    assert asked(Message(role="developer", content="Hm."), last) == brief
    turns = (
        Message(role="user", content="Say a word."),
        Message(role="assistant", content="Word."),
    )
    assert asked(Message(role="system", content="Hm."), *turns, last) > brief + 8


def test_embeddings_have_length_one_and_near_texts_are_near(kept: Kept) -> None:
    inputs = ("a small cat", "a little cat", "quarterly tax report of the bank", (57, 5248, 282))
    result = kept.run(kept.runner.embed("", EmbeddingRequest(inputs=inputs)))

    cat, kitten, tax, _ = result.vectors
    assert all(math.isclose(math.hypot(*vector), 1, abs_tol=1e-4) for vector in result.vectors)
    assert _dot(cat, kitten) > _dot(cat, tax)
    assert result.usage.prompt_tokens > 8
    again = kept.run(kept.runner.embed("", EmbeddingRequest(inputs=inputs[:1])))
    assert _dot(again.vectors[0], cat) > 0.999


def _dot(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_text_becomes_tokens_and_the_same_text_again(kept: Kept) -> None:
    def tokens(**fields: Any) -> TokenizeResult:
        return kept.run(kept.runner.tokenize("", TokenizeRequest(**fields)))

    found = tokens(text="Hello, brave new world")
    assert len(found.tokens) > 3
    assert tokens(tokens=found.tokens).text == "Hello, brave new world"
    message = Message(role="user", content="Hi")
    assert tokens(messages=(message,), add_special=True).text.endswith("assistant\n")
    asked = ChatRequest(messages=(message,), max_tokens=1)
    counted = tokens(messages=(message,), add_special=True)
    assert len(counted.tokens) == kept.answer(asked).usage.prompt_tokens
    assert len(tokens(text="<|im_start|>").tokens) == 1
    assert len(tokens(text="<|im_start|>", parse_special=False).tokens) > 1
