"""BRIEF: the neutralized stories of the last hours as Markdown and as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from penstock.workloads.pipeline.context import StageContext
from penstock.workloads.pipeline.news.access import check_path
from penstock.workloads.pipeline.news.articles import Neutralized
from penstock.workloads.pipeline.news.config import NewsConfig
from penstock.workloads.pipeline.news.edition import Missing, Section, assemble
from penstock.workloads.pipeline.news.layout import as_html, as_markdown
from penstock.workloads.pipeline.payloads import Results


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """The stage's output."""

    story_count: int
    section_count: int
    is_empty: bool
    markdown: str
    html: str
    sections: tuple[Section, ...]
    missing: tuple[Missing, ...] = ()
    files: tuple[str, ...] = ()


def brief(results: Results[Neutralized], ctx: StageContext) -> Brief:
    """Metrics: story_count, section_count (those with stories), is_empty. A brief without
    stories is a brief, and an alert."""
    config: NewsConfig = ctx.config
    stories = list(results)
    until = reference_time(config, stories, ctx.now())
    edition = assemble(stories, until, config.cutoff_hours, _missing(ctx))
    markdown, html = as_markdown(edition), as_html(edition)
    ctx.metric("story_count", edition.story_count, set=True)
    ctx.metric("section_count", len(edition.sections), set=True)
    ctx.metric("is_empty", not edition.sections, set=True)
    return Brief(
        story_count=edition.story_count,
        section_count=len(edition.sections),
        is_empty=not edition.sections,
        markdown=markdown,
        html=html,
        sections=edition.sections,
        missing=edition.missing,
        files=_write(config.out, {"brief.md": markdown, "brief.html": html}),
    )


def reference_time(config: NewsConfig, stories: Sequence[Neutralized], now: float) -> float:
    """What the hours are counted back from: now, unless the dates are fixed ones."""
    if config.reference_time is not None:
        return config.reference_time
    dated = [one.article.published for one in stories if one.article.published is not None]
    fixed = config.corpus or not config.sources
    return max(dated) if fixed and dated else now


def _missing(ctx: StageContext) -> list[Missing]:
    items = ctx.results("ingest").missing()
    return [Missing(item.key, item.error) for item in items]


def _write(folder: str, files: dict[str, str]) -> tuple[str, ...]:
    """Each is there in full or not at all."""
    if not folder:
        return ()
    home = check_path("config.out", folder)
    home.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        unfinished = home / f".{name}.{os.getpid()}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(home / name)
    return tuple(str(home / name) for name in files)
