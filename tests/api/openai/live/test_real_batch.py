"""A batch, a real model, and OpenAI's client: what a line is answered is what a call is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.api.openai.live.test_batches import CHAT, ended, lines_of, started
from tests.support.openai.door import door

from penstock.app.llm import make_executor
from penstock.testing.aio import run_async
from penstock.workloads.llm.config import ModelConfig

GREEDY: dict[str, Any] = {"temperature": 0, "seed": 1, "max_tokens": 8}


@run_async
async def test_twenty_prompts_are_answered_by_a_model_as_they_would_be_one_by_one(
    tmp_path: Path, model_file: Path
) -> None:
    config = ModelConfig(models=(str(model_file),), slots=4, context=1024, threads=2)
    executor = make_executor(None, {"models": config})
    async with door(tmp_path, executors=[executor]) as home, home.client() as client:
        [model] = [one.id async for one in client.models.list()]
        asked: list[dict[str, Any]] = [
            {"model": model, "messages": [{"role": "user", "content": f"What is {n} + {n}?"}]}
            for n in range(20)
        ]
        lines = [
            {"custom_id": f"sum-{n}", "method": "POST", "url": CHAT, "body": {**body, **GREEDY}}
            for n, body in enumerate(asked)
        ]
        batch = await ended(client, await started(client, *lines))
        assert batch.status == "completed"
        output = await lines_of(client, batch.output_file_id)
        assert [line["custom_id"] for line in output] == [f"sum-{n}" for n in range(20)]
        for line in output:
            body = line["response"]["body"]
            assert body["choices"][0]["message"]["content"]
            assert 1 <= body["usage"]["completion_tokens"] <= 8
        for n in (0, 7, 19):
            alone = await client.chat.completions.create(**asked[n], **GREEDY)
            told = output[n]["response"]["body"]["choices"][0]
            assert told["message"]["content"] == alone.choices[0].message.content
            assert told["finish_reason"] == alone.choices[0].finish_reason
