"""HTML as the plain text a reader would see. Nothing of it is ever shown as HTML again.

The scanner here looks at every character a bounded number of times. The standard library's
parser needs the square of the length for some broken input: 45 s for 200 kB of `<a<a<a`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

MAX_MARKUP = 400_000
"""Characters of HTML that are looked at: no article is longer, a hostile one may be."""
MAX_TEXT = 100_000

_UNSEEN = frozenset({"script", "style", "template", "noscript", "iframe", "object", "svg", "head"})
_BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption"}
    | {"figure", "footer", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main"}
    | {"nav", "ol", "p", "pre", "section", "table", "td", "th", "tr", "ul"}
)
# A tag holds no other `<`, so that a failed match ends at the next one.
_TAG = re.compile(
    r"""</?([a-zA-Z][\w:-]*+)(?:(?:[^<>"']|"[^"<]*+"|'[^'<]*+')*+>|[^<>]*+>)|<[!?/][^<>]*+>"""
)
_LONG_REFERENCE = re.compile(r"&#[xX]?[0-9a-fA-F]{8,}+;?")
_WRAPPED = re.compile(r"(?<!\n)\n(?!\n)")
"""A line break that only wraps; an empty line is likely to be meant."""
_SPACES = re.compile(r"[^\S\n]{2,}|[^\S\n ]")
"""A run of them, or one that is no plain space; the many that are stay as they are."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u2060\ufeff\ud800-\udfff]")


def html_to_text(markup: str) -> str:
    """Tags gone, entities resolved, one line a paragraph."""
    markup = _WRAPPED.sub(" ", markup[:MAX_MARKUP].replace("\r\n", "\n"))
    text = "".join(_seen(markup))
    # No character has so high a number, and some numbers are too long to be read.
    return tidy(html.unescape(_LONG_REFERENCE.sub("", text)))


def tidy(text: str) -> str:
    """Without control characters, spaces run together, one line break between paragraphs."""
    text = _CONTROL.sub("", text.replace("\r", "\n"))
    lines = (line.strip() for line in _SPACES.sub(" ", text).split("\n"))
    return "\n".join(filter(None, lines))[:MAX_TEXT].rstrip()


def one_line(text: str) -> str:
    return " ".join(text.split())


def _seen(markup: str) -> Iterator[str]:
    """The text between tags; blocks become line breaks."""
    at = 0
    comments_end = True
    while (tag_at := markup.find("<", at)) >= 0:
        yield markup[at:tag_at]
        if comments_end and markup.startswith("<!--", tag_at):
            end = markup.find("-->", tag_at + 4)
            comments_end = end >= 0
            at = end + 3 if comments_end else tag_at + 4
            continue
        tag = _TAG.match(markup, tag_at)
        if tag is None:
            yield "<"
            at = tag_at + 1
            continue
        at = tag.end()
        name = (tag[1] or "").lower()
        if name in _BLOCKS:
            yield "\n"
        elif name in _UNSEEN and not tag[0].startswith("</") and not tag[0].endswith("/>"):
            closing = re.compile(rf"</{name}\b[^<>]*>?", re.IGNORECASE).search(markup, at)
            if closing is None:
                return
            at = closing.end()
    yield markup[at:]
