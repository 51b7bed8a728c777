"""What a model is given, and what it can't be."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.pipes.small_tokenizers import byte_level, sentence_piece

from penstock.workloads.llm.values import (
    ChatRequest,
    CompletionRequest,
    ImagePart,
    ImageUrl,
    LlmCode,
    LlmFailure,
    Message,
    Sampling,
    TextPart,
    ToolCall,
    ToolFunction,
)
from penstock.workloads.pipes.text.sampler import completed
from penstock.workloads.pipes.text.tokenizing import Text

USER = Message(role="user", content="Hi")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
PIXEL = ImagePart(ImageUrl("data:image/png;base64,iVBORw0KGgo="))


def text(tokenizer: Any = None, **generation: Any) -> Text:
    tokenizer = tokenizer or byte_level()
    return Text(tokenizer, {"vocab_size": len(tokenizer) + 8}, generation)


def chat(*messages: Message, **more: Any) -> ChatRequest:
    return ChatRequest(messages=messages, **more)


# -- conversations ------------------------------------------------------------------


def test_a_conversation_is_written_by_the_models_template() -> None:
    ask = chat(Message(role="system", content="Be brief."), USER)
    assert text().written(ask) == (
        "<|start|>system\nBe brief.<|done|>\n<|start|>user\nHi<|done|>\n<|start|>assistant\n"
    )


def test_a_developer_is_the_system_to_a_template() -> None:
    assert text().written(chat(Message(role="developer", content="x"), USER)) == text().written(
        chat(Message(role="system", content="x"), USER)
    )


@pytest.mark.parametrize(
    ("content", "written"),
    [(None, ""), ("", ""), ((), ""), ((TextPart("a"), TextPart("b")), "a\nb")],
    ids=["none", "empty", "no-parts", "parts"],
)
def test_the_parts_of_a_message_are_its_lines(content: Any, written: str) -> None:
    assert (
        text()
        .written(chat(Message(role="user", content=content)))
        .startswith(f"<|start|>user\n{written}<|done|>")
    )


def test_a_last_message_of_the_assistant_is_gone_on_from() -> None:
    said = Message(role="assistant", content="Well, ")
    assert text().written(chat(USER, said)).endswith("Hi<|done|>\n<|start|>assistant\nWell, ")


def test_arguments_of_calls_reach_a_template_as_values() -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.at }};"
    template += "{{ c.function.name }}{% endfor %}{% endfor %}"
    call = ToolCall(id="c", function=ToolFunction("look", '{"at": "sea"}'))
    asked = chat(Message(role="assistant", tool_calls=(call,)), USER)
    assert text(byte_level(chat_template=template)).written(asked) == "sea;look"


def test_what_a_template_writes_is_all_that_the_model_sees() -> None:
    known = text(sentence_piece())
    tokens = known.prompt_of(chat(USER))
    assert tokens == known._tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokens.count(2) == 2, "the token in front is not put there twice"


# -- completions --------------------------------------------------------------------


def test_bare_text_gets_the_tokens_in_front_that_the_model_expects() -> None:
    tokenizer = sentence_piece()
    assert text(tokenizer).prompt_of(CompletionRequest(prompts=("Hi",))) == tokenizer.encode("Hi")
    assert tokenizer.encode("Hi")[0] == 2


def test_each_of_several_prompts_has_its_answers() -> None:
    ask = CompletionRequest(prompts=("one", (5, 6), "two"), n=2)
    known = text()
    prompts = [known.prompt_of(ask, choice) for choice in range(6)]
    assert prompts[0] == prompts[1] == known.tokenize("one", bare=True)
    assert prompts[2] == prompts[3] == [5, 6]
    assert prompts[4] == known.tokenize("two", bare=True)
    with pytest.raises(ValueError, match="no choice 6"):
        known.prompt_of(ask, 6)


def test_a_tokenizer_that_cuts_texts_off_does_not_any_more() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert len(text(tokenizer).prompt_of(CompletionRequest(prompts=("a b c d e f g",)))) > 7


# -- refusals -----------------------------------------------------------------------

SAID = Message(role="assistant", content="So.")
REFUSED: dict[str, tuple[ChatRequest | CompletionRequest, LlmCode, str]] = {
    "empty": (CompletionRequest(prompts=("",)), LlmCode.INVALID_PROMPT, "the prompt is empty"),
    "no-tokens": (CompletionRequest(prompts=((),)), LlmCode.INVALID_PROMPT, "the prompt is empty"),
    "no-unicode": (
        CompletionRequest(prompts=("\ud800",)), LlmCode.INVALID_PROMPT, "not valid Unicode",
    ),
    "no-unicode-said": (
        chat(Message(role="user", content="\udfff")), LlmCode.INVALID_PROMPT, "not valid Unicode"
    ),
    "token": (
        CompletionRequest(prompts=((5, 10**8),)), LlmCode.INVALID_PROMPT, "invalid tokens: 1000",
    ),
    "below": (CompletionRequest(prompts=((-1,),)), LlmCode.INVALID_PROMPT, "invalid tokens: -1"),
    "role": (
        chat(USER, Message(role="tool", content="x")), LlmCode.INVALID_PROMPT, "no tools, please"
    ),
    "twice": (chat(USER, SAID, SAID), LlmCode.INVALID_PROMPT, "both the assistant's"),
    "tools": (chat(USER, tools=(TOOL,)), LlmCode.NOT_SUPPORTED, "tools"),
    "a-tool": (
        chat(USER, tools=(TOOL,), tool_choice="required"), LlmCode.NOT_SUPPORTED, "tools"
    ),
    "image": (
        chat(Message(role="user", content=(TextPart("See"), PIXEL))),
        LlmCode.NOT_SUPPORTED, "images",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(case: str) -> None:
    ask, code, why = REFUSED[case]
    with pytest.raises(LlmFailure) as refused:
        text().prompt_of(ask)

    assert refused.value.code is code
    assert why in refused.value.message


def test_tools_that_may_not_be_used_are_no_obstacle() -> None:
    assert text().prompt_of(chat(USER, tools=(TOOL,), tool_choice="none"))


def test_a_model_without_a_template_completes_only() -> None:
    bare = text(byte_level(chat_template=None))
    assert bare.prompt_of(CompletionRequest(prompts=("Hi",)))
    with pytest.raises(LlmFailure, match="no chat template") as refused:
        bare.prompt_of(chat(USER))

    assert refused.value.code is LlmCode.NOT_SUPPORTED


def test_a_template_that_writes_nothing_gives_an_empty_prompt() -> None:
    with pytest.raises(LlmFailure, match="empty"):
        text(byte_level(chat_template="{{ '' }}")).prompt_of(chat(USER))


# -- ends ---------------------------------------------------------------------------


def test_an_answer_ends_where_config_generation_tokenizer_and_template_say() -> None:
    tokenizer = byte_level()
    known = Text(tokenizer, {"eos_token_id": 40, "vocab_size": 422}, {"eos_token_id": [41, 42]})
    assert known.ends == {40, 41, 42, 0, 2}


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('never') }}",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ],
    ids=["none", "refusing", "plain"],
)
def test_a_template_without_an_end_of_turn_adds_none(template: str | None) -> None:
    assert text(byte_level(chat_template=template)).ends == {0}


def test_tokens_that_always_end_an_answer_are_known_by_name() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>", "<|other|>"]})
    tokenizer.add_tokens(["<|im_end|>"])
    assert text(tokenizer).ends == {0, 2, tokenizer.convert_tokens_to_ids("<|eot_id|>")}


# -- answers ------------------------------------------------------------------------


def test_what_a_model_recommends_holds_where_nothing_is_asked() -> None:
    known = text(temperature=0.6, top_p=0.9, top_k=None, repetition_penalty=1.3)
    assert known.sampling(Sampling(top_p=0.5)) == completed(Sampling(temperature=0.6, top_p=0.5))


def test_a_sampler_and_a_writer_are_those_that_were_asked_for() -> None:
    known = text()
    ask = chat(USER, stop=("b",), logprobs=1, sampling=Sampling(temperature=0))
    logits = _likely(known.tokenize("ab")[0], known.vocab_size)
    chosen = known.sampler(ask).choose(logits, [])
    writer = known.writer(ask, 5, choice=3)
    assert chosen.logprobs is not None
    writer.add(chosen.token, chosen.logprobs)
    writer.add(known.tokenize("b")[0])
    said = writer.said()
    assert (said.index, said.text, said.finish_reason) == (3, "a", "stop")
    assert said.logprobs is not None
    assert [one.token for one in said.logprobs] == ["a"]


def test_the_first_word_of_a_turn_has_no_space_in_front_and_of_a_continuation_it_has() -> None:
    known = text(sentence_piece())
    word = known.tokenize("The")
    begun = known.writer(chat(USER), 9), known.writer(chat(USER, SAID), 9)
    raw = known.writer(CompletionRequest(prompts=("x",)), 9)
    for writer in (*begun, raw):
        for token in word:
            writer.add(token)
    assert [one.said().text for one in (*begun, raw)] == ["The", " The", " The"]


def _likely(token: int, size: int) -> Any:
    import torch

    row = torch.zeros(size)
    row[token] = 5
    return row
