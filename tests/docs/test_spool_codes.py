"""The page of the spool has every reason for which a spooled job can fail."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.workloads.llm.values import LlmCode
from penstock.workloads.spool.server import processor, recovery

DOCS = Path(__file__).resolve().parents[2] / "docs"


def codes_below(page: str, heading: str) -> set[str]:
    section = (DOCS / page).read_text().split(heading, 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {code for cell in cells for code in re.findall(r"`([A-Z_]+)`", cell)}


def test_the_spool_s_own_codes_are_on_its_page() -> None:
    made = {value for name, value in vars(processor).items() if name.isupper() and _is_code(value)}
    assert codes_below("reference/spool.md", "## Codes\n") == made | {recovery.LOST}


def test_the_codes_of_language_models_are_on_their_page() -> None:
    assert codes_below("how-to/language-models.md", "## Why it failed\n") == set(LlmCode)


def _is_code(value: object) -> bool:
    return isinstance(value, str) and value.isupper()
