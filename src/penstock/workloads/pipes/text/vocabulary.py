"""The bytes of each token: what a text is made of, before it is cut into characters."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

from penstock.workloads.llm.values import LlmCode, LlmFailure

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How tokenizers after SentencePiece write a space."""
_TRIALS = ("Two words, and 3 more.", "naïve", "日本語", "😀🌟", "\n\tx  y")


class Vocabulary:
    """Of a transformers tokenizer. Raises NOT_SUPPORTED if its tokens are not known to be bytes,
    so that nothing unreadable is ever written."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoders = _decoders(tokenizer)
        self._bytes = (
            {char: byte for byte, char in _byte_level()} if "ByteLevel" in decoders else {}
        )
        self.begins_with_space = not self._bytes and bool({"Strip", "Metaspace"} & decoders)
        """Whether a space in front of the whole text is the tokenizer's own, and not written."""
        self.specials: frozenset[int] = frozenset(_specials(tokenizer))
        """Tokens that are no text."""
        self._known: dict[int, bytes] = {}
        self._try(decoders)

    def name_of(self, token: int) -> bytes:
        """What is told of it in a list of alternatives: a special token by its name."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._found(token)
        return known

    def bytes_of(self, token: int) -> bytes:
        """What it adds to a text, often a part of a character only."""
        return b"" if token in self.specials else self.name_of(token)

    def text_of(self, tokens: Iterable[int]) -> str:
        """All of a text. Incomplete characters at its end are left out."""
        data = b"".join(map(self.bytes_of, tokens))
        if self.begins_with_space:
            data = data.removeprefix(b" ")
        return readable(data)

    def _found(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # heads are often larger than vocabularies
            return b""
        if token in self.specials:
            return str(name).encode()
        if self._bytes:
            try:
                return bytes(self._bytes[char] for char in name)
            except KeyError:  # added by hand, as it reads
                return str(name).encode()
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        return str(name).replace(_SPACE, " ").encode()

    def _try(self, decoders: set[str]) -> None:
        for trial in _TRIALS:
            tokens = self._tokenizer.encode(trial, add_special_tokens=False)
            whole = self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            if self.text_of(tokens) != whole:
                raise LlmFailure(
                    LlmCode.NOT_SUPPORTED,
                    "the tokenizer of this model makes text in a way that is not known here"
                    f" ({', '.join(sorted(decoders)) or type(self._tokenizer).__name__})",
                )


def readable(data: bytes) -> str:
    """Whole characters; what can't be one is told as U+FFFD, what may become one is left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _decoders(tokenizer: Any) -> set[str]:
    """The kinds of steps by which a tokenizer of the `tokenizers` library makes text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return set()
    told = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in (told, *told.get("decoders", ()))}


def _specials(tokenizer: Any) -> Iterable[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return (token for token, told in added.items() if told.special)


def _byte_level() -> Iterable[tuple[int, str]]:
    """How tokenizers after GPT-2 write bytes: those that can be read as they are, the others as
    characters from 256 on."""
    others = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield byte, chr(byte)
        else:
            yield byte, chr(256 + others)
            others += 1
