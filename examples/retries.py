"""What is tried again, when, and what is not."""

import penstock

app = penstock.App()


@app.job(
    "job.weather.ask",
    retries=penstock.RetryPolicy(retries=4, delay=0.2, factor=2, max_delay=5),
    retry_on=ConnectionError,
)
async def ask(ctx: penstock.Context, city: str) -> str:
    """Fails twice in a way that may pass, then answers."""
    if ctx.request.retry_number < 2:
        raise ConnectionResetError("the line is bad")  # a ConnectionError, so it is retried
    return f"rain in {city}"


@app.job("job.weather.parse", retries=4, retry_never=ValueError)
async def parse(text: str) -> float:
    """A ValueError will not go away by itself, so it is not tried again."""
    return float(text)


@app.job("job.weather.order", retries=4, ctx=True)
async def order(ctx: penstock.Context) -> str:
    """The other side says when to come back."""
    if ctx.request.retry_number == 0:
        raise penstock.Retry("not ready yet", after=0.3)
    return "delivered"


def main() -> None:
    with app.run() as ps:
        job = ask.submit("Trondheim")
        print(job.result())  # waits for the retries, too
        print("it took", chain(ps, job))

        try:
            parse.submit("warm").result()
        except penstock.JobFailed as error:
            print(error.error_code, "- tried", error.job.request.retry_number + 1, "time(s)")

        print(order.submit().result())


def chain(ps: penstock.Client, job: penstock.JobHandle) -> str:
    """A retry is a new job; each one names its successor."""
    states = [str(job.refresh().state)]
    while (successor := job.record.successor) is not None:
        job = ps.get(successor)
        states.append(str(job.record.state))
    return " -> ".join(states)


if __name__ == "__main__":
    main()
