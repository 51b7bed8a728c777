"""The six stages: INGEST, CLASSIFY, NEUTRALIZE, BRIEF, EVALUATION, OPTIMIZATION.

Each takes its work from the article table and writes it back there. What a stage passes on is a
figure, not an article: a run that is cut short leaves nothing that the next one has to repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

import penstock
from penstock import AlertRule, Pipeline, Retry

from . import brief as briefs
from . import classify as classifying
from . import evaluation as evaluating
from . import neutralize as neutralizing
from . import optimization as optimizing
from .articles import Article, Articles
from .feeds import FULL_TEXT, BadFeed, FeedError, Fetcher, parse_feed
from .lexicon import lexicon_of
from .model import Model
from .settings import Feed, Settings

T = TypeVar("T")
PAGES_AT_ONCE = 5
SEED = 0
"""Of what is drawn by lot in an evaluation."""


class NewsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a run. It names no address, no folder and no code."""

    max_items_per_source: Annotated[int, Meta(ge=1, le=100)] = 25
    classify_limit: Annotated[int, Meta(ge=1, le=500)] = 200
    neutralize_limit: Annotated[int, Meta(ge=1, le=500)] = 25
    max_workers: Annotated[int, Meta(ge=1, le=10)] = 5
    """How many articles are neutralized at once."""
    cutoff_hours: Annotated[int, Meta(ge=1, le=72)] = 24
    """How old a story of the brief may be."""
    enable_evaluation: bool = False
    teacher_model: str | None = None
    """One of the settings' teachers; None: the first."""
    eval_sample_size: Annotated[int, Meta(ge=1, le=50)] = 10
    enable_auto_optimize: bool = False
    min_runs_before_optimize: Annotated[int, Meta(ge=1, le=50)] = 3


ALERTS = (
    AlertRule(code="ingestion_zero", metric="ingest.total", equals="0"),
    AlertRule(
        code="body_download_rate_low",
        metric="ingest.body_downloaded",
        of="ingest.success",
        below=0.7,
    ),
    AlertRule(
        code="classify_fallback_rate_high",
        metric="classify.keyword_fallback",
        of="classify.total",
        above=0.01,
    ),
    AlertRule(
        code="neutralization_rate_low",
        metric="neutralize.success",
        of="neutralize.total",
        below=0.9,
    ),
    AlertRule(code="brief_story_count_low", metric="brief.story_count", below=10),
    AlertRule(code="pipeline_duration_high", metric="duration_ms", above=600_000),
    AlertRule(code="pipeline_failed", metric="status", equals="FAILED"),
)


