"""A rule that asks for two people's word, and who may give it."""

import tempfile
import time
from pathlib import Path

import penstock

RULES = """
default = "allow"

[[rules]]
id = "two-people"
decision = "require_approval"
topics = ["job.money.*"]
min_cost = 1000
reason = "large sums need two people"
approval = { needed = 2, expires = "1h" }
"""

app = penstock.App()


@app.job("job.money.pay")
async def pay(to: str, euros: int) -> str:
    return f"{euros} euros to {to}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.toml"
        rules.write_text(RULES)
        with app.run(rules=rules, http__listen="127.0.0.1:0") as ps:
            ask_two(ps)


def ask_two(ps: penstock.Client) -> None:
    tokens = {name: key(ps, name) for name in ("ada", "bob", "cy")}
    with (
        penstock.connect(ps.url, token=tokens["ada"]) as ada,
        penstock.connect(ps.url, token=tokens["bob"]) as bob,
        penstock.connect(ps.url, token=tokens["cy"]) as cy,
    ):
        small = ada.submit("job.money.pay", {"to": "eve", "euros": 5}, estimated_cost=5)
        print("small:", small.result())

        large = ada.submit("job.money.pay", {"to": "eve", "euros": 9000}, estimated_cost=9000)
        parked(large)
        print("large:", large.why())
        try:
            large.approve()
        except penstock.NotPermitted as error:
            print("refused:", error.message)

        bob.get(large.job_id).approve("the invoice is here")
        print("large:", large.why())
        cy.get(large.job_id).approve()
        print("large:", large.result())
    for entry in history(ps, large.job_id):
        print(entry)


def key(ps: penstock.Client, name: str) -> str:
    """A token that lets somebody submit and approve; only its hash is stored."""
    roles = (penstock.KeyRole.SUBMIT, penstock.KeyRole.APPROVE)
    return str(ps.keys.create(name, roles).token)


def parked(job: penstock.JobHandle) -> None:
    """The rules are asked after the submission is answered: wait until they have been."""
    while job.refresh().hold is None:
        time.sleep(0.01)


def history(ps: penstock.Client, job_id: str) -> list[str]:
    entries = ps.get(job_id).history()
    return [f"  {one.event:<9} {one.actor.partition('-')[0]:<14} {one.reason}" for one in entries]


if __name__ == "__main__":
    main()
