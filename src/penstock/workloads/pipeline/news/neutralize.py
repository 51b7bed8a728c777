"""NEUTRALIZE: phrases that push the reader are replaced or taken out, span by span.

A text model may stand in. Its text is taken only where the auditor finds every fact kept and
the lexicon finds less in it than before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.workloads.pipeline.context import StageContext
from penstock.workloads.pipeline.news.access import TextModel, load_model
from penstock.workloads.pipeline.news.articles import Article, Classified, Neutralized, Span
from penstock.workloads.pipeline.news.auditor import audit
from penstock.workloads.pipeline.news.lexicon import Lexicon
from penstock.workloads.pipeline.news.spans import apply, find_spans, name_pairs
from penstock.workloads.pipeline.news.versions import lexicon_in_use

MIN_BYTES = 500
"""A shorter body is a teaser: no candidate, unless there are only such."""
MIN_CHARS = 100
"""What must be left of a body without the space around it."""
NO_BODY = "skipped: no body"
"""What `audit` says of an article that was passed over."""


def candidates(classified: Iterable[Classified], limit: int) -> list[Classified]:
    """The newest first; undated ones last; the address' hash decides between equals. Feeds that
    have nothing but teasers are taken by those, or the brief would have nothing to tell."""
    known = list(classified)
    fit = [one for one in known if not _is_teaser(one.article)] or known
    fit.sort(key=lambda one: (-(one.article.published or 0.0), one.article.hash))
    return fit[:limit]


def _is_teaser(article: Article) -> bool:
    return len(article.body.encode()) < MIN_BYTES


def neutralize(classified: Classified, ctx: StageContext) -> Neutralized:
    """One article. Metrics: total = success + skipped_no_body + failed, and spans; `failed`
    counts those whose rewrite the auditor refused, so that the original was kept, `llm` those
    whose body is the model's, and `teasers` those of which the feed has no more."""
    ctx.metric("total")
    if _is_teaser(classified.article):
        ctx.metric("teasers")
    try:
        lexicon = lexicon_in_use(ctx)
        model = load_model(ctx.config.model) if ctx.config.model else None
        result = neutralized(classified, lexicon, model)
    except Exception:
        ctx.metric("failed")
        raise
    if result.audit == NO_BODY:
        ctx.metric("skipped_no_body")
        return result
    ctx.metric("failed" if result.audit else "success")
    if result.body != classified.article.body and not result.spans:
        ctx.metric("llm")
    ctx.metric("spans", len(result.spans) + len(result.title_spans))
    return result


def neutralized(
    classified: Classified, lexicon: Lexicon, model: TextModel | None = None
) -> Neutralized:
    """The article in plain words, by these phrases. Pure but for the model."""
    article = classified.article
    unchanged = Neutralized(
        article=article, label=classified.label, title=article.title, body=article.body
    )
    if len(article.body.strip()) < MIN_CHARS and not _is_teaser(article):
        return msgspec.structs.replace(unchanged, audit=NO_BODY)
    names = name_pairs(article.body)
    title = _rewrite(article.title, lexicon, None, headline=True, names=names)
    body = _rewrite(article.body, lexicon, model)
    return msgspec.structs.replace(
        unchanged,
        title=title.text,
        body=body.text,
        spans=body.spans,
        title_spans=title.spans,
        audit="; ".join(
            f"{where}: {part.refused}"
            for where, part in (("title", title), ("body", body))
            if part.refused
        ),
    )


class _Rewritten(msgspec.Struct, frozen=True):
    text: str
    spans: tuple[Span, ...] = ()
    refused: str = ""


def _rewrite(
    text: str,
    lexicon: Lexicon,
    model: TextModel | None,
    *,
    headline: bool = False,
    names: frozenset[str] = frozenset(),
) -> _Rewritten:
    spans = tuple(find_spans(text, lexicon, headline=headline, names=names))
    if not spans:
        return _Rewritten(text)
    if model is not None and (offered := _offered(text, spans, lexicon, model)) is not None:
        return _Rewritten(offered)
    rewritten = apply(text, spans)
    if refused := audit(text, rewritten, spans, headline=headline):
        return _Rewritten(text, refused=refused)
    return _Rewritten(rewritten, spans)


def _offered(text: str, spans: tuple[Span, ...], lexicon: Lexicon, model: TextModel) -> str | None:
    """The model's text, if it may stand. A model that fails is as good as none."""
    try:
        rewritten: Any = model.rewrite(text)
    except Exception:
        return None
    if not isinstance(rewritten, str) or audit(text, rewritten):
        return None
    return rewritten if len(find_spans(rewritten, lexicon)) < len(spans) else None
