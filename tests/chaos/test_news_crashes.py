"""examples/news is killed between stages and within them, and run again."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from examples.news.articles import Articles
from tests.support.news.newsroom import brief, run, sample

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The brief of a run that nothing happened to."""
    home = tmp_path_factory.mktemp("whole")
    run(sample(home))
    return brief(home)


def process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.support.news.newsroom", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )


@pytest.mark.parametrize(
    ("method", "calls"),
    [
        ("store", 2),
        ("take", 2),
        ("classified", 4),
        ("classified", 12),
        ("neutralized", 3),
        ("neutralized", 12),
        ("briefed", 1),
    ],
)
def test_a_crash_loses_nothing_and_repeats_nothing(
    method: str, calls: int, whole: str, tmp_path: Path
) -> None:
    assert process(str(tmp_path), method, str(calls)).returncode == -9
    again = process(str(tmp_path), "nothing", "0")
    assert again.returncode == 0, again.stderr
    assert "finishing run" in again.stdout
    assert "news PARTIAL" in again.stdout
    written = Counter((tmp_path / "log").read_text().splitlines())
    work = ("classified", "neutralized")
    assert {times for line, times in written.items() if line.startswith(work)} == {1}
    table = Articles(tmp_path / "articles.db")
    assert table.counts() == {"articles": 12, "finished": 12, "waiting": 0, "undone": 0}
    table.close()
    assert brief(tmp_path) == whole
