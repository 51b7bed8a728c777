"""Which models are served is asked seldom, and told truly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from penstock.api.openai.models import Served
from penstock.ports.engine_api import EngineApi
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock


class Topics:
    def __init__(self, *topics: str) -> None:
        self.topics_now, self.asked = list(topics), 0

    async def topics(self) -> list[str]:
        self.asked += 1
        return self.topics_now

    async def status(self) -> Any:
        return SimpleNamespace(paused_topics={}, models={})


@run_async
async def test_models_are_looked_up_once_a_second_and_new_ones_are_found_at_once() -> None:
    clock, topics = VirtualClock(), Topics("job.llm.a", "job.text.x", "job.llm.*", "job.llm.b.c")
    api, served = cast("EngineApi", topics), Served(clock)
    for _ in range(100):
        found = await served.find(api, "a")
        assert found is not None
        assert found.topic == "job.llm.a"
    assert topics.asked == 1
    topics.topics_now = ["job.llm.new"]
    assert await served.find(api, "new") is not None
    assert await served.find(api, "a") is None
    assert await served.find(api, "*") is None


@run_async
async def test_a_model_that_is_gone_is_missed_within_a_second() -> None:
    clock, topics = VirtualClock(), Topics("job.llm.a", "job.llm.b.c")
    api, served = cast("EngineApi", topics), Served(clock)
    assert [one.name for one in await served.list(api)] == ["a", "b.c"]
    first = await served.find(api, "a")
    topics.topics_now = []
    assert await served.find(api, "a") == first
    clock.advance(1.0)
    assert await served.find(api, "a") is None


@run_async
async def test_a_model_that_is_split_over_nodes_is_served_like_a_whole_one() -> None:
    clock, topics = VirtualClock(), Topics("job.chat.a", "job.chat.*")
    api, served = cast("EngineApi", topics), Served(clock)
    first = await served.find(api, "a")
    assert first is not None
    assert first.topic == "job.chat.a"
    clock.advance(5.0)
    topics.topics_now = ["job.chat.a", "job.chat.b", "job.llm.a"]
    both = await served.list(api)
    assert [(one.name, one.topic) for one in both] == [("a", "job.llm.a"), ("b", "job.chat.b")]
    assert both[0].since == first.since
