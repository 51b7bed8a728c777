"""Answers that follow a JSON schema or a grammar, through llguidance: of each token it says
whether it may come next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.workloads.llm.values import GenerationRequest, LlmCode, LlmFailure

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LARGEST = 64 << 10
"""Bytes of a schema or a grammar, as in the spool."""
_STACK = 256 << 20
"""Schemas and grammars are read by recursion. The deepest of that size take a third of this; the
system gives what is used of it."""
_SPACES = r"( |\n{1,2}[ \t]{0,20})?"
"""Between the parts of JSON: without a bound, a model may write spaces for ever."""
T = TypeVar("T")
_making = threading.Lock()


def is_constrained(ask: GenerationRequest) -> bool:
    return ask.schema is not None or ask.grammar is not None or ask.json_object


class Constraint:
    """What one answer is held to."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, row: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Raises INVALID_SCHEMA if it turns out to be too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        may = np.unpackbits(bits, count=len(row), bitorder="little").view(bool)
        return np.where(may, row, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def forget(self, count: int) -> None:
        """The last tokens were not said after all."""
        self._matcher.rollback(count)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())


class Constraints:
    """Of one tokenizer. What is made here may take seconds, and lets others run meanwhile."""

    def __init__(self, tokenizer: Any, ends: frozenset[int], vocab_size: int) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._ends, self._vocab_size = ends, vocab_size

    def of(self, ask: GenerationRequest) -> Constraint | None:
        """None if it may say anything. Raises INVALID_SCHEMA or NOT_SUPPORTED."""
        if not is_constrained(ask):
            return None
        if ask.grammar is not None and (ask.schema is not None or ask.json_object):
            raise _refused("a grammar and a schema at once")
        if ask.grammar is not None:
            return self._constraint(_from_gbnf, ask.grammar)
        schema = ask.schema if ask.schema is not None else {"type": "object"}
        return self._constraint(_from_schema, _json(schema))

    def _constraint(self, grammar_of: Callable[[str], str], text: str) -> Constraint:
        size = len(text.encode("utf-8", "replace"))
        if size > LARGEST:
            what = "grammar" if grammar_of is _from_gbnf else "schema"
            raise LlmFailure(
                LlmCode.INVALID_SCHEMA,
                f"the {what} has {size:,} bytes, and at most {LARGEST:,} can be followed",
            )
        try:
            return _deeply(lambda: self._made(grammar_of(text)))
        except ImportError:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                "llguidance, which holds answers to schemas and grammars, is not installed:"
                " pip install 'penstock[pipes]'",
            ) from None

    def _made(self, grammar: str) -> Constraint:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return Constraint(matcher)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._backend is None:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                "schemas and grammars are not supported by this model: unknown tokenizer",
            )
        return LLTokenizer(
            self._backend.to_str(), n_vocab=self._vocab_size, eos_token=sorted(self._ends)
        )


def _json(schema: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except UnicodeEncodeError:
        raise _refused("the schema is not valid Unicode") from None
    except RecursionError:
        raise _refused("the schema is too deep") from None


def _from_schema(schema: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _SPACES})


def _from_gbnf(grammar: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not grammar.strip():
        raise LlmFailure(LlmCode.INVALID_SCHEMA, "the grammar is empty")
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar))
    except RecursionError:
        raise _refused("the grammar has too many parentheses within each other") from None
    except Exception as refused:  # that is what it raises
        raise _refused(f"the grammar can't be read: {refused}") from None


def _deeply(work: Callable[[], T]) -> T:
    """What it returns or raises, with more room for recursion than a thread has."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as failure:
            failed.append(failure)

    with _making:
        usual = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, name="schema")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _refused(why: str) -> LlmFailure:
    first = why.strip().partition("\n")[0]
    return LlmFailure(LlmCode.INVALID_SCHEMA, f"invalid JSON schema or grammar: {first}")
