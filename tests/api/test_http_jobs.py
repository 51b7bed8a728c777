"""What the HTTP API does, over a real socket, with a real engine behind it."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.support.api.house import House, house

from penstock.core.pointer import decode_data
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async


async def ended(one: House, job_id: str) -> dict[str, Any]:
    answer = await one.call("GET", f"/v1/jobs/{job_id}/wait?timeout=20")
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


# -- submitting ---------------------------------------------------------------------------


@run_async
async def test_a_submitted_job_runs_and_its_result_can_be_fetched(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        answer = await one.call(
            "POST", "/v1/jobs", {"topic": "job.text.shout", "input": {"text": "hello"}}
        )
        job = answer.json
        assert answer.status == 201
        assert answer.headers["Location"] == f"/v1/jobs/{job['job_id']}"
        assert next(iter(job)) == "job_id"
        assert (await ended(one, job["job_id"]))["state"] == "SUCCEEDED"
        result = await one.call("GET", f"/v1/jobs/{job['job_id']}/result")
        assert (result.status, result.json) == (200, "HELLO")
        assert result.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("job_id", ["batch", "stream"])
@run_async
async def test_a_job_may_be_called_like_an_operation(job_id: str, tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        await one.submit(job_id=job_id)
        assert (await ended(one, job_id))["state"] == "SUCCEEDED"
        assert (await one.call("GET", f"/v1/jobs/{job_id}")).json["job_id"] == job_id
        assert (await one.call("GET", f"/v1/jobs/{job_id}/result")).json == "HI"
        assert (await one.call("POST", f"/v1/jobs/{job_id}/cancel", {})).json["ended"] is True
        assert (await one.call("POST", "/v1/jobs/batch", {"jobs": []})).status == 201


@run_async
async def test_the_input_is_stored_as_it_was_sent(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        text = '{"text" :  "\\u00e4 ä"}'
        answer = await one.call(
            "POST",
            "/v1/jobs",
            data=f'{{"topic": "job.text.slow", "input": {text}}}'.encode(),
            headers={"Content-Type": "application/json; charset=utf-8"},
        )
        assert decode_data(answer.json["request"]["context_ptr"]) == text.encode()


@run_async
async def test_a_large_input_becomes_a_blob(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        job = await one.submit(input={"text": "x" * 5000})
        assert job["request"]["context_ptr"].startswith("blob:sha256-")
        assert (await ended(one, job["job_id"]))["state"] == "SUCCEEDED"


@pytest.mark.parametrize("how", ["job_id", "idempotency_key", "unique"])
@run_async
async def test_of_calls_at_once_for_one_job_one_is_answered_as_new(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path) as one:
        now = SystemClock().now()
        monkeypatch.setattr(SystemClock, "now", lambda self: now)  # all of them at one moment
        name: Any = {"key": "only"} if how == "unique" else "only"
        body = {"topic": "job.text.slow", "input": {"text": "a"}, how: name}
        calls = [one.call("POST", "/v1/jobs", body) for _ in range(10)]
        answers = await asyncio.gather(*calls)
        assert sorted(answer.status for answer in answers) == [200] * 9 + [201]
        assert len({answer.json["job_id"] for answer in answers}) == 1


@run_async
async def test_the_same_key_is_the_same_job_and_another_request_a_conflict(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        header = {"Idempotency-Key": "order-7"}
        body = {"topic": "job.text.shout", "input": {"text": "a"}}
        first = await one.call("POST", "/v1/jobs", body, headers=header)
        await ended(one, first.json["job_id"])
        again = await one.call("POST", "/v1/jobs", body, headers=header)
        assert (first.status, again.status) == (201, 200)
        assert again.json["job_id"] == first.json["job_id"]
        other = {**body, "input": {"text": "b"}}
        refused = await one.call("POST", "/v1/jobs", other, headers=header)
        assert (refused.status, refused.json["code"]) == (409, "CONFLICT")
        differs = await one.call(
            "POST", "/v1/jobs", {**body, "idempotency_key": "order-8"}, headers=header
        )
        assert differs.status == 409
        agrees = await one.call(
            "POST", "/v1/jobs", {**body, "idempotency_key": "order-7"}, headers=header
        )
        assert agrees.json["job_id"] == first.json["job_id"]


@run_async
async def test_keys_of_two_tenants_do_not_meet(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        acme = await one.key("ann", KeyRole.SUBMIT, tenant="acme")
        beta = await one.key("bob", KeyRole.SUBMIT, tenant="beta")
        a = await one.submit(token=acme, idempotency_key="k")
        b = await one.submit(token=beta, idempotency_key="k")
        assert a["job_id"] != b["job_id"]
        assert (a["request"]["tenant"], b["request"]["tenant"]) == ("acme", "beta")


@run_async
async def test_a_batch_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        good = [{"topic": "job.text.shout", "input": {"text": str(n)}} for n in range(20)]
        answer = await one.call("POST", "/v1/jobs/batch", {"jobs": good})
        assert answer.status == 201
        assert len({job["job_id"] for job in answer.json["jobs"]}) == 20
        bad = [*good[:3], {"topic": "job.text.shout", "lables": {}}]
        refused = await one.call("POST", "/v1/jobs/batch", {"jobs": bad})
        assert refused.status == 422
        assert refused.json["field"] == "jobs[3].lables"
        assert refused.json["hint"] == "did you mean labels?"
        unknown = await one.call(
            "POST", "/v1/jobs/batch", {"jobs": [*good[:3], {"topic": "job.nobody"}]}
        )
        assert (unknown.status, unknown.json["code"]) == (422, "UNKNOWN_TOPIC")
        listed = await one.call("GET", "/v1/jobs?limit=100")
        assert len(listed.json["jobs"]) == 20


@run_async
async def test_an_empty_batch_is_no_error(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        answer = await one.call("POST", "/v1/jobs/batch", {"jobs": []})
        assert (answer.status, answer.json) == (201, {"jobs": []})


@run_async
async def test_a_stream_is_answered_line_by_line_in_order(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        lines = [json.dumps({"topic": "job.text.shout", "job_id": f"j{n}"}) for n in range(1300)]
        lines[7] = "not json"
        lines[600] = '{"topic": "job.text.shout", "job_id": "j1", "labels": {"a": "b"}}'
        lines[601] = '{"topic": "job.text.shout", "topic": "job.text.fail"}'
        lines.insert(9, "   ")
        answer = await one.call(
            "POST",
            "/v1/jobs/stream",
            data="\n".join(lines).encode(),
            headers={"Content-Type": "application/x-ndjson"},
        )
        assert answer.status == 200
        said = [json.loads(line) for line in answer.body.splitlines()]
        assert len(said) == 1300
        codes = {n: line["problem"]["code"] for n, line in enumerate(said) if "problem" in line}
        assert codes == {7: "MALFORMED", 600: "CONFLICT", 601: "DUPLICATE_FIELD"}
        assert all(line["job_id"] == f"j{n}" for n, line in enumerate(said) if n not in codes)


@run_async
async def test_a_stream_is_answered_while_it_is_open(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        reader, writer = await one.connect()
        writer.write(
            one.head(
                "POST",
                "/v1/jobs/stream",
                "Content-Type: application/x-ndjson",
                "Transfer-Encoding: chunked",
            )
        )
        for n in range(3):
            line = json.dumps({"topic": "job.text.shout", "job_id": f"live-{n}"}).encode() + b"\n"
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))
            said = await asyncio.wait_for(reader.readuntil(b'"}\n'), 10)
            assert f"live-{n}".encode() in said
        writer.write(b"0\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
        writer.close()


# -- looking ------------------------------------------------------------------------------


@pytest.mark.seed("001", "6.13")
@run_async
async def test_pages_cover_everything_once_in_both_orders_while_jobs_come_in(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as one:
        jobs = [{"topic": "job.text.shout", "job_id": f"j{n:03}"} for n in range(25)]
        await one.call("POST", "/v1/jobs/batch", {"jobs": jobs})
        for order in ("newest", "oldest"):
            seen: list[str] = []
            path = f"/v1/jobs?limit=10&order={order}&job_id=j*"
            cursor = ""
            while True:
                page = (await one.call("GET", path + cursor)).json
                seen += [job["job_id"] for job in page["jobs"]]
                await one.submit(job_id=f"{order}-{len(seen)}")
                if page["next"] is None:
                    break
                cursor = f"&cursor={page['next']}"
            wanted = [f"j{n:03}" for n in range(25)]
            assert seen == (wanted if order == "oldest" else wanted[::-1])


@run_async
async def test_the_pages_of_a_workflow_follow_its_steps(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        for step in (3, 1, 4, 0, 2):
            await one.submit(job_id=f"s{step}", workflow_id="w", step_index=step)
        seen, cursor = [], ""
        while True:
            page = (await one.call("GET", f"/v1/jobs?workflow_id=w&limit=2{cursor}")).json
            seen += [job["job_id"] for job in page["jobs"]]
            if page["next"] is None:
                break
            cursor = f"&cursor={page['next']}"
        assert seen == ["s0", "s1", "s2", "s3", "s4"]


@run_async
async def test_a_workflow_that_is_too_long_for_its_pages_says_so_and_can_be_read_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.api.jobs._FARTHEST", 4)
    async with house(tmp_path) as one:
        for step in range(9):
            await one.submit("job.text.slow", job_id=f"s{step}", workflow_id="w", step_index=step)

        async def pages(query: str) -> tuple[list[str], int]:
            seen: list[str] = []
            cursor = ""
            while True:
                answer = await one.call("GET", f"/v1/jobs?workflow_id=w&limit=2{query}{cursor}")
                if answer.status != 200:
                    return seen, answer.status
                seen += [job["job_id"] for job in answer.json["jobs"]]
                if answer.json["next"] is None:
                    return seen, 200
                cursor = f"&cursor={answer.json['next']}"

        every = [f"s{step}" for step in range(9)]
        assert await pages("") == (every[:6], 422)
        assert await pages("&since=0&order=oldest") == (every, 200)


@run_async
async def test_a_listing_can_be_narrowed(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        await one.submit(job_id="a", labels={"team": "ml", "x": "1"})
        await one.submit(job_id="b", labels={"team": "ml"})
        await one.submit("job.text.fail", job_id="c")
        await ended(one, "c")

        async def ids(query: str) -> list[str]:
            answer = await one.call("GET", f"/v1/jobs?{query}")
            assert answer.status == 200, answer
            return [job["job_id"] for job in answer.json["jobs"]]

        assert await ids("label=team=ml") == ["b", "a"]
        assert await ids("label=team=ml&label=x=1") == ["a"]
        assert await ids("state=FAILED&state=TIMEOUT") == ["c"]
        assert await ids("topic=job.text.f*") == ["c"]
        assert await ids("principal=nobody") == []
        dead = await one.call("GET", "/v1/dead")
        assert [job["job_id"] for job in dead.json["jobs"]] == ["c"]


@pytest.mark.parametrize(
    ("query", "field", "hint"),
    [
        ("limt=3", "limt", "did you mean limit?"),
        ("limit=0", "limit", ""),
        ("limit=1001", "limit", ""),
        ("limit=1&limit=2", "limit", "give it once"),
        ("state=DONE", "state[0]", ""),
        ("cursor=nonsense", "cursor", "pass `next`"),
        ("label=team", "label", ""),
        ("accepted_from=nan", "accepted_from", ""),
        ("topic=%ff", "query", ""),
        ("&".join(["state=FAILED"] * 201), "query", ""),
    ],
)
@run_async
async def test_a_parameter_that_is_wrong_is_named(
    query: str, field: str, hint: str, tmp_path: Path
) -> None:
    async with house(tmp_path) as one:
        answer = await one.call("GET", f"/v1/jobs?{query}")
        assert (answer.status, answer.json["field"]) == (422, field)
        assert answer.json.get("hint", "").startswith(hint)


@run_async
async def test_a_cursor_of_another_order_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        for _ in range(3):
            await one.submit()
        cursor = (await one.call("GET", "/v1/jobs?limit=1")).json["next"]
        answer = await one.call("GET", f"/v1/jobs?order=oldest&cursor={cursor}")
        assert (answer.status, answer.json["field"]) == (422, "cursor")


@run_async
async def test_history_logs_why_and_policy_of_a_job(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        job = await one.submit()
        path = f"/v1/jobs/{job['job_id']}"
        await ended(one, job["job_id"])
        history = await one.call("GET", f"{path}/history")
        events = [entry["event"] for entry in history.json["transitions"]]
        assert events[0] == "accept"
        assert events[-1] == "succeed"
        assert (await one.call("GET", f"{path}/logs")).json == {"lines": [], "next": None}
        assert (await one.call("GET", f"{path}/why")).json["why"].startswith("it ended")
        assert (await one.call("GET", f"{path}?why=1")).json["why"].startswith("it ended")
        assert "why" not in (await one.call("GET", path)).json
        judged = await one.call("GET", f"{path}/policy")
        assert judged.json["now"]["decision"] == "allow"


@run_async
async def test_waiting_ends_with_the_job_or_with_the_time(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        slow = await one.submit("job.text.slow")
        late = await one.call("GET", f"/v1/jobs/{slow['job_id']}/wait?timeout=0.05")
        assert late.status == 202
        assert late.json["job_id"] == slow["job_id"]
        too_long = await one.call("GET", f"/v1/jobs/{slow['job_id']}/wait?timeout=61")
        assert (too_long.status, too_long.json["field"]) == (422, "timeout")


# -- results ------------------------------------------------------------------------------


@run_async
async def test_there_is_no_result_before_the_end_nor_after_a_bad_one(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        slow = await one.submit("job.text.slow")
        early = await one.call("GET", f"/v1/jobs/{slow['job_id']}/result")
        assert (early.status, early.json["code"]) == (409, "NOT_ENDED")
        assert early.headers["Retry-After"] == "1"
        await one.call("POST", f"/v1/jobs/{slow['job_id']}/cancel", {"reason": "enough"})
        cancelled = await one.call("GET", f"/v1/jobs/{slow['job_id']}/result")
        assert (cancelled.status, cancelled.json["code"]) == (410, "JOB_CANCELLED")
        failed = await one.submit("job.text.fail")
        gone = await one.call("GET", f"/v1/jobs/{failed['job_id']}/result?wait=10")
        assert (gone.status, gone.json["code"]) == (410, "JOB_FAILED")
        assert gone.json["state"] == "FAILED"
        assert gone.json["error_message"]
        denied = await one.submit("job.text.forbidden")
        gone = await one.call("GET", f"/v1/jobs/{denied['job_id']}/result?wait=10")
        assert (gone.status, gone.json["code"]) == (410, "JOB_DENIED")


@run_async
async def test_a_large_result_comes_whole_and_in_parts(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        job = await one.submit("job.text.large", input={"size": 700_000})
        path = f"/v1/jobs/{job['job_id']}/result"
        whole = await one.call("GET", f"{path}?wait=20")
        assert len(whole.body) == 700_002
        assert whole.headers["Content-Length"] == "700002"
        part = await one.call("GET", path, headers={"Range": "bytes=699999-"})
        assert (part.status, part.body) == (206, b'xx"')
        assert part.headers["Content-Range"] == "bytes 699999-700001/700002"


# -- blobs --------------------------------------------------------------------------------


@run_async
async def test_a_blob_goes_up_and_comes_down_whole_and_in_parts(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        data = bytes(range(256)) * 2000
        put = await one.call("POST", "/v1/blobs", data=data, headers={"Content-Type": "image/png"})
        assert (put.status, put.json["size"]) == (201, len(data))
        path = "/v1/blobs/" + quote(put.json["uri"], safe="")
        got = await one.call("GET", path)
        assert got.body == data
        assert got.headers["Content-Type"] == "image/png"
        assert got.headers["Content-Disposition"] == "attachment"
        assert "sandbox" in got.headers["Content-Security-Policy"]
        etag = got.headers["ETag"]
        head = await one.call("HEAD", path)
        assert (head.status, head.body) == (200, b"")
        assert head.headers["Content-Length"] == str(len(data))
        digest = put.json["uri"].partition("sha256-")[2].partition(";")[0]
        for name in (digest, f"sha256-{digest}"):
            assert (await one.call("GET", f"/v1/blobs/{name}")).body == data

        async def ranged(value: str, **more: str) -> tuple[int, bytes]:
            answer = await one.call("GET", path, headers={"Range": value, **more})
            return answer.status, answer.body

        assert await ranged("bytes=0-9") == (206, data[:10])
        assert await ranged("bytes=-5") == (206, data[-5:])
        assert await ranged(f"bytes={len(data) - 3}-999999999") == (206, data[-3:])
        assert (await ranged(f"bytes={len(data)}-"))[0] == 416
        assert await ranged("bytes=0-1,5-6") == (200, data)
        assert await ranged("bytes=0-9", **{"If-Range": etag}) == (206, data[:10])
        assert await ranged("bytes=0-9", **{"If-Range": '"other"'}) == (200, data)
        fresh = await one.call("GET", path, headers={"If-None-Match": etag})
        assert (fresh.status, fresh.body) == (304, b"")


@run_async
async def test_a_small_blob_is_in_its_pointer_and_can_be_read_all_the_same(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as one:
        for data in (b"", b"hello"):
            put = await one.call(
                "POST", "/v1/blobs", data=data, headers={"Content-Type": "text/plain"}
            )
            assert (put.status, put.json["uri"][:15]) == (201, "data:text/plain")
            got = await one.call("GET", "/v1/blobs/" + quote(put.json["uri"], safe=""))
            assert (got.status, got.body) == (200, data)
            assert got.headers["Content-Type"] == "text/plain"


@pytest.mark.parametrize(
    ("uri", "status"),
    [
        ("0" * 64, 404),
        ("blob:sha256-" + "0" * 64, 404),
        ("file:///etc/passwd", 422),
        ("https://example.org/x", 422),
        ("blob:sha256-xyz", 422),
        ("blob:sha256-" + "0" * 64 + ";type=a b", 422),
        ("..", 422),
    ],
)
@run_async
async def test_only_blobs_are_read_as_blobs(uri: str, status: int, tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        answer = await one.call("GET", "/v1/blobs/" + quote(uri, safe="").replace("..", "%2e%2e"))
        assert answer.status == status


@run_async
async def test_a_tenant_does_not_read_anothers_blob(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        acme = await one.key("ann", KeyRole.SUBMIT, tenant="acme")
        beta = await one.key("bob", KeyRole.SUBMIT, tenant="beta")
        job = await one.submit(token=acme, input={"text": "s" * 5000})
        path = "/v1/blobs/" + quote(job["request"]["context_ptr"], safe="")
        assert (await one.call("GET", path, token=acme)).status == 200
        theirs = await one.call("GET", path, token=beta)
        nobodys = await one.call("GET", "/v1/blobs/" + "0" * 64, token=beta)
        assert (theirs.status, theirs.body) == (nobodys.status, nobodys.body)


# -- doing --------------------------------------------------------------------------------


@run_async
async def test_cancel_and_retry_one_and_many(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        slow = await one.submit("job.text.slow")
        done = await one.call("POST", f"/v1/jobs/{slow['job_id']}/cancel")
        assert (done.status, done.json["ended"]) == (200, True)
        assert done.json["job"]["state"] == "CANCELLED"
        failed = await one.submit("job.text.fail", labels={"a": "b"})
        await ended(one, failed["job_id"])
        again = await one.call("POST", f"/v1/jobs/{failed['job_id']}/retry")
        assert again.status == 201
        assert again.json["request"]["parent_job_id"] == failed["job_id"]
        await ended(one, again.json["job_id"])
        twice = await one.call("POST", f"/v1/jobs/{failed['job_id']}/retry")
        assert twice.status == 201
        assert twice.json["request"]["parent_job_id"] == again.json["job_id"]
        await ended(one, twice.json["job_id"])
        many = await one.call("POST", "/v1/jobs:retry", {"topic": "job.text.fail"})
        assert (many.status, many.json["done"]) == (200, 1)
        await one.submit("job.text.slow")
        many = await one.call("POST", "/v1/jobs:cancel", {"state": ["SCHEDULED", "RUNNING"]})
        assert many.status == 200
        for body in ({}, {"all": True, "topic": "x"}, {"reason": "no filter"}):
            refused = await one.call("POST", "/v1/jobs:cancel", body)
            assert (refused.status, refused.json["field"]) == (422, "all")
        assert (await one.call("POST", "/v1/jobs:cancel", {"all": True})).status == 200


@run_async
async def test_a_parked_job_is_approved_by_somebody_else_once(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        ann = await one.key("ann", KeyRole.SUBMIT, KeyRole.APPROVE)
        bea = await one.key("bea", KeyRole.APPROVE)
        job = await one.submit("job.text.risky", token=ann)
        path = f"/v1/jobs/{job['job_id']}"
        parked: list[Any] = []
        while not parked:
            parked = (await one.call("GET", "/v1/jobs?awaiting_approval=true")).json["jobs"]
        hold = parked[0]["hold"]
        assert hold["terms"].get("needed", 1) == 1
        own = await one.call("POST", f"{path}/approve", token=ann)
        assert (own.status, own.json["code"]) == (403, "NOT_PERMITTED")
        stale = await one.call("POST", f"{path}/approve", {"snapshot": "other"}, token=bea)
        assert (stale.status, stale.json["code"]) == (409, "STALE_APPROVAL")
        said = {"snapshot": hold["snapshot"], "reason": "fine"}
        assert (await one.call("POST", f"{path}/approve", said, token=bea)).status == 200
        assert (await ended(one, job["job_id"]))["state"] == "SUCCEEDED"
        replayed = await one.call("POST", f"{path}/approve", said, token=bea)
        assert replayed.status == 409


@run_async
async def test_an_approval_that_comes_too_late_is_a_conflict(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        bea = await one.key("bea", KeyRole.APPROVE)
        job = await one.submit("job.text.hasty")
        path = f"/v1/jobs/{job['job_id']}"
        assert (await ended(one, job["job_id"]))["state"] == "DENIED"
        late = await one.call("POST", f"{path}/approve", token=bea)
        assert late.status == 409


@run_async
async def test_a_rejected_job_is_denied(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        bea = await one.key("bea", KeyRole.APPROVE)
        job = await one.submit("job.text.risky")
        while not (await one.call("GET", "/v1/jobs?awaiting_approval=true")).json["jobs"]:
            pass
        no = await one.call("POST", f"/v1/jobs/{job['job_id']}/reject", {"reason": "no"}, token=bea)
        assert (no.status, no.json["state"]) == (200, "DENIED")


@run_async
async def test_schedules_are_made_shown_paused_fired_and_deleted(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        body = {
            "cron": "0 3 * * *",
            "timezone": "Europe/Berlin",
            "job": {"topic": "job.text.shout", "input": {"text": "night"}},
        }
        put = await one.call("PUT", "/v1/schedules/nightly", body)
        assert put.status == 200, put
        assert put.json["next_at"]
        listed = await one.call("GET", "/v1/schedules")
        assert [view["schedule"]["name"] for view in listed.json["schedules"]] == ["nightly"]
        paused = await one.call("POST", "/v1/schedules/nightly/pause")
        assert paused.json["schedule"]["paused"] is True
        resumed = await one.call("POST", "/v1/schedules/nightly/resume")
        assert resumed.json["schedule"]["paused"] is False
        fired = await one.call("POST", "/v1/schedules/nightly/fire")
        assert fired.status == 201
        assert (await ended(one, fired.json["job_id"]))["state"] == "SUCCEEDED"
        wrong = await one.call("PUT", "/v1/schedules/x", {**body, "cron": "61 * * * *"})
        assert (wrong.status, wrong.json["field"]) == (422, "cron")
        named = await one.call(
            "PUT", "/v1/schedules/x", {**body, "job": {"topic": "job.text.shout", "job_id": "a"}}
        )
        assert (named.status, named.json["field"]) == (422, "job.job_id")
        assert (await one.call("DELETE", "/v1/schedules/nightly")).status == 204
        assert (await one.call("GET", "/v1/schedules/nightly")).status == 404


@run_async
async def test_limits_pools_workers_policy_keys_and_upkeep(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        limit = {"key": ["tenant"], "concurrency": 2, "rate": {"count": 5, "per": 1.0}}
        assert (await one.call("PUT", "/v1/limits/two", limit)).status == 200
        assert (await one.call("GET", "/v1/limits/two")).json["limit"]["concurrency"] == 2
        assert len((await one.call("GET", "/v1/limits")).json["limits"]) == 1
        typo = await one.call("PUT", "/v1/limits/x", {**limit, "rate": {"count": 5, "pre": 1}})
        assert (typo.json["field"], typo.json["hint"]) == ("rate.pre", "did you mean per?")
        assert (await one.call("DELETE", "/v1/limits/two")).status == 204
        assert (await one.call("GET", "/v1/limits/two")).status == 404

        workers = (await one.call("GET", "/v1/workers")).json["workers"]
        pool = workers[0]["pool"]
        assert (await one.call("POST", f"/v1/pools/{pool}/pause")).json["paused"] is True
        assert (await one.call("POST", f"/v1/pools/{pool}/resume")).json["paused"] is False
        assert pool in [view["name"] for view in (await one.call("GET", "/v1/pools")).json["pools"]]

        rules = await one.call("GET", "/v1/policy")
        assert [rule["id"] for rule in rules.json["rules"]] == ["ask", "ask-soon", "never"]
        assert (await one.call("POST", "/v1/policy/reload")).status == 200
        tried = await one.call("POST", "/v1/policy/simulate", {"text": 'default = "deny"'})
        assert tried.status == 200
        broken = await one.call("POST", "/v1/policy/simulate", {"text": "default ="})
        assert broken.status == 422

        made = await one.call("POST", "/v1/keys", {"name": "ci", "roles": ["submit"]})
        assert made.status == 201
        token = made.json["token"]
        assert (await one.call("GET", "/v1/status", token=token)).status == 200
        shown = await one.call("GET", "/v1/keys")
        assert token.encode() not in shown.body
        key_id = made.json["key"]["key_id"]
        assert (await one.call("DELETE", f"/v1/keys/{key_id}")).json["revoked_at"]
        assert (await one.call("GET", "/v1/status", token=token)).status == 401

        audit = (await one.call("GET", "/v1/audit?limit=1&action=key.*")).json
        assert audit["entries"][0]["action"] == "key.revoke"
        older = (await one.call("GET", f"/v1/audit?action=key.*&cursor={audit['next']}")).json
        assert [entry["action"] for entry in older["entries"]] == ["key.create"]

        assert (await one.call("POST", "/v1/verify")).json["mismatches"] == []
        assert (await one.call("POST", "/v1/prune", {"older_than": 0})).status == 200
        assert (await one.call("GET", "/v1/status")).json["version"]


@run_async
async def test_each_role_may_do_its_own_and_nothing_else(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        submit = await one.key("s", KeyRole.SUBMIT)
        operate = await one.key("o", KeyRole.OPERATE)
        approve = await one.key("a", KeyRole.APPROVE)
        tries = [
            ("POST", "/v1/jobs", {"topic": "job.text.shout"}, {submit: 201}),
            ("POST", "/v1/jobs:cancel", {"all": True}, {operate: 200}),
            ("PUT", "/v1/limits/x", {"concurrency": 1}, {operate: 200}),
            ("GET", "/v1/keys", None, {}),
            ("GET", "/v1/audit", None, {}),
            ("POST", "/v1/policy/reload", None, {}),
            ("POST", "/v1/prune", {"older_than": 1e9}, {}),
        ]
        for method, path, body, allowed in tries:
            for token in (submit, operate, approve):
                answer = await one.call(method, path, body, token=token)
                assert answer.status == allowed.get(token, 403), (method, path, answer)
        for token in (submit, operate, approve):
            assert (await one.call("GET", "/v1/jobs", token=token)).status == 200


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [("gzip, deflate", True), ("br, gzip; q=0.5", True), ("identity", False), ("gzip;q=0", False)],
)
@run_async
async def test_long_answers_are_compressed_for_those_who_take_it(
    accepted: str, is_compressed: bool, tmp_path: Path
) -> None:
    async with house(tmp_path) as one:
        job = await one.submit("job.text.large", input={"size": 100_000})
        headers = {"Accept-Encoding": accepted}
        plain = await one.call("GET", "/openapi.json")
        answer = await one.call("GET", "/openapi.json", headers=headers)
        assert (answer.headers.get("Content-Encoding") == "gzip") is is_compressed
        assert (gzip.decompress(answer.body) if is_compressed else answer.body) == plain.body
        assert (len(answer.body) < len(plain.body) / 4) is is_compressed
        for path in ("/v1/me", f"/v1/jobs/{job['job_id']}/result?wait=10"):
            assert "Content-Encoding" not in (await one.call("GET", path, headers=headers)).headers
