"""Answers follow what they are held to, whatever the model would rather say."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
import torch
from tests.support.pipes.small_tokenizers import byte_level, sentence_piece

from penstock.workloads.llm.values import (
    CompletionRequest,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    Sampling,
)
from penstock.workloads.pipes.text.constraint import LARGEST
from penstock.workloads.pipes.text.tokenizing import Text

KINDS = {"byte-level": byte_level(), "sentence-piece": sentence_piece()}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "size": {"type": "boolean"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


def ask(**held: Any) -> CompletionRequest:
    held.setdefault("sampling", Sampling(seed=1, temperature=2))
    return CompletionRequest(prompts=("x",), **held)


def answered(asked: GenerationRequest, kind: str = "byte-level", most: int = 300) -> str:
    """What comes of logits that mean nothing."""
    text = Text(KINDS[kind], {"vocab_size": len(KINDS[kind]) + 5})
    sampler, writer = text.sampler(asked), text.writer(asked, most)
    noise = torch.Generator().manual_seed(3)
    ids = [5]
    while writer.finished is None:
        chosen = sampler.choose(torch.randn(text.vocab_size, generator=noise), ids)
        ids.append(chosen.token)
        writer.add(chosen.token)
    assert writer.finished == "stop"
    return writer.said().text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_answer_follows_its_schema(kind: str, seed: int) -> None:
    said = json.loads(answered(ask(schema=SCHEMA, sampling=Sampling(seed=seed)), kind))

    assert said["city"] in ("Oslo", "Rome")
    assert said["size"] in (True, False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_follows_its_grammar(kind: str) -> None:
    grammar = 'root ::= ("yes" | "no") "!" tail*\ntail ::= [a-c] "é"?'
    said = answered(ask(grammar=grammar), kind)

    assert said.partition("!")[0] in ("yes", "no")
    assert set(said.partition("!")[2]) <= set("abcé")


def test_a_json_object_may_have_any_shape() -> None:
    sampler = Text(KINDS["byte-level"], {"vocab_size": 422}).sampler(ask(json_object=True))
    first = sampler.choose(torch.zeros(422), [5]).token
    assert KINDS["byte-level"].decode([first]).startswith("{")


def test_a_greedy_answer_is_held_too_and_spaces_between_its_parts_have_a_bound() -> None:
    text = Text(KINDS["byte-level"], {"vocab_size": 422})
    asked = ask(schema=SCHEMA, sampling=Sampling(temperature=0))
    sampler, writer = text.sampler(asked), text.writer(asked, 500)
    row = torch.zeros(422)
    for token in range(422):
        if text.vocabulary.bytes_of(token).isspace():
            row[token] = 9
    while writer.finished is None:
        writer.add(sampler.choose(row, []).token)
    assert writer.finished == "stop"
    assert json.loads(writer.said().text)["city"] in ("Oslo", "Rome")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"schema": {"type": "nope"}}, "nope"),
    "reference": ({"schema": {"$ref": "#/nowhere"}}, "nowhere"),
    "itself": ({"schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, ""),
    "unknown": ({"schema": {"not": {"type": "string"}}}, "not"),
    "no-unicode": ({"schema": {"const": "\ud800"}}, "Unicode"),
    "large": ({"schema": {"description": "a" * LARGEST}}, "at most 65,536 can be followed"),
    "grammar": ({"grammar": "root ::= ("}, "can't be read"),
    "no-root": ({"grammar": 'rot ::= "a"'}, "root"),
    "no-grammar": ({"grammar": " "}, "the grammar is empty"),
    "rule": ({"grammar": "root ::= other"}, "other"),
    "large-grammar": ({"grammar": 'root ::= "' + "a" * LARGEST + '"'}, "at most 65,536"),
    "both": ({"grammar": 'root ::= "a"', "json_object": True}, "at once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_answer_can_be_held_to_is_refused(case: str) -> None:
    held, why = REFUSED[case]
    with pytest.raises(LlmFailure) as refused:
        answered(ask(**held))

    assert refused.value.code is LlmCode.INVALID_SCHEMA
    assert why in refused.value.message
    assert "\n" not in refused.value.message


def test_what_is_deep_takes_nobody_with_it() -> None:
    parts = 55
    chained = {
        str(n): _nested({"$ref": f"#/$defs/{n + 1}"} if n < 80 else {"type": "null"}, parts)
        for n in range(81)
    }
    assert len(json.dumps(chained, separators=(",", ":"))) > LARGEST * 0.8
    assert answered(ask(schema={"$defs": chained, "$ref": "#/$defs/0"})) == "null"
    rules = "\n".join(f"r{n} ::= r{n + 1}" for n in range(1500))
    assert answered(ask(grammar=f'root ::= r0\n{rules}\nr1500 ::= "a"')) == "a"
    with pytest.raises(LlmFailure, match="within each other"):
        answered(ask(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000))


def _nested(inner: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        inner = {"anyOf": [inner]}
    return inner


def test_room_for_deep_ones_is_theirs_alone() -> None:
    before = threading.stack_size()
    answered(ask(grammar='root ::= "a"'))
    assert threading.stack_size() == before


def test_without_its_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(LlmFailure, match=r"pip install 'penstock\[pipes\]'") as refused:
        answered(ask(json_object=True))

    assert refused.value.code is LlmCode.NOT_SUPPORTED


def test_a_token_that_was_not_said_is_chosen_again() -> None:
    asked = ask(schema=SCHEMA)
    text = Text(KINDS["byte-level"], {"vocab_size": len(KINDS["byte-level"]) + 5})
    sampler, ids = text.sampler(asked), [5]
    for position in range(6):
        logits = torch.randn(text.vocab_size, generator=torch.Generator().manual_seed(position))
        unsaid = sampler.choose(logits, ids)
        sampler.forget(1)
        chosen = sampler.choose(logits, ids)
        assert chosen == unsaid
        ids.append(chosen.token)
