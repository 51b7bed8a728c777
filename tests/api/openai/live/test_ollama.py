"""Ollama's API: models that are pulled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hub_server import HubServer, hub_server
from tests.support.models import gguf
from tests.support.openai.door import door

from penstock.models.store import ModelStore
from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async

PULL = "/api/pull"
MODEL = gguf(tensors=(((1024, 256), 0),))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        server.files = {"m-Q8_0.gguf": MODEL}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.mark.usefixtures("hub")
@run_async
async def test_a_model_is_pulled_into_the_store_and_its_progress_told(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models")
    async with door(tmp_path, models_dir=store.folder) as one:
        answer = await one.call("POST", PULL, {"model": "hf.co/org/repo:Q8_0"})
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert lines[0] == {"status": "pulling manifest"}
        assert lines[-1] == {"status": "success"}
        assert "kept as m-Q8_0" in lines[-2]["status"]
        assert all(line["total"] == len(MODEL) for line in lines if "total" in line)
        assert [model.name for model in store.list()] == ["m-Q8_0"]
        again = await one.call("POST", PULL, {"name": "org/repo", "stream": False})
        assert again.json == {"status": "success"}


@run_async
async def test_a_pull_that_breaks_off_says_so_and_the_next_one_resumes_it(
    tmp_path: Path, hub: HubServer
) -> None:
    hub.break_at = len(MODEL) // 2
    async with door(tmp_path, models_dir=tmp_path / "models") as one:
        answer = await one.call("POST", PULL, {"model": "org/repo"})
        assert "error" in json.loads(answer.body.splitlines()[-1])
        hub.break_at = None
        answer = await one.call("POST", PULL, {"model": "org/repo"})
        assert json.loads(answer.body.splitlines()[-1]) == {"status": "success"}
        assert hub.downloads[-1].startswith("bytes=")


@run_async
async def test_only_an_admin_pulls_and_only_from_the_hub(tmp_path: Path, hub: HubServer) -> None:
    secret = tmp_path / "secret.gguf"
    secret.write_bytes(MODEL)
    async with door(tmp_path, models_dir=tmp_path / "models") as one:
        key = await one.key("worker", KeyRole.SUBMIT)
        assert (await one.call("POST", PULL, {"model": "fake"}, token=key)).status == 200
        refused = await one.call("POST", PULL, {"model": "org/repo"}, token=key)
        assert refused.status == 403
        assert "only a key with the role admin" in refused.json["error"]
        for name in (str(secret), f"file:{secret}", "http://127.0.0.1:1/x.gguf", "llama3.2"):
            refused = await one.call("POST", PULL, {"model": name})
            assert (refused.status, "hub" in refused.json["error"]) == (400, True), name
        assert hub.asked == []
        missing = await one.call("POST", PULL, {"model": "org/nothing", "stream": False})
        assert missing.status == 404


@run_async
async def test_loaded_models_and_their_state_are_listed(tmp_path: Path) -> None:
    async with door(tmp_path) as one, one.client() as client:
        await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}]
        )
        async with asyncio.timeout(20):  # its worker reports it with its next sign of life
            while (await one.call("GET", "/v1/models")).json["data"][0]["state"] != "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        (loaded,) = (await one.call("GET", "/api/ps")).json["models"]
        assert loaded["name"] == "fake"
