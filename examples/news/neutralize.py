"""Neutralizing: the model rewrites paragraph by paragraph where the auditor lets its text pass;
otherwise the lexicon's phrases are replaced; otherwise the original stays."""

from __future__ import annotations

import msgspec

from .articles import Article
from .auditor import audit, audit_model
from .lexicon import Lexicon, apply
from .model import Model


class Neutral(msgspec.Struct, frozen=True, kw_only=True):
    """The rewritten article; `text` is its body, or its teaser where the page was not readable."""

    title: str
    text: str
    teaser: bool = False
    phrases: int = 0
    """Phrases that the lexicon found."""
    by_model: int = 0
    """Paragraphs that are the model's."""
    model_refused: int = 0
    refused: tuple[str, ...] = ()
    """Why paragraphs are the original although the lexicon found something in them."""


class _Paragraph(msgspec.Struct, frozen=True):
    text: str
    phrases: int = 0
    by_model: bool = False
    model_refused: bool = False
    refused: str = ""


def neutralize(article: Article, lexicon: Lexicon, model: Model) -> Neutral:
    title = rewrite(article.title, lexicon, model, headline=True)
    lines = article.text.split("\n")
    # The brief shows the beginning, so the model reads that even if the lexicon finds nothing.
    body = [rewrite(line, lexicon, model, lead=not at) for at, line in enumerate(lines)]
    parts = [title, *body]
    return Neutral(
        title=title.text,
        text="\n".join(one.text for one in body),
        teaser=not article.body,
        phrases=sum(one.phrases for one in parts),
        by_model=sum(one.by_model for one in parts),
        model_refused=sum(one.model_refused for one in parts),
        refused=tuple(one.refused for one in parts if one.refused),
    )


def rewrite(
    text: str, lexicon: Lexicon, model: Model, *, headline: bool = False, lead: bool = False
) -> _Paragraph:
    """One paragraph or headline."""
    spans = lexicon.spans(text, headline=headline)
    asked = bool(model) and bool(text) and (bool(spans) or headline or lead)
    offered = model.rewrite(text) if asked else None
    if offered and not audit_model(text, offered, lexicon, headline=headline):
        return _Paragraph(offered, len(spans), by_model=offered != text)
    refused = audit(text, spans, headline=headline) if spans else ""
    return _Paragraph(
        text if refused else apply(text, spans),
        len(spans),
        model_refused=bool(offered),
        refused=refused,
    )
