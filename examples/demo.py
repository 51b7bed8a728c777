"""`make demo`: an engine in this process, real jobs through it, and what became of each.

Every scenario says how it must end. If one ends otherwise, the demo names it and exits
with 1. What happens in each is in the folder `scenarios`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from scenarios import SCENARIOS, jobs
from scenarios.scenario import Row, Stage, play
from scenarios.table import draw

RULES = """\
default = "allow"

[[rules]]
id = "no-mail-to-everyone"
decision = "deny"
topics = ["job.mail.*"]
labels = { audience = "everyone" }
reason = "nobody may write to everyone"
"""


async def main(folder: Path, console: Console) -> int:
    began = time.perf_counter()
    (folder / "rules.toml").write_text(RULES)
    running = jobs.app.run(
        folder / "data",
        rules=folder / "rules.toml",
        pools={"elsewhere": {"topics": ["job.elsewhere.*"]}},
        lost_grace=0.5,
    )
    async with running as ps:
        stage = Stage(ps, folder / "data")
        with console.status("running jobs"):
            rows = await asyncio.gather(*(play(scenario, stage) for scenario in SCENARIOS))
        found = await ps.desk.verify()
    draw(rows, console)
    console.print(
        f"verify: {found.jobs} jobs, {found.transitions} log entries,"
        f" {len(found.mismatches)} records that their log does not explain"
    )
    console.print(f"all of it took {time.perf_counter() - began:.1f} s")
    problems = [f"{row.scenario.kind}: {row.problem}" for row in rows if row.problem]
    problems += [f"verify: job {wrong.job_id}: {wrong.problem}" for wrong in found.mismatches]
    return report(problems, rows, console)


def report(problems: list[str], rows: list[Row], console: Console) -> int:
    for problem in problems:
        console.print(f"went wrong: {problem}", style="bold red", markup=False)
    if problems:
        return 1
    played = [row for row in rows if not row.skipped]
    console.print(f"{len(played)} kinds of jobs ended as they should.", style="bold green")
    return 0


if __name__ == "__main__":
    # What goes wrong here goes wrong on purpose: the table tells of it, not the log.
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    width = None if sys.stdout.isatty() else 160
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as made:
        sys.exit(asyncio.run(main(Path(made), Console(width=width))))
