"""What people do on the pages: by clicking, by keyboard, with bad connections and hostile data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Error, Page, expect
from tests.support.browser.world import World
from tests.support.waiting import eventually

from penstock.core.errors import InvalidRequest
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import KeyRole


def test_cancel_with_a_reason(open_page, engine: World) -> None:
    job = engine.submit("job.slow.count", {"to": 5000})
    page = open_page(f"jobs/{job.job_id}")
    page.get_by_role("button", name="Cancel …").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"penstock cancel {job.job_id}")
    dialog.get_by_label("Reason").fill("wrong numbers")
    dialog.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("h1")).to_contain_text("CANCELLED")
    expect(page.locator(".why-box")).to_contain_text("wrong numbers")
    assert engine.job(job.job_id).state is JobState.CANCELLED


def test_approve_and_reject(open_page, engine: World) -> None:
    wanted = engine.submit("job.mail.send", {"to": "ada"})
    other = engine.submit("job.mail.send", {"to": "bob"})
    page = open_page("approvals", key=engine.key("boss", KeyRole.APPROVE))
    cards = page.locator("main section.card")
    expect(cards).to_have_count(2)
    expect(cards.first).to_contain_text("mail leaves the house")
    expect(page.get_by_role("link", name="Approvals 2")).to_be_visible()
    cards.first.get_by_placeholder("Reason").fill("she waits for it")
    cards.first.get_by_role("button", name="Approve", exact=True).click()
    expect(cards).to_have_count(1)
    cards.first.get_by_role("button", name="Reject", exact=True).click()
    expect(page.locator("main")).to_contain_text("No job awaits approval")
    assert engine.wait(wanted).state is JobState.SUCCEEDED
    assert engine.wait(other).state is JobState.DENIED


def test_retry_a_failed_job(open_page, engine: World) -> None:
    job = engine.wait(engine.submit("job.text.fail", {"text": "once"}))
    page = open_page(f"jobs/{job.job_id}")
    page.get_by_role("button", name="Retry", exact=True).click()
    expect(page.locator("h1")).to_contain_text("FAILED")
    expect(page.locator("main")).to_contain_text("try 2")
    assert not page.url.endswith(job.job_id)
    assert engine.job(job.job_id).successor == page.url.rpartition("/")[2]


def test_bulk_shows_what_it_will_hit_and_hits_only_that(open_page, engine: World) -> None:
    mine = [
        engine.submit("job.slow.count", {"to": 5000}, labels={"set": "bulk"}) for _ in range(12)
    ]
    other = engine.submit("job.slow.count", {"to": 5000}, labels={"set": "other"})
    page = open_page("jobs?label=set%3Dbulk")
    page.get_by_role("button", name="Cancel matching …").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading")).to_have_text("Cancel 12 jobs?")
    expect(dialog).to_contain_text("label=set=bulk")
    expect(dialog).to_contain_text("and 7 more")
    dialog.get_by_role("button", name="Cancel 12").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Type 12")
    dialog.get_by_label("Type 12 to confirm").fill("12")
    dialog.get_by_role("button", name="Cancel 12").click()
    expect(page.locator("#notices")).to_contain_text("12 jobs of 12 cancelled")
    assert {engine.job(job.job_id).state for job in mine} == {JobState.CANCELLED}
    assert engine.job(other.job_id).state is JobState.RUNNING


def test_retry_dead_letters_of_a_filter(open_page, engine: World) -> None:
    for _ in range(2):
        engine.wait(engine.submit("job.text.fail", {"text": "no"}, labels={"set": "dead"}))
    page = open_page("jobs?dead=true&label=set%3Ddead")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("button", name="Retry matching …").click()
    page.get_by_role("dialog").get_by_role("button", name="Retry 2").click()
    expect(page.locator("#notices")).to_contain_text("2 jobs of 2 retried")
    retried = engine.get("/v1/jobs?label=set%3Ddead&tries=true")["jobs"]
    assert len(retried) == 4


def test_submit_by_the_form_of_a_topics_schema(open_page, engine: World) -> None:
    page = open_page("submit")
    page.get_by_label("Topic").select_option("job.text.shout")
    page.locator("#field-text").fill("good morning")
    page.get_by_label("times").fill("2")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.locator("h1")).to_contain_text("SUCCEEDED")
    expect(page.locator(".outcome")).to_contain_text("GOOD MORNING GOOD MORNING")
    page.get_by_role("link", name="Submit again …").click()
    expect(page.get_by_label("times")).to_have_value("2")


def test_a_refused_submission_names_the_field(open_page, engine: World) -> None:
    page = open_page("submit?topic=job.math.divide")
    page.get_by_label("Write the input as JSON").check()
    page.get_by_label("Input (JSON object)").fill('{"a": 1}')
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("b")
    expect(page).to_have_url(re.compile("submit"))


def test_chat_streams_and_stops(open_page, engine: World) -> None:
    page = open_page("chat")
    page.get_by_label("Model").select_option("parrot")
    box = page.get_by_role("textbox", name="Message")
    box.fill("one two three")
    box.press("Enter")
    expect(page.locator(".turn.assistant")).to_contain_text("ONE TWO THREE")
    expect(page.locator(".turn.assistant")).to_contain_text("tokens/s")
    box.fill(" ".join(["word"] * 300))
    box.press("Enter")
    expect(page.locator(".turn.assistant").last).to_contain_text("WORD WORD")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn.assistant").last).to_contain_text("stopped")

    eventually(lambda: "job.llm.parrot" not in engine.get("/v1/counts")["topics"], "it is ended")


def test_pause_and_resume_a_pool(open_page, engine: World) -> None:
    page = open_page("workers")
    page.get_by_role("button", name="Pause pool default").click()
    expect(page.get_by_role("table", name="Pools")).to_contain_text("PAUSED")
    job = engine.submit("job.text.shout", {"text": "wait"})
    waiting = open_page(f"jobs/{job.job_id}")
    expect(waiting.locator(".why-box")).to_contain_text("paused")
    expect(open_page("").get_by_text("Pool default is paused")).to_be_visible()
    page.get_by_role("button", name="Resume pool default").click()
    expect(waiting.locator("h1")).to_contain_text("SUCCEEDED")


def test_drain_a_worker(open_page, engine: World) -> None:
    command = [sys.executable, "-m", "penstock.cli", "worker", "start", "--id", "extra"]
    command += ["--app", "tests.support.browser.jobs:app", "--data", str(engine.settings.data_dir)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": _path()}) as worker:
        try:
            page = open_page("workers")
            page.get_by_role("button", name="Drain worker extra").click()
            page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
            expect(page.get_by_role("table", name="Workers")).not_to_contain_text("extra")
            assert worker.wait(20) == 0
        finally:
            if worker.poll() is None:
                worker.kill()


def _path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def test_make_a_schedule_fire_pause_and_delete_it(open_page, engine: World) -> None:
    page = open_page("schedules")
    form = page.locator("form")
    form.get_by_label("Name").fill("hourly")
    form.get_by_label("Topic").fill("job.text.shout")
    form.get_by_label("Cron").fill("not a cron")
    form.get_by_label("Input").fill('{"text": "tick"}')
    form.get_by_role("button").click()
    expect(page.get_by_role("alert")).to_contain_text("cron")
    form.get_by_label("Cron").fill("@hourly")
    form.get_by_role("button").click()
    page.get_by_role("button", name="Fire hourly now").click()
    expect(page.locator("#notices")).to_contain_text("Submitted")
    page.get_by_role("button", name="Pause hourly").click()
    expect(page.get_by_role("table")).to_contain_text("PAUSED")
    page.get_by_role("button", name="Delete hourly").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("main")).to_contain_text("No schedule yet")


def test_simulate_rules_over_the_past(open_page, engine: World) -> None:
    engine.wait(engine.submit("job.text.shout", {"text": "past"}))
    page = open_page("policy")
    rules = 'default = "allow"\n[[rules]]\nid = "quiet"\ndecision = "deny"\ntopics = ["job.text.*"]'
    page.get_by_label("Rules, as in a rule file").fill(rules)
    page.get_by_role("button", name="Simulate over the past").click()
    expect(page.get_by_role("table", name="Differences")).to_contain_text("deny (quiet)")
    page.get_by_label("Rules, as in a rule file").fill("nonsense")
    page.get_by_role("button", name="Simulate over the past").click()
    expect(page.get_by_role("alert")).to_be_visible()


def test_make_a_key_use_it_and_revoke_it(open_page, engine: World) -> None:
    page = open_page("keys")
    page.get_by_label("Name of its holder").fill("zoe")
    page.get_by_label("Tenant").fill("acme")
    page.get_by_label("submit submit jobs").check()
    page.get_by_role("button", name="Create").click()
    expect(page.locator("main")).to_contain_text("shown once")
    token = page.locator("section.card .copyable code").first.inner_text()
    theirs = open_page("jobs", key=token)
    expect(theirs.locator(".who")).to_contain_text("zoe of tenant acme")
    page.get_by_role("button", name="Revoke the key zoe").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(theirs.get_by_label("API key")).to_be_visible()


# -- tenants ----------------------------------------------------------------------


def test_tenants_do_not_see_each_other(open_page, engine: World) -> None:
    secret = engine.submit("job.text.shout", {"text": "secret"}, tenant="globex")
    roles = (KeyRole.SUBMIT, KeyRole.OPERATE)
    key = engine.key("al", *roles, tenant="acme")
    page = open_page("", key=key)
    for path in ("", "jobs", "approvals", "pipelines", "schedules", "containers", "models"):
        _go(page, engine, path)
        expect(page.locator("#live")).to_have_text("Live")
        assert secret.job_id[-8:] not in page.content()
        assert "globex" not in page.content()
    _go(page, engine, f"jobs/{secret.job_id}")
    expect(page.locator("h1")).to_have_text("Not found")


# -- connections ------------------------------------------------------------------


def test_a_broken_connection_recovers_without_a_reload(
    open_page, tmp_path: Path, engine: World
) -> None:
    """A real engine, killed and started again under the page."""
    data, port = tmp_path / "data", _free_port()
    command = [sys.executable, "-m", "penstock.cli", "up", "--data", str(data)]
    command += ["--app", "tests.support.browser.jobs:app", "--http", f"127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{port}"

    def start() -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": _path()}
        one = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert one.stdout is not None
        while "ready" not in one.stdout.readline():
            assert one.poll() is None
        return one

    def kill(one: subprocess.Popen[str]) -> None:
        with one:  # which closes its pipe
            one.kill()

    up = start()
    try:
        token = (data / "token").read_text().strip()
        page = open_page("", key=None)
        page.request.post(f"{url}/v1/session", data={"key": token})
        page.goto(f"{url}/dashboard/jobs")
        expect(page.locator("#live")).to_have_text("Live")
        page.evaluate("() => { window.mark = 'the same page'; }")
        kill(up)
        expect(page.locator("#live")).to_have_text("Reconnecting …")
        expect(page.locator("main")).to_contain_text("can't be reached")
        up = start()
        expect(page.locator("#live")).to_have_text("Live", timeout=30_000)
        headers = {"Authorization": f"Bearer {token}"}
        job = {"topic": "job.text.shout", "input": {"text": "back"}}
        assert page.request.post(f"{url}/v1/jobs", data=job, headers=headers).ok
        page.get_by_role("button", name="Show 1 new").click()
        expect(page.locator("tbody tr")).to_have_count(1)
        assert page.evaluate("() => window.mark") == "the same page"
    finally:
        kill(up)


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_pause_stops_what_changes_by_itself(open_page, engine: World) -> None:
    job = engine.submit("job.slow.count", {"to": 5000, "pause": 0.1})
    page = open_page(f"jobs/{job.job_id}")
    expect(page.locator(".log")).to_contain_text("counted 2")
    page.get_by_role("button", name=re.compile("pause")).click()
    expect(page.locator("#live")).to_have_text("Paused")
    lines = page.locator(".log-line").count()
    page.wait_for_timeout(1200)
    assert page.locator(".log-line").count() == lines
    page.get_by_role("button", name=re.compile("resume")).click()
    expect(page.locator(".log-line")).not_to_have_count(lines)
    engine.run(engine.api.cancel(job.job_id))


# -- hostile data -----------------------------------------------------------------

XSS = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\'"&lt;${7*7}'


def test_markup_in_any_field_stays_text(open_page, engine: World) -> None:
    labels = {"team": XSS[:120]}
    made = [
        engine.submit("job.text.echo", {"text": XSS}, labels=labels),
        engine.submit("job.text.fail", {"text": XSS}, labels=labels),
        engine.submit("job.llm.parrot", {"kind": "chat", "messages": [_turn(XSS)]}),
        engine.submit("job.mail.send", {"to": XSS, "subject": XSS}),
    ]
    for job in made[:3]:
        engine.wait(job)
    for field in ({"topic": "job.<b>.x"}, {"topic": "job.text.echo", "tenant": "<b>"}):
        with pytest.raises(InvalidRequest):  # names have no markup
            engine.submit(field["topic"], tenant=field.get("tenant"))
    with pytest.raises(InvalidRequest):
        engine.key(XSS[:60], KeyRole.SUBMIT)
    running = engine.submit("job.slow.count", {"to": 5000})
    engine.run(engine.api.cancel(running.job_id, reason=XSS))
    made.append(running)
    paths = ["", "jobs", "jobs?q=%3Cimg%20src%3Dx%3E", "approvals", "audit", "keys", "chat"]
    paths += [
        "jobs?topic=%3Cscript%3Ealert(1)%3C/script%3E",
        "%3Cimg%20src=x%20onerror=alert(1)%3E",
    ]
    paths += [f"jobs/{job.job_id}" for job in made]
    page = open_page("")
    for path in paths:
        _go(page, engine, path)
        page.wait_for_timeout(150)
        assert page.evaluate("() => window.pwned") is None, path
        assert page.locator("main img:not(.result)").count() == 0, path
        assert page.locator("main script").count() == 0, path
    _go(page, engine, "chat")
    page.get_by_role("textbox", name="Message").fill(XSS)
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant")).to_contain_text("<IMG SRC=X")
    expect(page.locator(".turn.assistant")).to_contain_text("tokens/s")
    assert page.evaluate("() => window.pwned") is None
    assert page.locator("main img, main script").count() == 0
    _go(page, engine, f"jobs/{made[0].job_id}")
    expect(page.locator(".log")).to_contain_text("<script>window.pwned=1</script>")
    expect(page.locator(".outcome")).to_contain_text("onerror")
    _go(page, engine, f"jobs/{made[1].job_id}")
    expect(page.locator(".outcome")).to_contain_text("<img src=x")


def _go(page: Page, engine: World, path: str) -> None:
    page.goto(f"{engine.url}/dashboard/{path}")
    page.locator("main h1").wait_for()


def _turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_no_inline_script_or_style_and_nothing_from_elsewhere(open_page, engine: World) -> None:
    page = open_page("")
    policy = page.request.get(f"{engine.url}/dashboard/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for attempt in ("setAttribute('onclick', 'window.pwned=1')", "innerHTML = '<b>x</b>'"):
        with pytest.raises(Error, match="Trusted"):
            page.evaluate(f"() => {{ document.body.{attempt}; }}")
    open_page.problems.clear()  # the browser tells of both


def test_large_numbers_are_not_rounded(open_page, engine: World) -> None:
    big = engine.submit("job.slow.count", {"to": 0, "pause": 9007199254740993})
    page = open_page(f"jobs/{big.job_id}")
    expect(page.locator("main")).to_contain_text("9007199254740993")


# -- keyboard ---------------------------------------------------------------------


def test_cancel_with_the_keyboard_alone(open_page, engine: World) -> None:
    job = engine.submit("job.slow.count", {"to": 5000}, labels={"set": "keys"})
    page = open_page("")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    _tab_to(page, "Jobs")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Jobs")).to_be_focused()
    page.keyboard.press("/")
    page.keyboard.type("set=keys")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    _tab_to(page, job.job_id[-8:])
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("RUNNING")
    _tab_to(page, "Cancel …")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Cancel …")).to_be_focused()
    page.keyboard.press("Enter")
    _tab_to(page, "Cancel the job")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("CANCELLED")


def test_every_page_is_reached_with_the_keyboard_alone(open_page, engine: World) -> None:
    page = open_page("")
    names = page.locator("#nav a").evaluate_all("all => all.map(one => one.firstChild.data)")
    assert len(names) == 14
    page.locator("main h1").focus()
    for name in names[1:]:
        _tab_to(page, name, key="Shift+Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#nav a[aria-current]")).to_contain_text(name)
        expect(page.locator("main h1")).to_be_focused()


def _tab_to(page: Page, text: str, most: int = 60, key: str = "Tab") -> None:
    for _ in range(most):
        page.keyboard.press(key)
        if text in page.evaluate("() => document.activeElement.textContent"):
            return
    pytest.fail(f"Tab does not lead to {text!r}")


# -- pipelines --------------------------------------------------------------------


def test_failed_items_are_shown_and_retried(open_page, engine: World) -> None:
    job: Job = engine.wait(engine.submit("job.pipeline.shop"))
    page = open_page(f"jobs/{job.job_id}")
    page.get_by_role("button", name="1 item", exact=True).click()
    expect(page.get_by_role("table", name="Failed items")).to_contain_text("could not convert")
    page.get_by_role("button", name="Retry failed items").click()
    expect(page).not_to_have_url(re.compile(job.job_id))
    expect(page.locator("main")).to_contain_text("PARTIAL")
