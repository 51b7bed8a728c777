"""The news pipeline: the seed's six stages as one definition."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.job import Retry
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.news import classify as classifying
from penstock.workloads.pipeline.news import ingest as ingesting
from penstock.workloads.pipeline.news import neutralize as neutralizing
from penstock.workloads.pipeline.news.articles import Classified
from penstock.workloads.pipeline.news.brief import brief
from penstock.workloads.pipeline.news.config import NewsConfig
from penstock.workloads.pipeline.news.evaluation import evaluation
from penstock.workloads.pipeline.news.fetching import shown
from penstock.workloads.pipeline.news.identity import Seen
from penstock.workloads.pipeline.news.optimization import optimization
from penstock.workloads.pipeline.news.versions import SHELF
from penstock.workloads.pipeline.summary import (
    count_below,
    count_equals_zero,
    duration_above,
    ended,
    rate_above,
    rate_below,
)

news = Definition(
    "news",
    config=NewsConfig,
    breakers={"feeds": {"threshold": 10, "cooldown": 30}},
    resources={ingesting.SEEN: Seen, SHELF: dict},
    summary_after="brief",
    alerts=[
        count_equals_zero("ingestion_zero", "ingest.total"),
        rate_below(
            "body_download_rate_low", "ingest.body_downloaded", of="ingest.total", share=0.7
        ),
        rate_above(
            "classify_fallback_rate_high",
            "classify.keyword_fallback",
            of="classify.total",
            share=0.01,
        ),
        rate_below(
            "neutralization_rate_low", "neutralize.success", of="neutralize.total", share=0.9
        ),
        count_below("brief_story_count_low", "brief.story_count", 10),
        duration_above("pipeline_duration_high", 600),
        ended("pipeline_failed", PipelineJobStatus.FAILED),
    ],
    doc="Feeds in, a calm and sorted brief out.",
)


def sources(config: NewsConfig, ctx: Any) -> list[str]:
    # Said here, so that a run in which no source could be read has a total, of nothing.
    ctx.metric("total", 0)
    return ingesting.sources(config, ctx)


async def worth_neutralizing(config: NewsConfig, ctx: Any) -> list[Classified]:
    """What has a body of its own, the newest first."""
    found = [msgspec.convert(one, Classified) async for one in ctx.results("classify")]
    return neutralizing.candidates(found, config.neutralize_limit)


news.map(
    sources,
    key=shown,
    concurrency=5,
    retry=Retry(3, delay=0.5, max_delay=5.0),
    breaker="feeds",
)(ingesting.ingest)

news.map(classifying.candidates, key=classifying.key, concurrency=5, needs=["ingest"])(
    classifying.classify
)

news.map(
    worth_neutralizing,
    key=lambda classified: str(classified.article.hash),
    concurrency="max_workers",
    needs=["classify"],
)(neutralizing.neutralize)

news.step(of="neutralize", enabled="enable_brief", needs=["neutralize"])(brief)

news.step(of="neutralize", enabled="enable_evaluation", needs=["neutralize"])(evaluation)

news.step(of="evaluation", enabled="enable_auto_optimize", needs=["evaluation"])(optimization)
