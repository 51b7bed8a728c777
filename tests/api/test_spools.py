"""Workspaces of spool servers, as the HTTP API shows them."""

from __future__ import annotations

from pathlib import Path

from tests.support.api.house import house

from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async
from penstock.workloads.spool.client.work import Work


@run_async
async def test_jobs_are_counted_by_the_folder_they_lie_in(tmp_path: Path) -> None:
    spool, missing = tmp_path / "spool", tmp_path / "missing"
    Work(spool).submit("Say something.")
    async with house(tmp_path, spools=(spool, missing)) as one:
        first, second = (await one.call("GET", "/v1/spools")).json["spools"]
        counts = {"QUEUED": 1, "RUNNING": 0, "DONE": 0, "FAILED": 0}
        assert first == {"path": str(spool), "served": False, "counts": counts, "problem": ""}
        assert (second["path"], second["counts"]) == (str(missing), {})
        assert "missing" in second["problem"]
        assert not missing.exists()


@run_async
async def test_a_key_that_may_only_submit_does_not_see_them(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        made = await one.engine.api.keys.create("ci", (KeyRole.SUBMIT,))
        assert (await one.call("GET", "/v1/spools", token=made.token)).status == 403


@run_async
async def test_a_key_of_one_tenant_does_not_see_them(tmp_path: Path) -> None:
    async with house(tmp_path, spools=(tmp_path / "spool",)) as one:
        token = await one.key("alice", KeyRole.OPERATE, tenant="acme")
        answer = await one.call("GET", "/v1/spools", token=token)
        assert (answer.status, answer.json["code"]) == (403, "NOT_PERMITTED")
        assert str(tmp_path) not in answer.body.decode()
        assert "get_spools" not in (await one.call("GET", "/v1/me", token=token)).json["allowed"]
