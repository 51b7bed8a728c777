"""From tokens to the Deltas of an answer, as they come."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Literal

from penstock.workloads.llm.values import Choice, Delta, TokenLogprob, TopLogprob
from penstock.workloads.pipes.text.sampler import Logprobs
from penstock.workloads.pipes.text.vocabulary import Vocabulary, readable


class Writer:
    """One answer. Its text is what the tokenizer makes of all tokens up to the end of the answer:
    special tokens are no text, and a character that was not completed is left out."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        ends: frozenset[int],
        max_tokens: int,
        stop: Sequence[str] = (),
        choice: int = 0,
        *,
        continues: bool = True,
        thinking: Thinking | None = None,
    ) -> None:
        """`continues` if it goes on from text, and does not begin one: a space in front of its
        first word counts then, whatever the tokenizer. With `thinking` what it thinks is told
        apart."""
        self.finished: Literal["stop", "length"] | None = None
        self.tokens = 0
        """As many as were added, the one that ended it with them."""
        self._vocabulary, self._ends, self._max_tokens = vocabulary, ends, max_tokens
        self._stop, self._choice = tuple(stop), choice
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_at_beginning = vocabulary.begins_with_space and not continues
        self._thinking = thinking
        self._told: list[str] = []
        self._thought: list[str] = []
        self._told_length = 0
        """Of all text, what was thought with it."""
        self._held = ""
        """What may be the beginning of a stop string."""
        self._logprobs: list[TokenLogprob] | None = None
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()
        """Those of tokens that are not told in full: where each begins and ends in the text."""

    def add(self, token: int, logprobs: Logprobs | None = None) -> Delta | None:
        """What the token adds, with all that was held back for it; None if nothing yet."""
        if self.finished is not None:
            raise ValueError("the answer has ended")
        self.tokens += 1
        if token in self._ends:
            self.finished = "stop"
            return self._tell(self._held)
        begin = self._length()
        text = self._held + self._characters(token)
        if logprobs is not None:
            self._note(token, logprobs, begin, self._told_length + len(text))
        end = _stopped(text, self._stop)
        if end is not None:
            self.finished = "stop"
            return self._tell(text[:end], is_cut=True)
        if self.tokens >= self._max_tokens:
            self.finished = "length"
            return self._tell(text)
        held = _beginning(text, self._stop)
        self._held = text[len(text) - held :]
        return self._tell(text[: len(text) - held])

    def end_here(self) -> Delta | None:
        """The answer ends with the token that was added last, for want of room. What was held
        back."""
        self.finished = "length"
        return self._tell(self._held)

    def said(self) -> Choice:
        """The whole answer, so far if it has not ended."""
        return Choice(
            index=self._choice,
            text="".join(self._told),
            finish_reason=self.finished or "stop",
            reasoning="".join(self._thought),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )

    def _length(self) -> int:
        return self._told_length + len(self._held)

    def _characters(self, token: int) -> str:
        data = self._vocabulary.bytes_of(token)
        if data and self._is_at_beginning:
            self._is_at_beginning = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def _note(self, token: int, logprobs: Logprobs, begin: int, end: int) -> None:
        self._logprobs = [] if self._logprobs is None else self._logprobs
        name = self._vocabulary.name_of(token)
        alternatives = (
            (self._vocabulary.name_of(which), logprob) for which, logprob in logprobs.top
        )
        told = TokenLogprob(
            readable(name),
            logprobs.logprob,
            tuple(name),
            tuple(TopLogprob(readable(name), value, tuple(name)) for name, value in alternatives),
        )
        is_partial = bool(self._decoder.getstate()[0])  # of a character that is still to come
        self._waiting.append((begin, end + is_partial, told))

    def _tell(self, text: str, *, is_cut: bool = False) -> Delta | None:
        self._told_length += len(text)
        reasoning = ""
        if self._thinking is not None:
            reasoning, text = self._thinking.add(text, is_last=self.finished is not None)
        logprobs = self._due(is_cut=is_cut)
        if not (text or reasoning or logprobs):
            return None
        self._told.append(text)
        self._thought.append(reasoning)
        return Delta(choice=self._choice, text=text, reasoning=reasoning, logprobs=logprobs)

    def _due(self, *, is_cut: bool) -> tuple[TokenLogprob, ...]:
        """Those of tokens whose text is told; at the end of an answer all, but for those of which
        nothing is part of it."""
        due = []
        while self._waiting:
            begin, end, told = self._waiting[0]
            if end > self._told_length and self.finished is None:
                break
            self._waiting.popleft()
            if not is_cut or begin < self._told_length:
                due.append(told)
        if self._logprobs is not None:
            self._logprobs += due
        return tuple(due)


def _stopped(text: str, stop: Sequence[str]) -> int | None:
    """Where the text ends, if a stop string is in it. That one counts which is complete first,
    so that it does not matter how the text was cut into tokens."""
    found = [(at + len(one), at) for one in stop if (at := text.find(one)) >= 0]
    return min(found)[1] if found else None


def _beginning(text: str, stop: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    longest = 0
    for one in stop:
        for length in range(min(len(one) - 1, len(text)), longest, -1):
            if text.endswith(one[:length]):
                longest = length
                break
    return longest


# -- what a model thinks before it answers, told apart from the answer as it comes --------

OPEN, CLOSE = "<think>", "</think>"


class Thinking:
    """Text in, and what of it is thought and what is said. Spaces around thoughts are neither."""

    def __init__(self, *, begun: bool = False) -> None:
        """`begun` if the prompt ends with the mark of its beginning."""
        self._state: Literal["before", "inside", "after", "said"] = "inside" if begun else "before"
        self._has_thought = False
        self._held = ""

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """(thought, said): of what may be a mark, nothing before that is known."""
        self._held += text
        thought = said = ""
        if self._state == "before":
            self._look_for_beginning(is_last)
        if self._state == "inside":
            thought = self._thought(is_last)
        if self._state == "after":
            self._held = self._held.lstrip()
            self._state = "said" if self._held else "after"
        if self._state == "said":
            said, self._held = self._held, ""
        return thought, said

    def _look_for_beginning(self, is_last: bool) -> None:
        begins = self._held.lstrip()
        if begins.startswith(OPEN):
            self._state, self._held = "inside", begins.removeprefix(OPEN)
        elif is_last or not OPEN.startswith(begins):
            self._state = "said"

    def _thought(self, is_last: bool) -> str:
        text, mark, rest = self._held.partition(CLOSE)
        if mark:
            self._state, self._held = "after", rest
        else:
            known = len(text) if is_last else len(text) - _mark_begun(text)
            text, self._held = text[:known], text[known:]
        if not self._has_thought:
            text = text.lstrip()
        ends = text.rstrip()
        if self._state == "inside":
            self._held = text[len(ends) :] + self._held
        self._has_thought = self._has_thought or bool(ends)
        return ends


def _mark_begun(text: str) -> int:
    """How many of the last characters may be the beginning of CLOSE."""
    lengths = range(min(len(CLOSE) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(CLOSE[:length])), 0)
