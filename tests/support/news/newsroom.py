"""Feeds, runs and crashes for tests of examples/news."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.news.__main__ import main
from examples.news.articles import Articles
from examples.news.pipeline import build
from examples.news.settings import SAMPLE, SAMPLE_TIME, Feed, Settings, load

import penstock

NOW = 1_780_592_400.0
"""4 June 2026, 17:00 UTC."""
SENTENCES = (
    "The council of Elvery met on Thursday to speak about the harbour wall and its costs.",
    "The work is to begin in May and takes 14 weeks, the engineer Tobias Wren said.",
    "Boats use the northern quay until then, and the ferry keeps its timetable.",
    "The budget was agreed with 9 votes to 4 after a debate of three hours.",
    "A report on the state of the wall is open to everybody in the town hall.",
    "The next meeting is in June, when the offers of four companies are compared.",
    "Residents of the old harbour asked for a footbridge over the building site.",
)
BODY = " ".join(SENTENCES)


def item(number: int, text: str = BODY, hour: int = 12, link: str = "", title: str = "") -> str:
    link = link or f"https://paper.example/world/{number}"
    title = title or f"Council of Elvery decides on plan number {number}"
    return (
        f"<item><title>{title}</title><link>{link}</link>"
        f"<pubDate>Thu, 04 Jun 2026 {hour:02}:{number % 60:02}:00 GMT</pubDate>"
        f"<description>{text}</description></item>"
    )


def rss(*items: str) -> str:
    return f"<rss version='2.0'><channel><title>Paper</title>{''.join(items)}</channel></rss>"


def settings(home: Path, *feeds: Feed, **given: Any) -> Settings:
    return Settings(home=home, feeds=feeds, **{"as_of": NOW, **given})


def sample(home: Path) -> Settings:
    return load(home, SAMPLE, as_of=SAMPLE_TIME)


def run(
    chosen: Settings, config: Mapping[str, Any] | None = None, times: int = 1
) -> penstock.PipelineRecord:
    """The record of a run, or of the last of several, in an engine that lives as long."""
    app = penstock.App()
    app.add(build(chosen, app.client))
    with app.run(chosen.home / "engine") as engine:
        for _ in range(times):
            started = engine.pipelines.start("news", dict(config or {}))
            engine.get(started.id).wait(timeout=40)
        record: penstock.PipelineRecord = engine.pipelines.get(started.id)
        return record


def metrics(record: penstock.PipelineRecord, stage: str) -> dict[str, Any]:
    found = record.stage(stage)
    assert found is not None
    return dict(found.metrics)


def statuses(record: penstock.PipelineRecord) -> dict[str, tuple[str, str]]:
    return {stage.name: (str(stage.status), stage.reason) for stage in record.stages}


def codes(record: penstock.PipelineRecord) -> set[str]:
    return {alert.code for alert in record.alerts}


def brief(home: Path) -> str:
    return (home / "brief.md").read_text("utf-8")


def crash_after(method: str, calls: int, log: Path) -> None:
    """Let this process be killed when the article table has done this so many times; what was
    written for which article is logged, by this process and the next."""

    def watched(name: str) -> None:
        wrapped, done = getattr(Articles, name), [0]

        def watch(self: Articles, *args: Any, **kwargs: Any) -> Any:
            result = wrapped(self, *args, **kwargs)
            with log.open("a") as file:
                file.write(f"{name} {args[0] if isinstance(args[0], str) else ''}\n")
            done[0] += 1
            if name == method and done[0] == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(Articles, name, watch)

    for name in ("store", "take", "classified", "neutralized", "briefed"):
        watched(name)


if __name__ == "__main__":
    home, method, calls = sys.argv[1:]
    crash_after(method, int(calls), Path(home) / "log")
    sys.exit(main([home, "--sample"]))
