"""Where the processor time of a drain goes, in the engine and in its worker process.

python benchmarks/cpu.py [drain|in-process|submit|gather] [--jobs N] [--top N] [--topic TOPIC]
"""

from __future__ import annotations

import argparse
import sys

from ours.jobs import NOOP
from run import measure, scratch
from sampling import tables
from side import PENSTOCK


def main() -> int:
    parser = argparse.ArgumentParser(description="Where the processor time of a job goes.")
    parser.add_argument(
        "work",
        nargs="?",
        choices=("drain", "in-process", "submit", "gather"),
        default="drain",
        help="a backlog drained by a worker process, or by the engine's own worker;"
        " or jobs submitted one after another inside 'with app.run()'; or jobs gathered",
    )
    parser.add_argument("--jobs", type=int, default=60_000, metavar="N")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="lines in each table")
    parser.add_argument("--topic", default=NOOP, help=f"{NOOP} by default")
    options = parser.parse_args()
    wanted = {"jobs": options.jobs}
    what = f"{options.work}_sampled"
    if options.work != "gather":
        wanted["topic"] = options.topic
    if options.work in ("drain", "in-process"):
        what, wanted["in_process"] = "drain_sampled", options.work == "in-process"
    with scratch(None) as folder:
        figures = measure(PENSTOCK, what, folder, wanted)
        print(", ".join(f"{name}: {value:,.1f}" for name, value in figures.items() if value))
        for who in ("engine", "worker"):
            if (profile := folder / f"{who}.json").exists():
                print(f"\n# {who}\n")
                print("\n\n".join(tables(profile, options.jobs, options.top)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
