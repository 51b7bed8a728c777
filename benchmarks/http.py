"""Penstock's HTTP API, side by side with what is possible at best, on one machine in one run.

`python benchmarks/http.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path


def give_way() -> None:
    """Whoever imports `http` from here wants Python's own package: let them have it."""
    from importlib import import_module

    here, found = Path(__file__).resolve().parent, sys.path
    sys.path = [path for path in found if Path(path or ".").resolve() != here]
    try:
        del sys.modules["http"]
        import_module("http")
    finally:
        sys.path = found


if __name__ == "http":
    give_way()
elif __name__ == "__main__":
    from web.command import main

    sys.exit(main())
