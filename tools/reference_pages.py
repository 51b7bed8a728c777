"""The pages of the documentation that are made from the code, and are not in the repository.

`make docs` builds the whole site with them; `python -m tools.reference_pages FOLDER` writes them
as Markdown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tools import (
    cli_reference,
    container_reference,
    http_reference,
    seed_report,
    settings_reference,
)

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": cli_reference.cli_page,
    "reference/exit-codes.md": cli_reference.exits_page,
    "reference/http-api.md": http_reference.page,
    "reference/container-http.md": container_reference.page,
    "reference/settings.md": settings_reference.page,
    **{f"reference/seed-{seed}.md": partial(seed_report.page, seed) for seed in seed_report.SEEDS},
}
"""By path below docs/."""


def main(folder: str) -> None:
    for name, page in PAGES.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
