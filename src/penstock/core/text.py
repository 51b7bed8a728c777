"""Text of others, made safe to show: nothing in it may drive a terminal. Pure."""

from __future__ import annotations

import re

_DANGEROUS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, with all that begins an escape sequence
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction of text
    "\u2028\u2029"  # ends of lines that are not seen as such
    "]"
)


def harmless(text: str) -> str:
    """Remove control characters, except tabs and newlines."""
    return _DANGEROUS.sub("", text)


def escaped(json: bytes) -> bytes:
    """The same JSON, with escapes for such characters; JSON itself escapes only some of them."""
    if json.isascii() and b"\x7f" not in json:
        return json
    return _DANGEROUS.sub(_escape, json.decode()).encode()


def _escape(found: re.Match[str]) -> str:
    # Outside of strings, which have no bare one, \r is a blank.
    return "\r" if found[0] == "\r" else f"\\u{ord(found[0]):04x}"
