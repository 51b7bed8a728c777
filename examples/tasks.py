"""An application that workers serve. In three terminals, in this folder:

penstock up --app tasks:app
penstock worker --app tasks:app
penstock submit job.text.shout --input '{"text": "hello"}' --wait
"""

import asyncio

import penstock

app = penstock.App()


@app.job("job.text.shout", timeout=30, retries=3)
async def shout(text: str) -> str:
    return text.upper() + "!"


@app.job("job.math.fibonacci", mode="process", timeout=60)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@app.job("job.slow.count", idempotent=True, ctx=True)
async def count(ctx: penstock.Context, to: int, pause: float = 0.1) -> int:
    """Counts slowly, to be watched. Harmless to repeat, so it says that it is idempotent."""
    for n in range(1, to + 1):
        ctx.progress(n / to, f"{n} of {to}")
        ctx.log(f"counted {n}")
        await asyncio.sleep(pause)
    return to


@app.job("job.math.divide")
async def divide(a: float, b: float) -> float:
    return a / b
