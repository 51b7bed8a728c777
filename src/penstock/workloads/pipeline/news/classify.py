"""The second stage: which section an article belongs to.

Asked in turn: the text model, if the run names one; the trained classifier; the feed's own
section; keywords. Whoever does not know, or can't be asked, passes it on.
"""

from __future__ import annotations

import heapq
import importlib.util
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.workloads.pipeline.news import training
from penstock.workloads.pipeline.news.access import load_model
from penstock.workloads.pipeline.news.articles import CATEGORIES, Article, Classified, Method
from penstock.workloads.pipeline.news.config import NewsConfig
from penstock.workloads.pipeline.news.identity import Known
from penstock.workloads.pipeline.news.keywords import by_keywords

NO_CLASSIFIER = (
    "scikit-learn is not installed, so sections go by keywords: pip install 'penstock[news]'"
)
Verdict = tuple[str, Method, float]


async def candidates(config: NewsConfig, ctx: Any) -> list[Article]:
    """The newest articles up to the limit, each once: of two the same, the one whose source
    stands first. So it is the same list on a resume, whatever was read when."""
    if importlib.util.find_spec("sklearn") is None:
        ctx.log(NO_CLASSIFIER, level="warning")
    known = Known()
    newest: list[tuple[float, int, Article]] = []
    number = 0
    async for value in ctx.results("ingest"):
        article = msgspec.convert(value, Article)
        if not known.add(article):
            continue
        number -= 1
        entry = (article.published if article.published is not None else 0.0, number, article)
        if len(newest) < config.classify_limit:
            heapq.heappush(newest, entry)
        else:
            heapq.heappushpop(newest, entry)
    return [article for _, _, article in sorted(newest, key=lambda one: one[:2], reverse=True)]


def key(article: Any) -> str:
    """An article is one item, however many sources brought it."""
    return str(article["hash"] if isinstance(article, dict) else article.hash)


def classify(article: Article, ctx: Any) -> Classified:
    """Never fails for want of an answer: the last one asked always has one."""
    label, method, confidence = _ask(article, ctx)
    ctx.metric("total")
    ctx.metric("success")
    ctx.metric(_METRICS[method])
    return Classified(article=article, label=label, method=method, confidence=round(confidence, 3))


_METRICS: dict[Method, str] = {
    "llm": "llm",
    "model": "model",
    "feed": "feed",
    "keywords": "keyword_fallback",
}


def _ask(article: Article, ctx: Any) -> Verdict:
    asked: tuple[Callable[[Article, Any], Verdict | None], ...] = (_by_llm, _by_model, _by_feed)
    for ask in asked:
        verdict = ask(article, ctx)
        if verdict is not None:
            return verdict
    label, share = by_keywords(article.title, article.body)
    return label, "keywords", share


def _by_llm(article: Article, ctx: Any) -> Verdict | None:
    config: NewsConfig = ctx.config
    if not config.model:
        return None
    model = load_model(config.model)
    try:
        label = model.classify(article.title, CATEGORIES)
    except Exception as error:
        ctx.metric("llm_failed")
        ctx.log(f"the model could not classify: {error!r}", level="warning")
        return None
    if label not in CATEGORIES:
        ctx.metric("llm_failed")
        return None
    return label, "llm", 1.0


def _by_model(article: Article, ctx: Any) -> Verdict | None:
    config: NewsConfig = ctx.config
    try:
        trained = training.classifier(
            corpus_size=config.corpus_size if config.corpus else 0, seed=config.seed
        )
    except ModuleNotFoundError:
        return None
    text = training.text_of(article.title, article.body)
    label, confidence = trained.predict([text])[0]
    return label, "model", confidence


def _by_feed(article: Article, ctx: Any) -> Verdict | None:
    # In the corpus the address is the answer that labels are measured against.
    if not article.section or ctx.config.corpus:
        return None
    return article.section, "feed", 1.0
