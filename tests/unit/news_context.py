"""A stage's context for tests of the news stages: it keeps what it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from penstock.workloads.pipeline.news.config import NewsConfig
from penstock.workloads.pipeline.news.identity import Seen


class NewsContext:
    def __init__(self, ingested: Iterable[Any] = (), **config: Any) -> None:
        self.config = msgspec.convert(config, NewsConfig)
        self.metrics: Counter[str] = Counter()
        self.logged: list[str] = []
        self.memory: dict[str, Any] = {}
        self._seen = Seen()
        self._ingested = list(ingested)

    def metric(self, name: str, value: int = 1) -> None:
        self.metrics[name] += value

    def log(self, text: str, level: str = "info") -> None:
        self.logged.append(text)

    def resource(self, name: str) -> Seen:
        assert name == "seen"
        return self._seen

    async def recall(self, name: str) -> Any:
        return self.memory.get(name)

    async def remember(self, name: str, value: Any) -> None:
        # As a store would: what is no JSON is noticed here.
        self.memory[name] = msgspec.json.decode(msgspec.json.encode(value))

    async def results(self, stage: str) -> AsyncIterator[Any]:
        assert stage == "ingest"
        for article in self._ingested:
            yield msgspec.to_builtins(article)
