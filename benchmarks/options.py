"""What every benchmark can be asked, and where its figures go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import report


def add_options(
    parser: argparse.ArgumentParser, names: Sequence[str], default: Sequence[str] | None = None
) -> None:
    parser.add_argument(
        "--only",
        type=some_of(names),
        default=default or names,
        metavar="A,B",
        help=f"of: {', '.join(names)}",
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="medians of so many runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="renew the figures of a page")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="work in here: choose the disk to measure"
    )


def some_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads a list with commas; each must be one of the names."""

    def read(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := set(chosen) - set(names):
            raise argparse.ArgumentTypeError(f"nothing is called {', '.join(sorted(unknown))}")
        return chosen

    return read


def publish(everything: dict[str, Any], figures: str, options: argparse.Namespace) -> None:
    """Print the figures, and keep them where it was asked for."""
    print(figures)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))
    if options.write:
        options.write.write_text(report.rewritten(options.write.read_text(), figures))


def command(script: str, groups: Sequence[str], options: argparse.Namespace) -> str:
    """What makes the same figures again."""
    words = ["python", f"benchmarks/{script}"]
    words += ["--quick"] if options.quick else ["--tiny"] if options.tiny else []
    words += [] if options.only == groups else ["--only", ",".join(options.only)]
    words += ["--repeats", str(options.repeats)] if options.repeats else []
    return " ".join(words)


def verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def tell(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)
