"""What a model thinks before it answers, told apart from the answer as it comes."""

from __future__ import annotations

from typing import Literal

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
