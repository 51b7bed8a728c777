"""What an answer may be held to. llama.cpp reads schemas and grammars by recursion, without a
limit: one that is large or deep enough overflows its stack, and takes every answer with it.
"""

from __future__ import annotations

import re

import msgspec

from penstock.workloads.llm.values import Chat, Generation, LlmCode, LlmFailure

LARGEST = 64 << 10
"""Bytes of a schema, of a grammar, of all tools together. Definitions that refer to each other
could be read at 85,000 bytes, and not at 340,000."""
DEEPEST = 1000
"""Parentheses of a grammar within each other."""
_PLAIN = re.compile(r'"(?:[^"\\]|\\.)*"?|\[(?:[^\]\\]|\\.)*\]?|#[^\n]*|[^()"\[#]+', re.S)
"""What says nothing of depth: literals, classes of characters, comments. Each is passed over even
if it is not closed, so that nothing is looked at twice."""


def check_held(ask: Generation) -> None:
    """Raises INVALID_SCHEMA."""
    if ask.grammar is not None:
        _check_size("grammar", ask.grammar.encode("utf-8", "replace"))
        if _depth(ask.grammar) > DEEPEST:
            raise _refused("grammar", f"more than {DEEPEST} parentheses within each other")
    if ask.schema is not None:
        _check_size("schema", msgspec.json.encode(ask.schema))
    if isinstance(ask, Chat) and ask.tools:
        _check_size("tools", msgspec.json.encode(ask.tools))


def _check_size(what: str, data: bytes) -> None:
    if len(data) > LARGEST:
        raise _refused(what, f"{len(data):,} bytes, and at most {LARGEST:,} can be followed")


def _depth(grammar: str) -> int:
    depth = deepest = 0
    for character in _PLAIN.sub("", grammar):
        depth += {"(": 1, ")": -1}.get(character, 0)
        deepest = max(deepest, depth)
    return deepest


def _refused(what: str, has: str) -> LlmFailure:
    return LlmFailure(LlmCode.INVALID_SCHEMA, f"the {what} has {has}")
