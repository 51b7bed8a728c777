"""`penstock batch`: a file of requests, answered by a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli.commands import Penstock

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[Penstock]:
    """An engine that serves the model."""
    shared = Penstock(tmp_path_factory.mktemp("batch"))
    shared.env["PENSTOCK_MODELS__THREADS"] = "1"
    with shared.up("--no-http", "--model", str(model_file)):
        yield shared


def _line(number: int, **body: Any) -> str:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": {**asked, **body}}
    return json.dumps({"custom_id": f"line-{number}", **line})


@pytest.mark.timeout(180)  # five processes, one after the other
def test_a_batch_is_submitted_shown_listed_and_read(served: Penstock) -> None:
    file = served.folder / "questions.jsonl"
    file.write_text("\n".join(_line(n) for n in range(3)))
    made = served.json("batch", "submit", str(file), "--wait")
    assert made["status"] == "completed"
    shown = served.json("batch", "show", made["id"])
    assert shown["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert made["id"] in served("batch", "list").stdout
    told = [line.split() for line in served("batch", "show", made["id"]).stdout.splitlines()]
    assert ["done", "3"] in told
    assert ["failed", "0"] in told
    lines = [json.loads(line) for line in served("batch", "result", made["id"]).stdout.splitlines()]
    assert [line["custom_id"] for line in lines] == ["line-0", "line-1", "line-2"]


def test_a_wrong_line_fails_the_batch_and_is_named(served: Penstock) -> None:
    file = served.folder / "wrong.jsonl"
    file.write_text("\n".join([_line(0), _line(1, temperature=9)]))
    done = served("batch", "submit", str(file), "--wait", code=1)
    assert "line 2: " in done.stderr
    assert "temperature" in done.stderr


def test_a_batch_is_cancelled(served: Penstock) -> None:
    file = served.folder / "long.jsonl"
    body = {"max_tokens": 4000, "ignore_eos": True}
    file.write_text("\n".join(_line(n, **body) for n in range(40)))
    made = served.json("batch", "submit", str(file))
    cancelled = served.json("batch", "cancel", made["id"])
    assert cancelled["status"] in ("cancelling", "cancelled")


@pytest.mark.parametrize("line", [b'{"url": "\xff"}', b"[" * 100_000, b"", b"[1]"])
def test_a_first_line_that_is_no_request_is_told(tmp_path: Path, line: bytes) -> None:
    penstock = Penstock(tmp_path)
    file = tmp_path / "questions.jsonl"
    file.write_bytes(line)
    done = penstock("batch", "submit", str(file), code=2)
    assert "its first line is not a request" in done.stderr
