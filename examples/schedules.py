"""Jobs that come again and again, by the clock of a place."""

import time
from datetime import datetime
from zoneinfo import ZoneInfo

import penstock

BERLIN = "Europe/Berlin"

app = penstock.App()


@app.job("job.report.make")
async def report() -> str:
    job = penstock.current().request
    return f"a report for {job.labels['city']}, made by {job.schedule}"


def main() -> None:
    request = penstock.JobRequest(job_id="", topic="job.report.make", labels={"city": "Berlin"})
    with app.run() as ps:
        # Every working day at half past seven in Berlin, summer and winter, and not while
        # the one before still runs.
        view = ps.schedules.put(
            penstock.Schedule(
                name="morning",
                cron="30 7 * * mon-fri",
                timezone=BERLIN,
                overlap=False,
                request=request,
            )
        )
        print("fires next", datetime.fromtimestamp(view.next_at, ZoneInfo(BERLIN)))
        print("now, for once:", ps.get(ps.schedules.fire("morning").job_id).result())

        # A sixth field, in front, is the second.
        ps.schedules.put(penstock.Schedule(name="tick", cron="* * * * * *", request=request))
        while ps.schedules.get("tick").fired < 2:
            time.sleep(0.05)
        ps.schedules.pause("tick")
        jobs = ps.jobs(schedule="tick")
        print("by itself:", jobs[0].result())
        times = {job.record.request.idempotency_key for job in jobs}
        print("each for a time of its own:", len(times) == len(jobs))

        for name in ("morning", "tick"):
            ps.schedules.delete(name)


if __name__ == "__main__":
    main()
