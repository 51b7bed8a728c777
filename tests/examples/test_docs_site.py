"""The documentation site builds, can be searched, and loads nothing from other servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LOADED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?https?:|<link\b[^>]*\bhref=[\"']?https?:"
)


@pytest.mark.timeout(400)
def test_the_site_builds_and_needs_no_other_server(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mermaidx")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    pages = [path for path in tmp_path.rglob("*.html") if path.name != "404.html"]
    made = {path.parent.relative_to(tmp_path).as_posix() for path in pages}
    assert {"reference/cli", "reference/seed-001", "decisions/0001-record-decisions"} <= made
    assert [path for path in pages if _LOADED.search(path.read_text("utf-8"))] == []
    found = json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))
    assert any("Idempotency" in one["title"] for one in found["docs"])
