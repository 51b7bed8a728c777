"""Jobs that wait for others, and what becomes of them when one fails."""

import penstock

app = penstock.App()


@app.job("job.data.load")
async def load(table: str) -> int:
    if table == "lost":
        raise LookupError("there is no such table")
    return len(table)


@app.job("job.data.join")
async def join(parts: list[str]) -> str:
    return " + ".join(parts)


@app.job("job.data.tidy")
async def tidy() -> str:
    return "tidied up"


def main() -> None:
    with app.run() as ps:
        # A diamond: two that wait for nothing, one for both, one for that.
        left, right = load.submit("orders"), load.submit("customers")
        joined = join.options(after=[left, right]).submit(["orders", "customers"])
        last = tidy.options(after=joined).submit()
        print(joined.result(), "then", last.result())
        ends = [job.refresh().finished_at or 0 for job in (left, right)]
        print("in order:", max(ends) <= (joined.refresh().started_at or 0))

        # If a parent fails, its children are cancelled, and theirs; or run all the same.
        lost = load.submit("lost")
        joined = join.options(after=[lost, right]).submit(["lost", "customers"])
        child = tidy.options(after=joined).submit()
        anyway = tidy.options(after=lost, if_parent_fails="run").submit()
        print("a parent failed:", joined.wait().state, child.wait().state, anyway.wait().state)

        # What waits for itself is refused, with nothing stored.
        try:
            ps.submit("job.data.tidy", job_id="a-loop", after=["a-loop"])
        except penstock.InvalidRequest as error:
            print("refused:", error)


if __name__ == "__main__":
    main()
