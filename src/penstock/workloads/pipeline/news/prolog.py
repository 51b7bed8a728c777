"""The first lines of an XML document, looked at before any parser does.

A few hundred bytes of entity declarations can grow to gigabytes, and can name files and
addresses to be read. No feed needs them, so a document that declares any is not parsed.
"""

from __future__ import annotations

import codecs
import re

_DECLARED = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([A-Za-z0-9._-]{1,40})["']""")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (b"<\0\0\0", "utf-32-le"),
    (b"\0\0\0<", "utf-32-be"),
    (b"<\0?\0", "utf-16-le"),
    (b"\0<\0?", "utf-16-be"),
)
_LAST_RESORT = "cp1252"
_REFERENCE = re.compile(r"&#(?:[xX]([0-9a-fA-F]++)|([0-9]++));?")
_MOST_DIGITS = 7
_ENTITY = re.compile(r"<!ENTITY", re.IGNORECASE)
_FIRST_TAG = re.compile(r"<\w")
_FEED_TAG = re.compile(r"<(?:rss|feed|rdf:RDF)\b")
_NEAR = 1_000
_NAME = re.compile(r"\s*([\w:.-]+)")
_XML_LINE = re.compile(r"^\s*<\?xml\b[^>]{0,400}\?>")


def decode(data: bytes, charset: str = "") -> tuple[str, bool]:
    """The document as text, and whether it was in the encoding that it claims to be in."""
    tries = _encodings(data, charset)
    for number, name in enumerate(tries):
        try:
            text = data.decode(name).lstrip("\ufeff")
        except (LookupError, ValueError):
            continue
        # Some decode anything: UTF-16 makes Chinese of ASCII.
        if "<" in text:
            return text, number == 0
    return data.decode(_LAST_RESORT, "replace"), False


def _encodings(data: bytes, charset: str) -> list[str]:
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), "")
    declared = _DECLARED.match(data[:400])
    said = [marked, charset, declared[1].decode("ascii") if declared else "", "utf-8"]
    return [name for name in said if name]


def as_utf8(text: str) -> bytes:
    """The document in UTF-8, without the line that says otherwise, and without references to
    characters that do not exist: halves of an emoji are common, and parsers stumble there."""
    text = _XML_LINE.sub("", text, count=1).lstrip()
    return _REFERENCE.sub(_existing, text).encode("utf-8", "replace")


def _existing(reference: re.Match[str]) -> str:
    sixteen, ten = reference.groups()
    digits = (sixteen or ten).lstrip("0") or "0"
    if len(digits) > _MOST_DIGITS:
        return ""
    number = int(digits, 16 if sixteen else 10)
    return "" if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF else reference[0]


def declares_entities(text: str) -> bool:
    """Both as a strict parser reads the prolog and as a lenient one may."""
    if not _ENTITY.search(text):
        return False
    first = _FIRST_TAG.search(text)
    if _ENTITY.search(text, 0, first.start() if first else len(text)):
        return True
    at = _first_markup(text)
    return _is_doctype(text, at) and _ENTITY.search(text, at) is not None


def is_web_page(text: str) -> bool:
    """Whether it says of itself to be HTML. Some feeds say so, too, and are none the less."""
    at = _first_markup(text)
    named = _NAME.match(text, at + 9 if _is_doctype(text, at) else at + 1)
    is_html = named is not None and named[1].lower() == "html"
    return is_html and not _FEED_TAG.search(text, at, at + _NEAR)


def _is_doctype(text: str, at: int) -> bool:
    return text[at : at + 9].upper() == "<!DOCTYPE"


def _first_markup(text: str) -> int:
    """Where the first markup begins that is neither a comment nor an instruction."""
    at = text.find("<")
    while at >= 0:
        if text.startswith("<!--", at):
            end = text.find("-->", at + 4)
        elif text.startswith("<?", at):
            end = text.find("?>", at + 2)
        else:
            return at
        at = text.find("<", end) if end >= 0 else -1
    return len(text)
