"""`make demo`: an engine in this process, real jobs through it, and what became of each.
With `--open` (`make demo OPEN=1`) the dashboard stays, with a link to it, until Ctrl-C.

Every scenario says how it must end. If one ends otherwise, the demo names it and exits
with 1. What happens in each is in the folder `scenarios`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from scenarios import SECTIONS, contained, gate, jobs, spoken, staged
from scenarios.scenario import Row, Scenario, Stage, play
from scenarios.table import WIDTH, draw

import penstock

PEOPLE: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "ada": (None, ("submit", "approve")),
    "bob": (None, ("approve",)),
    "olga": (None, ("submit", "operate")),
    "acme": ("acme", ("submit",)),
    "globex": ("globex", ("submit",)),
}
"""Who has a key: for which tenant (None: every one), and with which roles."""


async def main(folder: Path, console: Console, *, stays: bool = False) -> int:
    began = time.perf_counter()
    (folder / "rules.toml").write_text(gate.RULES)
    jobs.app.add(staged.pages)
    staged.add_news(jobs.app, folder)
    running = jobs.app.run(
        folder / "data",
        rules=folder / "rules.toml",
        http__listen="127.0.0.1:0",
        pools={"elsewhere": {"topics": ["job.elsewhere.*"]}},
        timeouts__lost_grace=0.5,
        containers__engine=await contained.find_engine(folder / "data"),
        models__serve=spoken.served(),
        models__context=2048,
        models__slots=2,
        spools=[str(folder / spoken.WORKSPACE)] if stays else [],
    )
    async with AsyncExitStack() as stack:
        ps = await stack.enter_async_context(running)
        people = {name: await enter(name, ps, stack) for name in PEOPLE}
        stage = Stage(ps, folder / "data", people, stack, stays)
        with console.status("running jobs"):
            played = await asyncio.gather(*(part(list_, stage) for list_ in SECTIONS.values()))
        found = await ps.api.verify()
        draw(dict(zip(SECTIONS, played, strict=True)), console)
        console.print(
            f"verify: {found.jobs} jobs, {found.transitions} log entries,"
            f" {len(found.mismatches)} records that their log does not explain"
        )
        console.print(f"all of it took {time.perf_counter() - began:.1f} s")
        rows = [row for part in played for row in part]
        problems = [f"{row.scenario.kind}: {row.problem}" for row in rows if row.problem]
        problems += [f"verify: job {wrong.job_id}: {wrong.problem}" for wrong in found.mismatches]
        code = report(problems, rows, console)
        if stays:
            await stay(stage, console)
    return code


async def stay(stage: Stage, console: Console) -> None:
    """Leave the dashboard open until Ctrl-C, with something going on in it."""
    over = asyncio.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(one, over.set)
    await stage.people["ada"].asubmit("job.ship.release", {"version": "2.1"})
    await stage.ps.asubmit("job.slow.render", {"frames": 20 * 3600})
    beat = penstock.JobRequest(job_id="", topic="job.clock.beat")
    await stage.ps.schedules.aput(
        penstock.Schedule(name="heartbeat", cron="*/10 * * * * *", request=beat)
    )
    link = await stage.ps.keys.acreate_link()
    console.print(
        "\nThe dashboard, with all of these jobs (what failed, failed on purpose), one that runs,"
        " one that awaits approval, and a schedule. Ctrl-C ends it:"
    )
    console.print(link.url, style="bold", soft_wrap=True, markup=False)
    await over.wait()


async def enter(name: str, ps: penstock.Client, stack: AsyncExitStack) -> penstock.Client:
    """Somebody with a key of their own, at the engine's HTTP API."""
    tenant, roles = PEOPLE[name]
    new = await ps.keys.acreate(name, tuple(map(penstock.KeyRole, roles)), tenant=tenant)
    return await stack.enter_async_context(penstock.connect(ps.url, token=new.token))


async def part(scenarios: Sequence[Scenario], stage: Stage) -> list[Row]:
    return await asyncio.gather(*(play(scenario, stage) for scenario in scenarios))


def report(problems: list[str], rows: list[Row], console: Console) -> int:
    for problem in problems:
        console.print(f"went wrong: {problem}", style="bold red", markup=False)
    if problems:
        return 1
    played = [row for row in rows if not row.skipped]
    skipped = len(rows) - len(played)
    rest = f" {skipped} were skipped; the table says what they lack." if skipped else ""
    console.print(f"{len(played)} kinds of jobs ended as they should.{rest}", style="bold green")
    return 0


if __name__ == "__main__":
    # What goes wrong here goes wrong on purpose: the table tells of it, not the log.
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    width = None if sys.stdout.isatty() else WIDTH
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as made:
        stays = "--open" in sys.argv[1:]
        sys.exit(asyncio.run(main(Path(made), Console(width=width), stays=stays)))
