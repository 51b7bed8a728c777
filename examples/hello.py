"""A first job: python examples/hello.py"""

import penstock

app = penstock.App()


@app.job("job.text.shout", timeout=30, retries=3)
async def shout(text: str) -> str:
    return text.upper() + "!"


if __name__ == "__main__":
    with app.run() as ps:  # an engine in this process; penstock.connect() finds a running one
        job = shout.submit("hello")  # or ps.submit("job.text.shout", {"text": "hello"})
        print(job.result())  # HELLO!
