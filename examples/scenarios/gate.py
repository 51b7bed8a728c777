"""The safety kernel: what its rules refuse, hold and constrain."""

from __future__ import annotations

import penstock
from scenarios.scenario import Scenario, Stage, Story, expect, until

RULES = """\
default = "allow"

[[rules]]
id = "no-mail-to-everyone"
decision = "deny"
topics = ["job.mail.*"]
labels = { audience = "everyone" }
reason = "nobody may write to everyone"

[[rules]]
id = "four-eyes"
decision = "require_approval"
topics = ["job.ship.*"]
approval = { expires = "1h" }

[[rules]]
id = "short-thoughts"
decision = "allow_with_constraints"
topics = ["job.slow.think"]
constraints = { max_runtime = "300ms" }

[[rules]]
id = "slowly"
decision = "throttle"
topics = ["job.sms.*"]
rate = "2/500ms"
"""


async def denial(stage: Stage) -> Story:
    labels = {"audience": "everyone"}
    job = await stage.people["ada"].asubmit("job.mail.send", {"text": "hi, all"}, labels=labels)
    record = await job.await_end(10)
    assert record.result is not None
    assert record.verdict is not None
    expect(record.verdict.rule_id == "no-mail-to-everyone", f"by {record.verdict.rule_id}")
    return Story(job, f"{record.result.error_message}")


async def approval(stage: Stage) -> Story:
    ada, bob = stage.people["ada"], stage.people["bob"]
    job = await ada.asubmit("job.ship.release", {"version": "2.0"})
    await until(job, lambda record: record.hold is not None)
    try:
        await job.aapprove("it is fine")
    except penstock.NotPermitted as error:
        expect("ada" in error.message, error.message)
    else:
        raise AssertionError("who submitted it could approve it")
    await bob.approvals.aapprove(job.job_id, reason="looks good")
    await job.aresult(10)
    record = await job.arefresh()
    assert record.verdict is not None
    rule = record.verdict.rule_id
    return Story(job, f"rule {rule}: ada submitted it and may not, bob may")


async def constraints(stage: Stage) -> Story:
    job = await stage.people["ada"].asubmit("job.slow.think", timeout=30)
    record = await job.await_end(10)
    assert record.result is not None
    assert record.verdict is not None
    rule = record.verdict.rule_id
    return Story(job, f"asked for 30 s; rule {rule}: {record.result.error_message}")


SCENARIOS = [
    Scenario("denied by a rule", "job.mail.send", "DENIED", denial),
    Scenario("needs an approval", "job.ship.release", "SUCCEEDED", approval),
    Scenario("allowed, constrained", "job.slow.think", "TIMEOUT", constraints),
]
