"""The pages of the docs, as `tests/docs` reads them."""

from __future__ import annotations

from tests.docs.conftest import all_blocks, pages, root

__all__ = ["all_blocks", "pages", "root"]
