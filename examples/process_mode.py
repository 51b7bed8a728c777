"""Functions in processes of their own: they use other cores, and can be killed."""

import os
import time

import penstock

app = penstock.App()


@app.job("job.math.primes", mode="process")
def count_primes(below: int) -> int:
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, below))


@app.job("job.math.stubborn", mode="process")
def stubborn() -> None:
    """Computes for ever and never looks at ctx.cancel."""
    while True:
        time.sleep(0.01)


@app.job("job.math.greedy", mode="process", memory_limit=200 << 20)
def greedy() -> int:
    return len(bytes(2 << 30))


@app.job("job.math.exit", mode="process")
def leave() -> None:
    os._exit(3)


def main() -> None:
    with app.run(timeouts__kill_grace=0.3) as ps:
        print("primes:", count_primes.submit(20_000).result())

        job = stubborn.submit()
        while job.state is not penstock.JobState.RUNNING:
            time.sleep(0.01)
        answer = job.cancel()
        print(answer.job.state, "- its process is gone:", answer.ended)

        for topic in ("job.math.greedy", "job.math.exit"):
            result = ps.submit(topic).wait().result
            assert result is not None
            print(result.status, result.error_code, "-", result.error_message)


if __name__ == "__main__":  # needed: a process that runs a job imports this file again
    main()
