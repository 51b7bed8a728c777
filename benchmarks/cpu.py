"""Where the processor time of a drain goes, in the engine and in its worker process.

python benchmarks/cpu.py [drain|in-process|submit] [--jobs N] [--top N] [--topic TOPIC]
"""

from __future__ import annotations

import argparse
import sys

from harness import call, scratch
from ours.jobs import NOOP
from sampling import tables

WORK = {
    "drain": ("ours.speed:drain", {"workers": 1, "profile": True}),
    "in-process": ("ours.speed:drain_in_process", {"profile": True}),
    "submit": ("ours.blocking:submit_sampled", {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Where the processor time of a job goes.")
    parser.add_argument(
        "work",
        nargs="?",
        choices=WORK,
        default="drain",
        help="a backlog drained by a worker process, or by the engine's own worker;"
        " or jobs submitted one after another inside 'with app.run()'",
    )
    parser.add_argument("--jobs", type=int, default=60_000, metavar="N")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="lines in each table")
    parser.add_argument("--topic", default=NOOP, help=f"{NOOP} by default")
    options = parser.parse_args()
    function, more = WORK[options.work]
    with scratch(None) as folder:
        figures = call(function, folder / "data", jobs=options.jobs, topic=options.topic, **more)
        print(", ".join(f"{name}: {value:,.1f}" for name, value in figures.items() if value))
        for who in ("engine", "worker"):
            if (profile := folder / f"{who}.json").exists():
                print(f"\n# {who}\n")
                print("\n\n".join(tables(profile, options.jobs, options.top)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
