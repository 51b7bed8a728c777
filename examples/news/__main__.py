"""Run the news pipeline once, in an engine of its own.

    python -m examples.news HOME --feeds feeds.toml
    python -m examples.news HOME --sample

HOME gets the brief, the article table and the engine's data. A second run takes only what is new
or undone; a run that was cut short is finished first.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

import penstock

from .pipeline import build
from .settings import SAMPLE, SAMPLE_TIME, load


def main(words: list[str] | None = None) -> int:
    given = _parser().parse_args(words)
    try:
        settings = load(
            given.home,
            SAMPLE if given.sample else given.feeds,
            model=None if given.model is None else Path(given.model).name.removesuffix(".gguf"),
            teachers=tuple(given.teacher) or None,
            as_of=SAMPLE_TIME if given.sample and given.as_of is None else given.as_of,
        )
        config = dict(map(_pair, given.set))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    app = penstock.App()
    app.add(build(settings, app.client))
    models = tuple(dict.fromkeys(filter(None, (given.model or settings.model, *settings.teachers))))
    given.home.mkdir(parents=True, exist_ok=True)
    try:
        with app.run(given.home / "engine", models__serve=models) as engine:
            record = _run(engine, config)
    except penstock.PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print(record, given.home)
    return 0 if record.status in ("COMPLETED", "PARTIAL") else 1


def _run(engine: penstock.Client, config: dict[str, Any]) -> penstock.PipelineRecord:
    """A new run, after the one that an earlier process left unfinished."""
    while True:
        try:
            run = engine.pipelines.start("news", config)
        except penstock.PipelineBusy as busy:
            print(f"finishing run {busy.running} first")
            engine.get(busy.running).wait()
            continue
        engine.get(run.id).wait()
        record: penstock.PipelineRecord = engine.pipelines.get(run.id)
        return record


def _print(record: penstock.PipelineRecord, home: Path) -> None:
    print(f"news {record.status}")
    for stage in record.stages:
        figures = "  ".join(f"{name} {_shown(value)}" for name, value in stage.metrics.items())
        print(f"  {stage.name:<13} {stage.status:<10} {stage.reason or figures}")
        for error in stage.errors:
            print(f"  {'':<13} {error}")
    for alert in record.alerts:
        print(f"  alert {alert.code}: {alert.message}")
    print(f"brief: {home / 'brief.md'}")


def _shown(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: write NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m examples.news", description="A brief from feeds.")
    parser.add_argument("home", type=Path, help="folder of the brief, the table and the engine")
    parser.add_argument("--feeds", type=Path, help="feeds.toml; by default the one in HOME")
    parser.add_argument("--sample", action="store_true", help="read the sample feeds instead")
    parser.add_argument("--model", help="language model to classify and rewrite with")
    parser.add_argument("--teacher", action="append", default=[], help="model for evaluations")
    parser.add_argument("--as-of", type=_time, help="time of the brief, as 2026-06-04T17:00Z")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="a field of the run's config")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
