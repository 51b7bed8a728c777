"""A batch whose engine is killed, at any point, is taken up by the next one: no line is lost or
told twice, and nothing that has an answer is computed again."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from openai import APIConnectionError, OpenAI
from openai.types import Batch
from tests.support.waiting import eventually

from penstock.adapters.sqlite.store import SqliteBackend
from penstock.control.ledger import Ledger
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import JobQuery

CHAT: Final = "/v1/chat/completions"
SCRIPT = Path(__file__).parents[3] / "support" / "openai" / "mortal_engine.py"
ENDED = ("completed", "failed", "cancelled", "expired")


class Mortal:
    """Engines on one data directory, one after another."""

    def __init__(self, folder: Path) -> None:
        self.data, self.marks = folder / "data", folder / "marks"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, delay: float = 0.001, strike: str = "", batch_jobs: int = 10_000) -> OpenAI:
        (self.data / "url").unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.data), str(self.marks), str(delay)],
                env={
                    **os.environ,
                    "PENSTOCK_FAILPOINT": strike,
                    "PENSTOCK_OPENAI__MAX_BATCH_JOBS": str(batch_jobs),
                },
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        eventually(lambda: (self.data / "url").exists() or process.poll() is not None)
        assert process.poll() is None, self._log.read_text()
        url, token = (self.data / "url").read_text(), (self.data / "token").read_text()
        return OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def died(self) -> bool:
        return self._process is not None and self._process.poll() == -9

    def begun(self) -> list[str]:
        """The prompts that the model was given, in order."""
        return self.marks.read_text().splitlines() if self.marks.exists() else []

    def answered(self) -> set[str]:
        """The prompts of the lines that have an answer for good."""
        query = JobQuery(states=(JobState.SUCCEEDED,), limit=100_000)

        async def find() -> list[Job]:
            reader = Ledger(SqliteBackend(self.data / "penstock.db"), own=False)
            try:
                return await reader.find(query)
            finally:
                await reader.close()

        jobs = [job for job in asyncio.run(find()) if job.request.child_of is not None]
        return {f"say {(job.request.step_index or 0) - 1}" for job in jobs}


@contextmanager
def mortal(folder: Path) -> Iterator[Mortal]:
    engine = Mortal(folder)
    try:
        yield engine
    finally:
        engine.kill()


def started(client: OpenAI, count: int) -> Batch:
    lines = (
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "fake", "messages": [{"role": "user", "content": f"say {n}"}]},
        }
        for n in range(count)
    )
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = client.files.create(file=("p.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def has_come(client: OpenAI, batch_id: str, far: int) -> bool:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts is not None and counts.completed >= far


def finished(client: OpenAI, batch_id: str) -> Batch:
    eventually(lambda: client.batches.retrieve(batch_id).status in ENDED)
    return client.batches.retrieve(batch_id)


def check_answers(client: OpenAI, batch: Batch, count: int, *, of_all: bool = True) -> None:
    """`of_all`: it is the only one that this engine ever had."""
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.completed == batch.request_counts.total == count
    assert batch.output_file_id is not None
    assert batch.error_file_id is None
    content = client.files.content(batch.output_file_id).content
    output: list[Any] = [json.loads(line) for line in content.splitlines()]
    assert [line["custom_id"] for line in output] == [f"c{n}" for n in range(count)]
    said = [line["response"]["body"]["choices"][0]["message"]["content"] for line in output]
    assert said == [f"SAY {n}" for n in range(count)]
    outputs = [file for file in client.files.list() if file.purpose == "batch_output"]
    assert not of_all or [file.id for file in outputs] == [batch.output_file_id]


def test_a_batch_of_2000_lines_is_finished_over_two_kills(tmp_path: Path) -> None:
    with mortal(tmp_path) as engine:
        client = engine.start()
        batch = started(client, 2000)
        for far in (300, 1100):
            eventually(partial(has_come, client, batch.id, far))
            engine.kill()
            before, answered = len(engine.begun()), engine.answered()
            assert far <= len(answered) < 2000, "it was killed in the middle"
            client = engine.start()
            eventually(partial(has_come, client, batch.id, len(answered) + 1))
            assert answered.isdisjoint(engine.begun()[before:])
        check_answers(client, finished(client, batch.id), 2000)
        assert answered.isdisjoint(engine.begun()[before:])
        assert set(engine.begun()) == {f"say {n}" for n in range(2000)}


COMMITS = {"before": (2, 4, 6, 8, 10, 14), "after": (2, 3, 4, 5, 7, 9, 12, 20)}
"""The file, the batch, its start, each of its records and each chunk of lines are commits."""
STRIKES = [f"{when}-commit:{n}" for when, numbers in COMMITS.items() for n in numbers]


@pytest.mark.parametrize("strike", STRIKES)
def test_killed_at_any_step_a_batch_is_told_whole_by_the_next_engine(
    tmp_path: Path, strike: str
) -> None:
    with mortal(tmp_path) as engine:
        client = engine.start(strike=strike)
        created: list[str] = []
        with suppress(APIConnectionError):
            created.append(started(client, 300).id)
        eventually(engine.died)
        before, answered = len(engine.begun()), engine.answered()
        client = engine.start()
        found = [batch.id for batch in client.batches.list()]
        if not created and not found:
            found = [started(client, 300).id]  # it was never answered, and is not there
        assert len(found) == 1
        assert created in ([], found)
        check_answers(client, finished(client, found[0]), 300)
        assert answered.isdisjoint(engine.begun()[before:])
        assert set(engine.begun()) == {f"say {n}" for n in range(300)}
