"""Browsers sign in, are believed only with the token of their pages, and sign out."""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path
from typing import Any

from tests.api.test_http_security import make_certificate
from tests.support.api.house import Answer, House, house

from penstock.app.engine import Engine
from penstock.config import load
from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async


class Browser:
    """Keeps the cookie and the CSRF token, and sends what a page of the server sends."""

    def __init__(self, one: House) -> None:
        self.one, self.cookie, self.csrf = one, "", ""

    async def sign_in(self, **given: str) -> Answer:
        answer = await self.one.call("POST", "/v1/session", given, token="")
        if answer.status == 201:
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
            self.csrf = answer.json["csrf_token"]
        return answer

    def headers(self, **more: str) -> dict[str, str]:
        page = {"Cookie": self.cookie, "X-CSRF-Token": self.csrf, "Origin": self.one.url}
        return page | more

    async def call(self, method: str, path: str, body: Any = None, **more: str) -> Answer:
        return await self.one.call(method, path, body, token="", headers=self.headers(**more))


JOB = {"topic": "job.text.shout", "input": {"text": "hi"}}


@run_async
async def test_a_key_signs_a_browser_in_and_its_cookie_is_locked_down(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        key = await one.key("ada", KeyRole.SUBMIT, tenant="acme")
        browser = Browser(one)
        answer = await browser.sign_in(key=key)
        name, *flags = answer.headers["Set-Cookie"].split("; ")
        assert name.startswith(f"penstock_session_{one.port}=")
        assert set(flags) == {"Path=/", "Max-Age=604800", "HttpOnly", "SameSite=Strict"}
        assert key not in answer.body.decode()
        me = (await browser.call("GET", "/v1/me")).json
        assert (me["name"], me["roles"], me["tenant"]) == ("ada", ["submit"], "acme")
        assert me["csrf_token"] == browser.csrf
        assert "submit_job" in me["allowed"]
        assert "create_key" not in me["allowed"]
        job = (await browser.call("POST", "/v1/jobs", JOB)).json
        assert (job["request"]["tenant"], job["request"]["principal"]) == ("acme", "ada")


@run_async
async def test_under_tls_the_cookie_is_secure(tmp_path: Path) -> None:
    cert, private = make_certificate(tmp_path)
    async with house(tmp_path, certfile=cert, keyfile=private) as one:
        trust = ssl.create_default_context(cafile=str(cert))
        sent = one.session.post(f"{one.url}/v1/session", json={"key": one.token}, ssl=trust)
        async with sent as answer:
            assert answer.headers["Set-Cookie"].endswith("; SameSite=Strict; Secure")


@run_async
async def test_a_cookie_alone_changes_nothing(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        browser = Browser(one)
        await browser.sign_in(key=one.token)
        page = browser.headers()
        foreign = f"http://127.0.0.1:{one.port + 1}"
        for broken in (
            {**page, "X-CSRF-Token": ""},
            {**page, "X-CSRF-Token": "0" * 32},
            {**page, "Origin": foreign},
            {**page, "Origin": "null"},
            {**page, "Sec-Fetch-Site": "same-site"},
            {**page, "Sec-Fetch-Site": "cross-site", "Origin": one.url},
            {name: value for name, value in page.items() if name != "Origin"},
            {name: value for name, value in page.items() if name != "X-CSRF-Token"},
        ):
            answer = await one.call("POST", "/v1/jobs", JOB, token="", headers=broken)
            assert (answer.status, answer.json["code"]) == (403, "CSRF"), broken
        assert (await one.call("GET", "/v1/jobs")).json["jobs"] == []
        said = {**page, "Sec-Fetch-Site": "same-origin"}
        assert (await one.call("POST", "/v1/jobs", JOB, token="", headers=said)).status == 201
        # A key in the head needs none of it, and wins over the cookie.
        reader = await one.key("reader", KeyRole.APPROVE)
        answer = await one.call("POST", "/v1/jobs", JOB, token=reader, headers=page)
        assert answer.status == 403
        assert answer.json["code"] == "NOT_PERMITTED"
        wrong = await one.call("GET", "/v1/me", token="nonsense", headers=page)
        assert wrong.status == 401


@run_async
async def test_signing_out_ends_the_session(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        browser, other = Browser(one), Browser(one)
        await browser.sign_in(key=one.token)
        await other.sign_in(key=one.token)
        answer = await browser.call("DELETE", "/v1/session")
        assert answer.status == 204
        assert "Max-Age=0" in answer.headers["Set-Cookie"]
        refused = await browser.call("GET", "/v1/me")
        assert (refused.status, refused.json["code"]) == (401, "NOT_AUTHENTICATED")
        assert (await other.call("GET", "/v1/me")).status == 200
        assert (await one.call("DELETE", "/v1/session")).status == 204  # with a key: nothing
        audit = (await one.call("GET", "/v1/audit?action=session.*")).json["entries"]
        assert [entry["action"] for entry in audit] == ["session.delete", *["session.create"] * 2]


@run_async
async def test_a_session_and_its_streams_end_with_the_key(tmp_path: Path) -> None:
    async with house(tmp_path, stall=1.0) as one:
        browser = Browser(one)
        await browser.sign_in(key=await one.key("ada", KeyRole.SUBMIT))
        url = f"{one.url}/v1/stream"
        async with one.session.get(url, headers={"Cookie": browser.cookie}) as stream:
            assert stream.status == 200
            assert (await one.call("DELETE", "/v1/keys/ada")).status == 200
            await asyncio.wait_for(stream.read(), 20)
        assert (await browser.call("GET", "/v1/me")).status == 401


@run_async
async def test_a_link_signs_in_once_with_the_rights_of_whoever_made_it(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        key = await one.key("ada", KeyRole.SUBMIT, tenant="acme")
        link = (await one.call("POST", "/v1/session/links", token=key)).json
        assert link["url"] == f"{one.url}/sign-in?link={link['token']}"
        browser = Browser(one)
        assert (await browser.sign_in(link=link["token"])).json["tenant"] == "acme"
        again = await Browser(one).sign_in(link=link["token"])
        assert (again.status, again.json["code"]) == (401, "NOT_AUTHENTICATED")
        # A signed-in page makes one for another browser.
        second = (await browser.call("POST", "/v1/session/links")).json
        assert (await Browser(one).sign_in(link=second["token"])).json["name"] == "ada"
        third = (await one.call("POST", "/v1/session/links", token=key)).json
        await one.call("DELETE", "/v1/keys/ada")
        assert (await Browser(one).sign_in(link=third["token"])).status == 401


@run_async
async def test_the_page_of_a_link_spends_it_only_by_its_button(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        link = (await one.call("POST", "/v1/session/links")).json["token"]
        for _ in range(2):  # a preview, then the person
            page = await one.call("GET", f"/sign-in?link={link}", token="")
        assert page.status == 200
        assert "form-action 'self'" in page.headers["Content-Security-Policy"]
        assert page.headers.getall("Referrer-Policy")[-1] == "same-origin"  # type: ignore[attr-defined]
        assert f'value="{link}"' in page.body.decode()
        form = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Origin": "http://evil.example",
        }
        data = f"link={link}".encode()
        foreign = await one.call("POST", "/sign-in", token="", headers=form, data=data)
        assert foreign.status == 403
        form["Origin"] = one.url
        sent = one.session.post(
            f"{one.url}/sign-in", data=data, headers=form, allow_redirects=False
        )
        async with sent as answer:
            assert answer.status == 303
            cookie = answer.headers["Set-Cookie"].partition(";")[0]
        me = await one.call("GET", "/v1/me", token="", headers={"Cookie": cookie})
        assert me.json["name"] == "owner"
        spent = await one.call("POST", "/sign-in", token="", headers=form, data=data)
        assert spent.status == 401
        assert "it was used already" in spent.body.decode()
        assert 'name="key"' in spent.body.decode()


@run_async
async def test_a_form_that_is_none_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        for data, status in ((b"a=1&" * 9, 400), (b"", 401), (b"key=%00%ff&link=", 401)):
            answer = await one.call("POST", "/sign-in", token="", headers=form, data=data)
            assert answer.status == status, data


@run_async
async def test_a_hostile_link_stays_text_on_the_page(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        path = "/sign-in?link=%22%3E%3Cscript%3Ealert(1)%3C/script%3E"
        page = (await one.call("GET", path, token="")).body.decode()
        assert "<script" not in page


@run_async
async def test_failed_sign_ins_are_limited_and_large_ones_not_read(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        large = await Browser(one).sign_in(key="x" * 5000)
        assert (large.status, large.json["code"]) == (413, "TOO_LARGE")
        for body in ({}, {"key": "a", "link": "b"}):
            assert (await one.call("POST", "/v1/session", body, token="")).status == 422
        statuses = [(await Browser(one).sign_in(key="nonsense")).status for _ in range(12)]
        assert statuses == [401] * 10 + [429] * 2
        limited = await Browser(one).sign_in(key=one.token)
        assert limited.status == 429
        assert 0 < int(limited.headers["Retry-After"]) <= 60
        assert (await one.call("GET", "/v1/me")).status == 200  # keys in the head go on working


@run_async
async def test_sessions_survive_a_restart_and_are_stored_as_hashes(tmp_path: Path) -> None:
    flags = {"data_dir": str(tmp_path / "data"), "http": "127.0.0.1:0"}
    settings = load(flags=flags)
    async with Engine(settings) as engine:
        made = await engine.parts.keys.sessions.open(engine.api.guard.caller)
        link = await engine.api.keys.create_link()
        assert link.url.startswith(engine.url + "/sign-in?link=")
        kept = await engine.store.recall_all("session/")
        assert made.token not in repr(kept)
        assert made.token not in repr(made)
        assert link.token not in repr(link)
    async with Engine(settings) as engine:
        sessions = engine.parts.keys.sessions
        assert sessions.authenticate(made.token).principal == "owner"
    settings.token_file.unlink()  # a new owner's token: whoever signed in with the old one is out
    async with Engine(settings) as engine:
        assert await engine.store.recall_all("session/") == {}


@run_async
async def test_what_is_allowed_is_what_is_not_refused(tmp_path: Path) -> None:
    bodies = {
        "put_limit": {"concurrency": 1},
        "simulate_policy": {"text": 'default = "allow"'},
        "create_key": {"name": "x", "roles": ["submit"]},
        "prune": {"older_than": 1e9},
    }
    tried = {
        *("pause_pool", "resume_pool", "drain_worker", "reset_breaker", "put_limit"),
        "delete_limit",
        *("list_limits", "list_workers", "list_pools", "get_worker", "get_pool", "list_schedules"),
        *("get_policy", "simulate_policy", "reload_policy", "list_keys", "create_key"),
        "read_audit",
        *("verify", "prune", "metrics", "list_jobs", "list_breakers", "create_link"),
    }
    from penstock.api.operations import OPERATIONS

    known = {operation.id: operation for operation in OPERATIONS}
    assert tried <= known.keys(), tried - known.keys()
    async with house(tmp_path) as one:
        for name, roles, tenant in (
            ("operator", (KeyRole.OPERATE,), None),
            ("tenant", (KeyRole.OPERATE, KeyRole.SUBMIT), "acme"),
            ("submitter", (KeyRole.SUBMIT,), None),
        ):
            key = await one.key(name, *roles, tenant=tenant)
            allowed = (await one.call("GET", "/v1/me", token=key)).json["allowed"]
            for each in tried:
                operation = known[each]
                path = re.sub(r"\{\w+\}", "x", operation.path)
                answer = await one.call(operation.method, path, bodies.get(each), token=key)
                assert (answer.status == 403) is (each not in allowed), (name, each, answer)
