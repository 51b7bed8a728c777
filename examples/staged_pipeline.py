"""A pipeline of three stages: one bad item, and a run that is PARTIAL instead of lost.

$ python examples/staged_pipeline.py
"""

from __future__ import annotations

import tempfile

import penstock
from penstock import Pipeline, Retry

shop = Pipeline("shop", doc="Prices, in euros.")

PRICES = {"tea": "3.50", "milk": "1.20", "ghost": "priceless"}


@shop.map(over=lambda config, ctx: sorted(PRICES), concurrency=2, retry=Retry(2, delay=0.01))
async def price(name, ctx):
    return {"name": name, "euros": float(PRICES[name])}


@shop.map(over=price)
def label(item, ctx):
    return f"{item['name']}: {item['euros']:.2f}"


@shop.step()
async def receipt(results, ctx):
    return [line async for line in results]


def main() -> None:
    app = penstock.App()
    app.add(shop)
    with tempfile.TemporaryDirectory() as folder, app.run(folder) as ps:
        run = ps.pipelines.start("shop")
        result = ps.get(run.id).result(timeout=30)
        print(result["status"], result["output"])
        for item in ps.pipelines.items(run.id, "price"):
            print(item.key, item.outcome, item.error)


if __name__ == "__main__":
    main()
