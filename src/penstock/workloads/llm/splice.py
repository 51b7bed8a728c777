"""What was told of an answer, so that a second attempt does not tell it twice.

A job whose worker was lost begins again. What its new attempt says is passed over as long as it is
what the reader has heard already; where it says something else, the reader can't be told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock.core.errors import Conflict
from penstock.workloads.llm.values import Choice, Delta, TokenLogprob, ToolDelta

Attempt = tuple[str, int]
"""A job and the number of its attempt."""


class Track:
    """One text that grows."""

    __slots__ = ("_parts", "_said", "behind")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._said = ""
        """What an earlier attempt said."""
        self.behind = 0
        """How much of that this attempt has yet to repeat."""

    def take(self, text: str) -> str:
        """What of it is new. Raises Conflict where it is not what was said before."""
        if self.behind:
            at = len(self._said) - self.behind
            known = self._said[at : at + len(text)]
            if not text.startswith(known):
                raise _changed()
            self.behind -= len(known)
            text = text[len(known) :]
        self._parts.append(text)
        return text

    def again(self) -> None:
        """Another attempt begins."""
        self._said = "".join(self._parts)
        self._parts = [self._said]
        self.behind = len(self._said)

    def rest(self, whole: str) -> str:
        """What no piece told of the whole text."""
        said = "".join(self._parts)
        if not whole.startswith(said):
            return ""
        self.behind = 0
        return whole[len(said) :]


class StreamSplice:
    """What a reader was told of all the answers to a request."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._tracks: dict[tuple[int, str | int], Track] = {}
        """By answer: its text, its reasoning, and the arguments of each tool call."""
        self._logprobs: defaultdict[int, int] = defaultdict(int)
        self._now: defaultdict[int, int] = defaultdict(int)
        """By answer: tokens whose logprobs were told; and those that this attempt has said."""

    def take(self, attempt: Attempt, piece: Delta) -> Delta:
        """The piece, without what was told before. Raises Conflict."""
        self._heed(attempt)
        return self._new(piece, Track.take)

    def finish(self, attempt: Attempt, choices: Sequence[Choice]) -> list[Delta]:
        """What the whole answers have that no piece told. Raises Conflict."""
        is_silent = self._heed(attempt)
        self._now.clear()  # the whole has them all
        new = Track.take if is_silent else Track.rest
        rest = [self._new(whole_of(n, choice), new) for n, choice in enumerate(choices)]
        if any(track.behind for track in self._tracks.values()):
            raise _changed()  # the later attempt said less
        return rest

    def _heed(self, attempt: Attempt) -> bool:
        """Whether this attempt has told nothing yet."""
        if attempt == self._attempt:
            return False
        self._attempt = attempt
        self._now.clear()
        for track in self._tracks.values():
            track.again()
        return True

    def _new(self, piece: Delta, new: Callable[[Track, str], str]) -> Delta:
        choice = piece.choice
        return replace(
            piece,
            text=new(self._track(choice, "text"), piece.text),
            reasoning=new(self._track(choice, "reasoning"), piece.reasoning),
            tool_calls=tuple(self._call(choice, call, new) for call in piece.tool_calls),
            logprobs=self._new_logprobs(piece) if piece.logprobs else (),
        )

    def _track(self, choice: int, part: str | int) -> Track:
        track = self._tracks.get((choice, part))
        if track is None:
            track = self._tracks[choice, part] = Track()
        return track

    def _call(self, choice: int, call: ToolDelta, new: Callable[[Track, str], str]) -> ToolDelta:
        """The first of each call has its id and name."""
        is_first = (choice, call.index) not in self._tracks
        arguments = new(self._track(choice, call.index), call.arguments)
        return call if is_first else ToolDelta(index=call.index, arguments=arguments)

    def _new_logprobs(self, piece: Delta) -> tuple[TokenLogprob, ...]:
        before, told = self._now[piece.choice], self._logprobs[piece.choice]
        now = self._now[piece.choice] = before + len(piece.logprobs)
        self._logprobs[piece.choice] = max(told, now)
        return piece.logprobs[max(0, told - before) :]


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
