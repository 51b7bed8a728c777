"""Articles and a context for tests of the news pipeline's stages, without a run around them."""

from __future__ import annotations

from typing import Any

from penstock.workloads.pipeline.news.articles import Article, Classified
from penstock.workloads.pipeline.news.config import NewsConfig

FILLER = (
    "The committee met in the town hall and heard from residents about the bus timetable. "
    "Officials said that a decision would be published before the summer, and that the costs "
    "had been checked by the auditors. A second meeting is planned for the autumn. "
)


def article(
    n: int = 1,
    *,
    title: str = "Council to decide on buses",
    body: str = FILLER * 3,
    source: str = "The Wire",
    kind: Any = "other",
    published: float | None = 1_000_000.0,
    section: str = "",
) -> Article:
    return Article(
        url=f"https://news.example/{n}",
        title=title,
        body=body,
        source=source,
        source_kind=kind,
        published=published,
        section=section,
        hash=f"{n:04}",
    )


def classified(n: int = 1, label: str = "politics", method: Any = "keywords", **given: Any):
    return Classified(article=article(n, **given), label=label, method=method, confidence=0.5)


class FakeContext:
    """What a plain stage function sees, kept in memory."""

    def __init__(self, memory: dict[str, Any] | None = None, now: float = 1_000_000.0, **config):
        self.config = NewsConfig(**config)
        self.memory = {} if memory is None else memory
        self.metrics: dict[str, Any] = {}
        self.errors: list[str] = []
        self.outputs: dict[str, Any] = {}
        self.job_id = "job-1"
        self._now = now
        self._resources: dict[str, Any] = {}

    def metric(self, name: str, value: Any = 1, *, set: bool = False) -> None:
        self.metrics[name] = value if set else self.metrics.get(name, 0) + value

    def resource(self, name: str) -> Any:
        return self._resources.setdefault(name, {})

    def recall(self, name: str) -> Any:
        return self.memory.get(name)

    def remember(self, name: str, value: Any) -> None:
        self.memory[name] = value

    def results(self, stage: str) -> Any:
        return self.outputs.get(stage, FakeResults([]))

    def error(self, text: str) -> None:
        self.errors.append(text)

    def log(self, text: str, level: str = "info") -> None: ...

    def progress(self, fraction: float | None = None, message: str = "") -> None: ...

    def check(self) -> None: ...

    def now(self) -> float:
        return self._now


class FakeResults:
    def __init__(self, outputs: list[Any], items: list[Any] | None = None) -> None:
        self.outputs, self._items = outputs, items or []

    def __iter__(self) -> Any:
        return iter(self.outputs)

    def list(self) -> list[Any]:
        return list(self.outputs)

    def missing(self) -> Any:
        return iter(self._items)
