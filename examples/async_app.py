"""Everything from asyncio: the engine runs in your event loop, and nothing blocks."""

import asyncio

import penstock

app = penstock.App()


@app.job("job.text.translate", priority="interactive")
async def translate(text: str, to: str = "la") -> str:
    await asyncio.sleep(0.05)
    return {"la": "aqua", "fr": "eau"}[to] + f" ({text})"


async def main() -> None:
    async with app.run() as ps:
        job = await translate.asubmit("water")
        print(await job)  # the same as await job.aresult()

        many = await translate.asubmit_many([("water", "la"), ("water", "fr")])
        print(await asyncio.gather(*(one.aresult() for one in many)))

        slow = await ps.asubmit("job.text.translate", {"text": "water"}, delay=60)
        print(await slow.awhy())
        answer = await slow.acancel("changed my mind")
        print(answer.job.state)

        try:
            await translate.options(retry=penstock.RetryPolicy()).asubmit("water", to=3)
        except penstock.InvalidRequest as error:
            print(error)


if __name__ == "__main__":
    asyncio.run(main())
