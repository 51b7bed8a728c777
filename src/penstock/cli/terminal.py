"""Text on a terminal that others may have written: a job, a model, another user.

Nothing in it may move the cursor, set the title, answer in our name or turn the order of
characters around: then a failed job could look as if it had succeeded.
"""

from __future__ import annotations

import re
import sys

import click

_DANGEROUS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, with all that begins an escape sequence
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction of text
    "\u2028\u2029"  # ends of lines that are not seen as such
    "]"
)


def harmless(text: str) -> str:
    """Without what would drive a terminal; tabs and ends of lines stay."""
    return _DANGEROUS.sub("", text)


def escaped(json: bytes) -> bytes:
    """The same JSON, with escapes for such characters; JSON itself escapes only some of them."""
    if json.isascii() and b"\x7f" not in json:
        return json
    return _DANGEROUS.sub(_escape, json.decode()).encode()


def _escape(found: re.Match[str]) -> str:
    # Outside of strings, which have no bare one, \r is a blank.
    return "\r" if found[0] == "\r" else f"\\u{ord(found[0]):04x}"


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print what we say, with whatever of others is in it."""
    click.echo(harmless(text), nl=nl, err=err)  # noqa: TID251 (this is what all else uses)


def echo_content(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print what a job wrote: into a pipe as it is."""
    stream = sys.stderr if err else sys.stdout
    click.echo(harmless(text) if stream.isatty() else text, nl=nl, err=err)  # noqa: TID251
