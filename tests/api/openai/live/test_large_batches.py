"""Large files: they pass through, and are never held."""

from __future__ import annotations

import io
import json
from pathlib import Path

from tests.api.openai.live.test_killed_batches import check_answers, finished, mortal, started


def peak(pid: int) -> int:
    """Megabytes that a process has had at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


def test_an_upload_takes_no_memory_to_speak_of(tmp_path: Path) -> None:
    with mortal(tmp_path) as engine:
        client = engine.start()
        client.files.create(file=("small", b"{}"), purpose="batch")
        before = peak(engine.pid)
        large = io.BytesIO(b"x" * 150_000_000)
        file = client.files.create(file=("large", large), purpose="batch")
        assert file.bytes == 150_000_000
        assert client.files.content(file.id).content == large.getvalue()
        assert peak(engine.pid) - before < 40


def test_ten_thousand_lines_take_no_more_memory_than_those_under_way(tmp_path: Path) -> None:
    with mortal(tmp_path) as engine:
        client = engine.start(delay=0.0, batch_jobs=1000)
        first = finished(client, started(client, 2000).id)
        assert first.status == "completed"
        before = peak(engine.pid)
        batch = finished(client, started(client, 10_000).id)
        check_answers(client, batch, 10_000, of_all=False)
        assert peak(engine.pid) - before < 40
        assert len(json.dumps(batch.to_dict())) < 2000