def build(settings: Settings, client: Callable[[], penstock.Client]) -> Pipeline:
    """The pipeline with these settings; `client` is asked for the engine that has the model."""
    feeds = {feed.name: feed for feed in settings.feeds}
    news = Pipeline(
        "news",
        config=NewsConfig,
        breakers={"feeds": {"threshold": 10, "cooldown": 30}},
        resources={
            "articles": lambda: Articles(settings.home / "articles.db"),
            "model": lambda: Model(settings.model, client),
        },
        summary_after="brief",
        alerts=ALERTS,
        doc="Feeds in, a calm and sorted brief out.",
    )

    def now(ctx: Any) -> float:
        return ctx.now() if settings.as_of is None else settings.as_of

    # -- INGEST -----------------------------------------------------------------------------

    def sources(config: NewsConfig, ctx: Any) -> list[str]:
        ctx.metric("total", 0)  # a run in which no feed could be read has a total, of nothing
        return [*feeds]

    @news.map(sources, key=str, concurrency=5, retry=Retry(3, delay=0.5), breaker="feeds")
    async def ingest(source: str, ctx: Any) -> int:
        """Store what is new in a feed, take up to max_items_per_source, download their pages."""
        feed, table = feeds[source], _table(ctx)
        async with Fetcher(feed, allow_private=settings.allow_private) as fetcher:
            try:
                await read_feed(feed, fetcher, table, ctx)
            finally:  # what waits of a feed that is gone gets its turn, too
                limit = ctx.config.max_items_per_source
                await asyncio.to_thread(table.take, source, ctx.job_id, limit, now(ctx))
            await _read_pages(await asyncio.to_thread(table.without_page, source), fetcher, table)
        figures = await asyncio.to_thread(table.ingested, source, ctx.job_id)
        for name, value in figures.items():
            ctx.metric(name, value)
        return figures["success"]

    async def read_feed(feed: Feed, fetcher: Fetcher, table: Articles, ctx: Any) -> None:
        answer = await fetcher.feed(*await asyncio.to_thread(table.validators, feed.name))
        if answer.unchanged:
            ctx.metric("not_modified")
            await asyncio.to_thread(table.unchanged, feed.name, now(ctx))
            return
        found = await asyncio.to_thread(parse_feed, answer.data, feed.name, answer.charset)
        if found.malformed:
            ctx.metric("malformed")
            ctx.log(f"{feed.name} is malformed: {found.malformed}", level="warning")
        await asyncio.to_thread(
            table.store, feed, found.entries, answer.etag, answer.modified, now(ctx)
        )

    # -- CLASSIFY ---------------------------------------------------------------------------

    def unclassified(config: NewsConfig, ctx: Any) -> list[str]:
        return _listed(_table(ctx).unclassified(config.classify_limit), ctx)

    @news.map(unclassified, key=str, concurrency=5)
    def classify(id: str, ctx: Any) -> str:
        """The section of one article."""
        table, model = _table(ctx), ctx.resource("model")
        ctx.metric("total")
        one = table.get(id)
        label, method = one.label, one.method
        if label is None:  # else a run that crashed did it, and could not say so
            label, method = _tried(ctx, one, lambda one: classifying.classify(one, model))
            table.classified(id, label, method)
        ctx.metric("success")
        ctx.metric("keyword_fallback" if method == "keywords" else str(method))
        return label

    # -- NEUTRALIZE -------------------------------------------------------------------------

    def unneutralized(config: NewsConfig, ctx: Any) -> list[str]:
        return _listed(_table(ctx).unneutralized(config.neutralize_limit), ctx)

    @news.map(unneutralized, key=str, concurrency="max_workers")
    def neutralize(id: str, ctx: Any) -> int:
        """One article in plain words; of one without a body the title and the teaser."""
        table, model = _table(ctx), ctx.resource("model")
        lexicon = lexicon_of(optimizing.load(table).current.choice)
        ctx.metric("total")
        one = table.get(id)
        if one.neutral is None:
            done = _tried(ctx, one, lambda one: neutralizing.neutralize(one, lexicon, model))
            table.neutralized(id, msgspec.json.encode(done).decode())
        else:
            done = msgspec.json.decode(one.neutral, type=neutralizing.Neutral)
        ctx.metric("skipped_no_body" if done.teaser else "success")
        ctx.metric("phrases", done.phrases)
        ctx.metric("llm", done.by_model)
        ctx.metric("llm_refused", done.model_refused)
        return done.phrases

    # -- BRIEF ------------------------------------------------------------------------------

    @news.step()
    def brief(results: Any, ctx: Any) -> dict[str, int]:
        """brief.md and brief.html in the home folder. One without stories says why, as an error."""
        table, hours = _table(ctx), ctx.config.cutoff_hours
        missing = {item.key: item.error for item in ctx.results("ingest").missing()}
        counts = table.counts()
        edition = briefs.assemble(
            table.fresh(now(ctx), hours, ctx.job_id),
            classifying.sections(),
            now(ctx),
            hours,
            missing,
            counts["waiting"] + counts["undone"],
        )
        stories = edition.stories
        ctx.metric("story_count", len(stories), set=True)
        ctx.metric("section_count", len(edition.sections), set=True)
        ctx.metric("is_empty", not stories, set=True)
        if not stories:
            why = f"no story: {counts['articles']} articles are known, {counts['finished']} are" \
                  f" finished, and none of those is from the last {hours} hours"  # fmt: skip
            if not len(ctx.results("ingest")):
                raise ValueError(f"{why}; no feed could be read")
            ctx.error(why)
        briefs.write(edition, settings.home)
        table.briefed([story.id for story in stories], ctx.job_id, now(ctx))
        return {"stories": len(stories)}

    # -- EVALUATION -------------------------------------------------------------------------

    def full_articles(table: Articles) -> list[Article]:
        return [one for one in table.finished() if one.body][:200]

    @news.step(enabled="enable_evaluation")
    def evaluation(results: Any, ctx: Any) -> dict[str, Any]:
        """How good the rules are, on held-out phrases in held-out articles."""
        table, config = _table(ctx), ctx.config
        pool = full_articles(table)
        for half in ("dev", "held_out"):
            if sum(evaluating.half_of(one) == half for one in pool) < evaluating.MIN_ARTICLES:
                raise ValueError(f"too few articles with a body to evaluate: {len(pool)}")
        history = optimizing.load(table)
        lexicon = lexicon_of(history.current.choice)
        chosen = [
            one
            for half in ("dev", "held_out")
            for one in evaluating.sample(
                [one for one in pool if evaluating.half_of(one) == half],
                max(1, config.eval_sample_size // 2),
                SEED,
            )
        ]
        dev = evaluating.score(evaluating.cases(chosen, "dev", SEED), lexicon)
        held = evaluating.score(evaluating.cases(chosen, "held_out", SEED), lexicon)
        accuracy = evaluating.accuracy_of(chosen, _teacher(config.teacher_model))
        result = optimizing.Evaluation(
            job_id=ctx.job_id,
            version=history.current.id,
            accuracy=accuracy,
            neutralization=held.neutralization,
            precision=held.precision,
            recall=held.recall,
            overall=held.overall(accuracy),
            missed=dev.missed,
            false_hits=dev.false_hits,
        )
        optimizing.save(table, history.evaluated(result))
        figures = {
            "classification_accuracy": accuracy,
            "avg_neutralization_score": held.neutralization,
            "avg_span_precision": held.precision,
            "avg_span_recall": held.recall,
            "overall_quality_score": result.overall,
            "dev_span_recall": dev.recall,
            "model_span_recall": evaluating.model_recall(ctx.resource("model"), lexicon),
            "estimated_cost_usd": 0.0,
            "sample_size": len(chosen),
            "planted": held.planted,
        }
        for name, value in figures.items():
            if value is not None:
                ctx.metric(name, round(value, 4), set=True)
        return figures

    def _teacher(name: str | None) -> Model:
        if name is not None and name not in settings.teachers:
            there = ", ".join(settings.teachers) or "none"
            raise ValueError(f"teacher_model is {name!r}; the settings allow: {there}")
        return Model(name or next(iter(settings.teachers), ""), client)

    # -- OPTIMIZATION -----------------------------------------------------------------------

    @news.step(of="evaluation", enabled="enable_auto_optimize")
    def optimization(results: Any, ctx: Any) -> dict[str, Any]:
        """Better switches for the next run, or those of before."""
        table, config = _table(ctx), ctx.config
        done = optimizing.optimize(
            table, full_articles(table), ctx.job_id, config.min_runs_before_optimize
        )
        for trial in done.trials:
            ctx.log(trial)
        ctx.metric("rollback_triggered", done.action == "rollback", set=True)
        ctx.metric("prompts_updated", int(done.action == "optimized"), set=True)
        ctx.metric("reason", done.reason, set=True)
        return {"action": done.action, "reason": done.reason, "trials": done.trials}

    return news


async def _read_pages(articles: list[Article], fetcher: Fetcher, table: Articles) -> None:
    """Each page is stored as soon as it is read. One that can't be read is tried in later runs."""
    room = asyncio.Semaphore(PAGES_AT_ONCE)

    async def read(one: Article) -> None:
        async with room:
            try:
                body = await fetcher.page(one.url)
            except FeedError:
                await asyncio.to_thread(table.page_failed, one.id, final=False)
            except BadFeed:
                await asyncio.to_thread(table.page_failed, one.id, final=True)
            else:
                body = body.removeprefix(one.title).lstrip()
                if len(body) >= FULL_TEXT:
                    await asyncio.to_thread(table.page_read, one.id, body)
                else:
                    await asyncio.to_thread(table.page_failed, one.id, final=True)

    await asyncio.gather(*map(read, articles))


def _table(ctx: Any) -> Articles:
    found: Articles = ctx.resource("articles")
    return found


def _listed(ids: list[str], ctx: Any) -> list[str]:
    """The articles of a stage; a stage that has none because no feed could be read has failed."""
    if not ids and not len(ctx.results("ingest")):
        raise ValueError("no feed could be read, and no article waits from an earlier run")
    return ids


def _tried(ctx: Any, article: Article, work: Callable[[Article], T]) -> T:
    """The result of an article's work; a failure is noted, so that others get their turn first."""
    try:
        return work(article)
    except Exception:
        ctx.metric("failed")
        _table(ctx).failed(article.id)
        raise
