"""What a spooled job asks of the model."""

from __future__ import annotations

import pytest

from penstock.workloads.llm.values import (
    ChatRequest,
    CompletionRequest,
    LlmFailure,
    Message,
    Sampling,
)
from penstock.workloads.spool.config import JobKind, SpoolOptions
from penstock.workloads.spool.disk.files import Unfit
from penstock.workloads.spool.server.requests import (
    ParentHistory,
    Spooled,
    embedding_of,
    generation_of,
)

PNG = b"\x89PNG\r\n\x1a\n"
BEFORE = ParentHistory(
    system="old",
    messages=(Message(role="user", content="q"), Message(role="assistant", content="a")),
    text="qa",
)


def job(prompt: str = "hello", images: tuple[bytes, ...] = (), **options: object) -> Spooled:
    return Spooled(job_id="1", prompt=prompt, images=images, options=SpoolOptions(**options))  # type: ignore[arg-type]


def chat(one: Spooled, history: ParentHistory = ParentHistory()) -> ChatRequest:  # noqa: B008 it is frozen
    ask = generation_of(one, history, max_tokens=9, seed=5)
    assert isinstance(ask, ChatRequest)
    return ask


def said(ask: ChatRequest) -> list[tuple[str, object]]:
    return [(one.role, one.content) for one in ask.messages]


def test_a_bare_prompt_is_one_user_message_with_the_servers_limit_and_a_seed() -> None:
    ask = chat(job())
    assert said(ask) == [("user", "hello")]
    assert (ask.max_tokens, ask.sampling.seed) == (9, 5)


def test_what_a_job_says_goes_before_the_servers_defaults() -> None:
    ask = chat(job(max_tokens=3, sampling=Sampling(seed=0, top_k=4)))
    assert (ask.max_tokens, ask.sampling) == (3, Sampling(seed=0, top_k=4))


def test_history_comes_before_its_own_messages_and_its_prompt() -> None:
    mine = (Message(role="user", content="m"), Message(role="assistant", content="n"))
    ask = chat(job(system="new", messages=mine), BEFORE)
    assert said(ask) == [
        ("system", "new"),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "m"),
        ("assistant", "n"),
        ("user", "hello"),
    ]
    assert said(chat(job(), BEFORE))[0] == ("system", "old")


def test_a_conversation_without_a_prompt_is_enough() -> None:
    ask = chat(job("", messages=(Message(role="user", content="m"),)))
    assert said(ask) == [("user", "m")]


def test_a_raw_prompt_goes_on_from_the_text_before_it() -> None:
    ask = generation_of(job(raw=True), BEFORE, max_tokens=9, seed=5)
    assert isinstance(ask, CompletionRequest)
    assert ask.prompts == ("qahello",)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (job(images=(PNG,), raw=True), "raw prompt"),
        (job(images=(b"text",)), "not a JPEG"),
        (Spooled(job_id="1", prompt="x", kind=JobKind.VISION), "there are none"),
    ],
    ids=["raw", "no picture", "vision without one"],
)
def test_pictures_that_can_not_be_given_are_refused(one: Spooled, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        generation_of(one, ParentHistory(), max_tokens=9, seed=5)


def test_embeddings_are_of_text() -> None:
    assert embedding_of(job()).inputs == ("hello",)
    with pytest.raises(LlmFailure, match="images"):
        embedding_of(job(images=(PNG,)))
    with pytest.raises(Unfit, match="empty"):
        embedding_of(job(""))
