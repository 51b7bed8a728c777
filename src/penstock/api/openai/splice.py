"""What was told of an answer, so that a second attempt does not tell it twice.

A job whose worker was lost begins again. What its new attempt says is passed over as long as it is
what the reader has heard already; where it says something else, the reader can't be told.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.core.errors import Conflict
from penstock.workloads.llm.values import Choice, Delta, ToolDelta

Attempt = tuple[str, int]
"""A job and the number of its attempt."""


class Track:
    """One text that grows."""

    __slots__ = ("_behind", "_parts", "_said")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._said = ""
        """What an earlier attempt said."""
        self._behind = 0
        """How much of that this attempt has yet to repeat."""

    @property
    def is_behind(self) -> bool:
        return self._behind > 0

    def take(self, text: str) -> str:
        """What of it is new. Raises Conflict where it is not what was said before."""
        if not self._behind:
            self._parts.append(text)
            return text
        at = len(self._said) - self._behind
        known = self._said[at : at + len(text)]
        if not text.startswith(known):
            raise _changed()
        self._behind -= len(known)
        new = text[len(known) :]
        self._parts.append(new)
        return new

    def again(self) -> None:
        """Another attempt begins."""
        self._said = "".join(self._parts)
        self._parts = [self._said]
        self._behind = len(self._said)

    def rest(self, whole: str) -> str:
        """What no piece told of the whole text."""
        said = "".join(self._parts)
        if not whole.startswith(said):
            return ""
        self._behind = 0
        return whole[len(said) :]


class SplicedAnswer:
    """What a reader was told of one answer."""

    def __init__(self) -> None:
        self._text, self._reasoning = Track(), Track()
        self._calls: list[Track] = []
        self._logprobs = self._behind = 0

    def take(self, piece: Delta) -> Delta:
        """The piece, without what was told before. Raises Conflict."""
        skip = min(self._behind, len(piece.logprobs))
        self._behind -= skip
        self._logprobs += len(piece.logprobs) - skip
        return replace(
            piece,
            text=self._text.take(piece.text),
            reasoning=self._reasoning.take(piece.reasoning),
            tool_calls=piece.tool_calls and tuple(map(self._call, piece.tool_calls)),
            logprobs=piece.logprobs[skip:],
        )

    def _call(self, delta: ToolDelta) -> ToolDelta:
        """The first of each call has its id and name."""
        if delta.index < len(self._calls):
            arguments = self._calls[delta.index].take(delta.arguments)
            return ToolDelta(index=delta.index, arguments=arguments)
        self._calls.append(Track())
        self._calls[-1].take(delta.arguments)
        return delta

    def again(self) -> None:
        self._behind = self._logprobs
        for track in self._tracks():
            track.again()

    def rest(self, whole: Delta) -> Delta:
        """What the whole answer has that no piece told."""
        return Delta(
            choice=whole.choice,
            text=self._text.rest(whole.text),
            reasoning=self._reasoning.rest(whole.reasoning),
            tool_calls=tuple(
                ToolDelta(index=call.index, arguments=self._calls[call.index].rest(call.arguments))
                if call.index < len(self._calls)
                else call
                for call in whole.tool_calls
            ),
            logprobs=whole.logprobs[self._logprobs :],
        )

    @property
    def is_behind(self) -> bool:
        return any(track.is_behind for track in self._tracks())

    def _tracks(self) -> tuple[Track, ...]:
        return (self._text, self._reasoning, *self._calls)


class StreamSplice:
    """What a reader was told of all the answers to a request."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._answers: dict[int, SplicedAnswer] = {}

    def take(self, attempt: Attempt, piece: Delta) -> Delta:
        """The piece, without what was told before. Raises Conflict."""
        self._heed(attempt)
        return self._told(piece.choice).take(piece)

    def finish(self, attempt: Attempt, choices: Sequence[Choice]) -> list[Delta]:
        """What the whole answers have that no piece told. Raises Conflict."""
        silent = self._heed(attempt)
        rest = []
        for index, choice in enumerate(choices):
            told, whole = self._told(index), whole_of(index, choice)
            rest.append(told.take(whole) if silent else told.rest(whole))
            if told.is_behind:
                raise _changed()  # the later attempt said less
        return rest

    def _heed(self, attempt: Attempt) -> bool:
        """Whether this attempt has told nothing yet."""
        if attempt == self._attempt:
            return False
        self._attempt = attempt
        for told in self._answers.values():
            told.again()
        return True

    def _told(self, choice: int) -> SplicedAnswer:
        found = self._answers.get(choice)
        if found is None:
            found = self._answers[choice] = SplicedAnswer()
        return found


def whole_of(index: int, choice: Choice) -> Delta:
    """An answer as one piece."""
    calls = [
        ToolDelta(index=place, id=one.id, name=one.function.name, arguments=one.function.arguments)
        for place, one in enumerate(choice.tool_calls)
    ]
    return Delta(
        choice=index,
        text=choice.text,
        reasoning=choice.reasoning,
        tool_calls=tuple(calls),
        logprobs=choice.logprobs or (),
    )


def _changed() -> Conflict:
    return Conflict(
        "the answer was begun again after its worker was lost, and became another one",
        hint="ask again; with temperature 0, or a seed, it would have gone on",
    )
