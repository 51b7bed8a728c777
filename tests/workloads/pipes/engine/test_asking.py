"""Whole and split models are asked in the same way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.support.fake_llm import FakeRunner
from tests.support.fake_pipes import FakeHost

import penstock
from penstock.app import job_details
from penstock.app.client import Client
from penstock.app.engine import Engine
from penstock.app.portal import Portal
from penstock.cli import job_show as show
from penstock.config import load
from penstock.core.errors import NotFound
from penstock.ports.engine_api import EngineApi
from penstock.testing.aio import run_async
from penstock.workloads.llm.answers import topic_for
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.values import HopTime, model_of, topics_by_model
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.executor import PipesExecutor

CONFIG = LpConfig(model="split", source=Path("m.gguf"), node_id="a", end_model=True)


def test_a_topic_tells_its_model() -> None:
    assert model_of("job.llm.a.b") == model_of("job.chat.a.b") == "a.b"
    for other in ("job.llm.", "job.chat.*", "job.text.a", "job.chat", "job.llm.a..b"):
        assert model_of(other) == ""


def test_a_whole_model_comes_before_a_split_one_of_the_same_name() -> None:
    topics = ["job.chat.a", "job.chat.z", "job.llm.a", "job.llm.b", "job.text.x"]
    for order in (topics, topics[::-1]):
        assert topics_by_model(order) == {
            "a": "job.llm.a",
            "b": "job.llm.b",
            "z": "job.chat.z",
        }
        assert next(iter(topics_by_model(order).values())).startswith("job.llm.")


@pytest.mark.parametrize(
    ("wanted", "topic"),
    [
        ("", "job.llm.Whole"),
        ("Whole", "job.llm.Whole"),
        ("SmolLM2", "job.chat.SmolLM2"),
        ("smol", "job.chat.SmolLM2"),
        ("Both", "job.llm.Both"),
    ],
)
def test_a_model_is_meant_by_its_name_or_a_part_of_it(wanted: str, topic: str) -> None:
    served = ["job.chat.Both", "job.chat.SmolLM2", "job.llm.Whole", "job.llm.Both"]
    assert topic_for(served, wanted) == topic


def test_an_engine_with_split_models_only_is_asked_without_a_name() -> None:
    assert topic_for(["job.chat.SmolLM2", "job.text.x"]) == "job.chat.SmolLM2"
    with pytest.raises(NotFound, match="serves no language model"):
        topic_for(["job.text.x", "job.chat.*"])


@run_async
async def test_a_question_is_answered_and_its_job_shows_the_hops(tmp_path: Path) -> None:
    settings = load(flags={"data_dir": str(tmp_path), "durability": "memory"})
    executors = [LlmExecutor(FakeRunner(), ["fake"]), PipesExecutor(CONFIG, FakeHost)]
    async with Engine(settings, executors, listen=False) as engine:
        client = Client(engine.api, Portal(asyncio.get_running_loop()))
        told: list[str] = []
        answer = await penstock.aask("say it", model="split", client=client, tell=told.append)
        assert (str(answer), answer.model, "".join(told)) == ("SAY IT", "split", "SAY IT")
        assert str(await penstock.aask("say it", client=client)) == "SAY IT"
        hops = await hops_shown(engine.api, answer.job_id)
        assert hops == [
            ("hops", "layers 0-1 on a: 3 passes, computed 2.0 ms, queued 0.5 ms"),
            ("", "layers 2-3 on b: 3 passes, computed 3.0 ms, on the network 0.2 ms"),
        ]


async def hops_shown(api: EngineApi, job_id: str) -> list[tuple[str, str]]:
    job = await api.get(job_id)
    assert job.result is not None
    route = await job_details._hops(api, job, job.result.result_ptr)
    details = job_details.JobDetails(job, "", [job], [], [], {}, {}, [], "", "", hops=route)
    facts = list(show._facts(details, job.accepted_at))
    first = next(index for index, (name, _) in enumerate(facts) if name == "hops")
    return facts[first:]


@pytest.mark.parametrize(
    ("layers", "said"),
    [("0-14", "layers 0-14"), ("0-0", "layer 0"), ("7", "layer 7"), ("ends", "ends")],
)
def test_a_single_layer_is_called_one(layers: str, said: str) -> None:
    hop = HopTime(node="a", layers=layers, passes=1)
    assert show._hop(hop) == f"{said} on a: 1 pass, computed 0.0 ms"


def test_a_result_of_an_ordinary_model_has_no_hops_to_show() -> None:
    result = b'{"model": "m", "engine": "e", "choices": []}'
    assert msgspec.json.decode(result, type=job_details._ResultHops).hops == ()
