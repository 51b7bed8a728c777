"""How many at once, how fast, how many may wait; and jobs of which there is one."""

import asyncio
import time

import penstock

app = penstock.App()
running = 0
most = 0


@app.job("job.api.ask")
async def ask(user: str) -> str:
    """Tells how many of its kind it met."""
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.1)
    running -= 1
    return user


@app.job("job.api.sync")
async def sync() -> None:
    await asyncio.sleep(0.3)


def main() -> None:
    with app.run() as ps:
        # Two at once, over all callers.
        ps.limits.put(penstock.Limit(name="gentle", topics=("job.api.ask",), concurrency=2))
        for job in ask.submit_many([("ada",)] * 8):
            job.result()
        print("8 jobs,", most, "at once")

        # Three in half a second, for each value of the label `user`.
        ps.limits.put(
            penstock.Limit(
                name="gentle",
                topics=("job.api.ask",),
                key=("label:user",),
                rate=penstock.Rate(3, 0.5),
                max_waiting=5,
            )
        )
        start = time.monotonic()
        for job in ask.options(labels={"user": "ada"}).submit_many([("ada",)] * 4):
            job.result()
        print("4 jobs at 3 in half a second took at least 0.5 s:", time.monotonic() - start > 0.5)

        # Five may wait for one user; the rest is refused, with a hint when to come back.
        try:
            ask.options(labels={"user": "bob"}).submit_many([("bob",)] * 9)
        except penstock.TooMany as error:
            print("refused:", error)

        # One of a kind: while it waits or runs, the same key is answered with that job.
        first = sync.options(unique="sync").submit()
        second = sync.options(unique="sync").submit()
        print("unique:", first.job_id == second.job_id)
        first.result()
        ps.limits.delete("gentle")


if __name__ == "__main__":
    main()
