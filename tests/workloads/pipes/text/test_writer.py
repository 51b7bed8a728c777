"""Tokens become pieces: whole characters, none lost, none repeated, nothing of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.pipes.small_tokenizers import CORPUS, byte_level, sentence_piece

from penstock.workloads.llm.values import Delta, TokenLogprob
from penstock.workloads.pipes.text.sampler import Logprobs
from penstock.workloads.pipes.text.vocabulary import Vocabulary
from penstock.workloads.pipes.text.writer import Writer

KINDS = {"byte-level": byte_level(), "sentence-piece": sentence_piece()}
WORDS = {kind: Vocabulary(tokenizer) for kind, tokenizer in KINDS.items()}
END = 2
NO_END = 1 << 20


def writer(kind: str = "byte-level", max_tokens: int = NO_END, *stop: str) -> Writer:
    return Writer(WORDS[kind], frozenset({END}), max_tokens, stop, continues=False)


def written(writer: Writer, tokens: list[int]) -> list[Delta]:
    """All pieces up to the end."""
    pieces = []
    for token in tokens:
        if (piece := writer.add(token)) is not None:
            pieces.append(piece)
        if writer.finished:
            break
    return pieces


def text(pieces: list[Delta]) -> str:
    return "".join(piece.text for piece in pieces)


def encoded(said: str) -> list[int]:
    return list(KINDS["byte-level"].encode(said))


# -- characters ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_of_any_tokens_make_up_the_text_of_all(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    usable = st.integers(0, len(tokenizer) - 1).filter(lambda token: token != END)
    tokens = data.draw(st.lists(usable, min_size=1, max_size=30))
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    # It spoils what is right beside what is wrong, where each byte is a token.
    assume(kind == "byte-level" or "\ufffd" not in whole)
    answer = writer(kind)
    pieces = written(answer, [*tokens, END])

    assert text(pieces) == answer.said().text
    # An incomplete character at the very end is all that may be missing.
    assert whole in (answer.said().text, answer.said().text + "\ufffd")


@pytest.mark.seed("000", "17.12")
@pytest.mark.parametrize("kind", KINDS)
@given(said=st.sampled_from(CORPUS) | st.text("aé日本🌟👩\u200d 😀\n", max_size=30))
def test_no_piece_has_a_part_of_a_character(kind: str, said: str) -> None:
    tokens = KINDS[kind].encode(said, add_special_tokens=False)
    pieces = written(writer(kind), tokens)

    assert "\ufffd" not in text(pieces)
    assert text(pieces) == KINDS[kind].decode(tokens)


def test_a_character_is_told_with_the_token_that_completes_it() -> None:
    one, *others, last = encoded("🎃")
    answer = writer()
    assert others
    assert [answer.add(token) for token in (one, *others)] == [None] * (1 + len(others))
    assert answer.add(last) == Delta(text="🎃")


def test_a_character_that_is_never_completed_is_left_out() -> None:
    tokens = encoded("ab🎃")[:-1]
    by_limit, by_end = writer("byte-level", len(tokens)), writer()
    assert text(written(by_limit, tokens)) == text(written(by_end, [*tokens, END])) == "ab"
    assert (by_limit.finished, by_end.finished) == ("length", "stop")


def test_a_replacement_character_that_was_meant_is_told() -> None:
    assert text(written(writer(), encoded("a\ufffdb\ufffd"))) == "a\ufffdb\ufffd"


def test_special_tokens_are_no_text_and_ends_end() -> None:
    answer = writer()
    hi, there = encoded("hi"), encoded(" there")
    assert text(written(answer, [*hi, 1, *there, END, *hi])) == "hi there"
    assert answer.finished == "stop"
    assert answer.tokens == len(hi) + len(there) + 2


def test_a_space_in_front_counts_where_text_goes_on() -> None:
    words, tokens = (
        WORDS["sentence-piece"],
        KINDS["sentence-piece"].encode("The", add_special_tokens=False),
    )
    goes_on = Writer(words, frozenset(), NO_END)
    begins = Writer(words, frozenset(), NO_END, continues=False)
    assert text(written(goes_on, tokens)) == " The"
    assert text(written(begins, tokens)) == "The"


# -- the limit ----------------------------------------------------------------------


@pytest.mark.seed("000", "17.12")
def test_the_last_token_at_the_limit_is_told() -> None:
    tokens = encoded("The quick")
    answer = writer("byte-level", len(tokens))
    assert text(written(answer, [*tokens, *tokens])) == "The quick"
    assert answer.finished == answer.said().finish_reason == "length"
    assert answer.tokens == len(tokens)


def test_an_end_or_a_stop_string_at_the_limit_is_a_stop() -> None:
    tokens = encoded("ab")
    ended, stopped = writer("byte-level", 3), writer("byte-level", 2, "b")
    written(ended, [*tokens, END])
    written(stopped, tokens)
    assert ended.finished == stopped.finished == "stop"
    assert stopped.said().text == "a"


def test_an_answer_that_ends_at_once_is_empty() -> None:
    answer = writer()
    assert answer.add(END) is None
    assert answer.said().text == ""
    assert answer.finished == "stop"


def test_nothing_is_added_to_an_answer_that_has_ended() -> None:
    answer = writer("byte-level", 1)
    answer.add(encoded("a")[0])
    with pytest.raises(ValueError, match="ended"):
        answer.add(encoded("a")[0])


# -- stop strings -------------------------------------------------------------------


def stopped(said: str, stop: list[str]) -> str:
    """Character by character."""
    for at in range(len(said) + 1):
        starts = [at - len(one) for one in stop if said[:at].endswith(one)]
        if starts:
            return said[: min(starts)]
    return said


LETTERS = st.text("ab🌟", max_size=12)


@pytest.mark.seed("000", "17.12")
@given(
    said=LETTERS,
    stop=st.lists(LETTERS.filter(bool), max_size=3),
    cuts=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_what_is_told_ends_before_the_first_stop_string(
    said: str, stop: list[str], cuts: list[bool]
) -> None:
    tokens = [token for part in _parts(said, cuts) for token in encoded(part)]
    answer = writer("byte-level", NO_END, *stop)
    pieces = written(answer, [*tokens, END])

    assert text(pieces) == answer.said().text == stopped(said, stop)
    assert answer.finished == "stop"


def _parts(said: str, cuts: list[bool]) -> list[str]:
    """Cut in other places than the tokenizer would."""
    parts = [""]
    for character, cut in zip(said, cuts, strict=False):
        parts += [""] if cut else []
        parts[-1] += character
    return parts


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    answer = writer("byte-level", NO_END, "xyz")
    told = [answer.add(token) for letter in "axyaxyz" for token in encoded(letter)]
    assert [piece and piece.text for piece in told] == ["a", None, None, "xya", None, None, None]
    assert answer.finished == "stop"
    assert answer.said().text == "axya"


@pytest.mark.parametrize("ends_by", ["end", "limit"])
def test_what_was_held_back_is_told_if_no_stop_string_came(ends_by: str) -> None:
    tokens = encoded("axy")
    answer = writer("byte-level", len(tokens) if ends_by == "limit" else NO_END, "xyz")
    assert text(written(answer, [*tokens, END])) == "axy"


# -- logprobs -----------------------------------------------------------------------


def told(answer: Writer, said: str) -> tuple[list[Delta], list[TokenLogprob]]:
    pieces = []
    for number, token in enumerate(encoded(said)):
        piece = answer.add(token, Logprobs(-float(number), ((token, -float(number)), (END, -9.0))))
        pieces += [piece] if piece else []
        if answer.finished:
            break
    return pieces, [one for piece in pieces for one in piece.logprobs]


def test_logprobs_come_with_the_text_that_their_tokens_are_part_of() -> None:
    answer = writer("byte-level", len(encoded("a🎃b")))
    pieces, logprobs = told(answer, "a🎃b")

    assert [piece.text for piece in pieces] == ["a", "🎃", "b"]
    assert [len(piece.logprobs) for piece in pieces] == [1, len(encoded("🎃")), 1]
    assert b"".join(bytes(one.bytes or ()) for one in logprobs) == "a🎃b".encode()
    assert [one.logprob for one in logprobs] == [-float(n) for n in range(len(logprobs))]
    assert tuple(logprobs) == answer.said().logprobs
    first = logprobs[0]
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", 0), ("<|done|>", -9)]
    assert bytes(first.top_logprobs[1].bytes or ()) == b"<|done|>"


def test_logprobs_of_a_stop_string_are_not_told() -> None:
    answer = writer("byte-level", NO_END, "xyz")
    _, logprobs = told(answer, "axyz")
    assert "".join(one.token for one in logprobs) == "a"
    assert answer.said().logprobs == tuple(logprobs)


def test_every_token_up_to_the_limit_has_its_logprobs_even_without_text() -> None:
    tokens = encoded("a🎃")[:-1]
    answer = writer("byte-level", len(tokens))
    _, logprobs = told(answer, "a🎃")
    assert len(logprobs) == len(tokens)


def test_without_logprobs_none_are_told() -> None:
    answer = writer()
    written(answer, encoded("abc"))
    assert answer.said().logprobs is None
