"""The safety rules: what is in force, why a job was judged so, and what others would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from penstock.api.operation import Operation
from penstock.api.reply import Reply, json_reply
from penstock.ports.engine_api import Explanation, KeyRole, PolicyView, Simulation

if TYPE_CHECKING:
    from penstock.api.call import Call


async def get_policy(call: Call) -> Reply:
    return json_reply(await call.api.policy.current())


async def explain_job(call: Call) -> Reply:
    return json_reply(await call.api.policy.explain(call.params["job_id"]))


class SimulateBody(Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    """The rules, as a rule file has them (TOML)."""
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    """How many jobs to judge, newest first."""


async def simulate_policy(call: Call) -> Reply:
    given = await call.json(SimulateBody)
    return json_reply(await call.api.policy.simulate(given.text, given.limit))


async def reload_policy(call: Call) -> Reply:
    return json_reply(await call.api.policy.reload())


OPERATIONS = (
    Operation(
        "GET",
        "/v1/policy",
        get_policy,
        role=KeyRole.OPERATE,
        answer=PolicyView,
        summary="Get the rules in force",
    ),
    Operation(
        "POST",
        "/v1/policy/simulate",
        simulate_policy,
        role=KeyRole.OPERATE,
        body=SimulateBody,
        answer=Simulation,
        refusals=(413, 415, 422),
        summary="Simulate other rules on past jobs",
        description="Changes nothing.",
    ),
    Operation(
        "POST",
        "/v1/policy/reload",
        reload_policy,
        role=KeyRole.ADMIN,
        answer=PolicyView,
        refusals=(422,),
        summary="Reload the rule file",
        description="422 if it is invalid; the last valid rules stay in force.",
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/policy",
        explain_job,
        answer=Explanation,
        refusals=(404,),
        summary="Explain the decision on a job",
        description="Each rule that was tried, and each condition that did or didn't match.",
    ),
)
