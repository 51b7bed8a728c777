"""Every page shows what is there, and changes as it happens."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, expect
from tests.support.browser.world import World

from penstock.core.job import Job
from penstock.lifecycles.spool import Status
from penstock.ports.engine_api import KeyRole
from penstock.workloads.spool.client.work import Work


def test_a_link_signs_in_with_one_click(open_page, engine: World) -> None:
    page = open_page("", key=None)
    page.goto(engine.link())
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page).to_have_url(f"{engine.url}/dashboard/")


def test_a_key_signs_in_where_one_wanted_to_go(open_page, engine: World) -> None:
    page = open_page("jobs?state=FAILED", key=None)
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("key")
    page.get_by_label("API key").fill(engine.token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    assert page.url.endswith("/dashboard/jobs?state=FAILED")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()


PAGES = {
    "": "Needs a person",
    "jobs": "job.slow.count",
    "jobs?dead=true": "ZeroDivisionError",
    "approvals": "ask-before-mail",
    "pipelines": "receipt",
    "schedules": "nightly",
    "submit": "job.mail.send",
    "submit?topic=job.text.shout": "times",
    "chat": "parrot",
    "workers": "calm",
    "models": "parrot",
    "containers": "hello:1",
    "spools": "input/ready",
    "policy": "no-shell",
    "keys": "ada",
    "audit": "schedule.put",
}


@pytest.mark.parametrize("path", PAGES)
def test_a_page_shows_what_is_there(path: str, open_page, jobs: dict[str, Job]) -> None:
    page = open_page(path)
    expect(page.locator("main")).to_contain_text(PAGES[path])
    expect(page.locator("#live")).to_have_text("Live")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


KINDS = {
    "shout": ["SUCCEEDED", "HELLO", "shouting hello", "team=red"],
    "failed": ["ZeroDivisionError", "float division by zero", "try 2"],
    "denied": ["DENIED", "nobody runs a shell here", "no-shell"],
    "mail": ["Why it waits", "awaiting 1 approval", "Approve …", "ask-before-mail"],
    "running": ["What is happening", "counted 1", "runs it"],
    "cancelled": ["CANCELLED", "not needed any more"],
    "late": ["TIMEOUT"],
    "delayed": ["Why it waits", "delayed"],
    "picture": ["plots/dot.png", "notes.txt"],
    "crawl": ["6 children", "job.site.page"],
    "pipeline": ["PARTIAL", "receipt", "Retry failed items"],
    "container": ["hello from a container"],
    "endless": ["RUNNING"],
    "answer": ["SAY SOMETHING"],
}


@pytest.mark.parametrize("name", KINDS)
def test_a_job_of_every_kind_is_shown_with_its_way(
    name: str, open_page, jobs: dict[str, Job]
) -> None:
    page = open_page(f"jobs/{jobs[name].job_id}")
    for text in KINDS[name]:
        expect(page.locator("main")).to_contain_text(text)
    expect(page.locator("svg.diagram .node.current").first).to_be_visible()


def test_buttons_are_those_that_are_legal(open_page, jobs: dict[str, Job], engine: World) -> None:
    page = open_page(f"jobs/{jobs['shout'].job_id}")
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    expect(page.get_by_role("button", name="Retry", exact=True)).to_have_count(0)
    reader = open_page(f"jobs/{jobs['running'].job_id}", key=engine.key("eve", KeyRole.APPROVE))
    expect(reader.locator("main")).to_contain_text("What is happening")
    expect(reader.get_by_role("button", name="Cancel")).to_have_count(0)
    expect(reader.get_by_role("link", name="Keys")).to_have_count(0)


def test_a_job_moves_and_logs_before_ones_eyes(open_page, engine: World) -> None:
    job = engine.submit("job.slow.count", {"to": 15, "pause": 0.2})
    page = open_page(f"jobs/{job.job_id}")
    expect(page.locator(".log")).to_contain_text("counted 3")
    expect(page.locator(".why-box")).to_contain_text("%")
    expect(page.locator("h1")).to_contain_text("SUCCEEDED")
    expect(page.locator(".log")).to_contain_text("counted 15")
    page.get_by_label("Search in the log").fill("counted 1")
    expect(page.locator(".log-view")).to_contain_text("7 of 15 lines")


def cell(row: Locator, heading: str) -> Locator:
    return row.locator(f"td[data-title='{heading}']")


def test_a_container_that_runs_shows_what_it_has_used(open_page, jobs: dict[str, Job]) -> None:
    row = open_page("containers").locator("tbody tr", has_text="endless:1")
    expect(row).to_contain_text("RUNNING")
    expect(cell(row, "Memory")).to_have_text("1.0 MiB")
    expect(cell(row, "CPU")).to_have_text("250 ms")


def test_the_speed_of_a_model_is_shown(open_page, engine: World) -> None:
    row = open_page("models").locator("tbody tr", has_text="parrot")
    expect(cell(row, "Tokens/s")).to_have_text("0.0")
    chat = {"kind": "chat", "messages": [{"role": "user", "content": "one two three four"}]}
    engine.wait(engine.submit("job.llm.parrot", chat))
    expect(cell(row, "Tokens/s")).to_have_text(re.compile("[1-9]"))


def test_a_job_in_a_spool_is_counted_in_its_folder(open_page, engine: World) -> None:
    row = open_page("spools").locator("tbody tr")
    expect(row).to_contain_text("IDLE")
    queued = engine.spool.counts()[Status.QUEUED]
    expect(cell(row, "input/ready")).to_have_text(str(queued))
    Work(engine.spool.workspace).submit("And another thing.")
    expect(cell(row, "input/ready")).to_have_text(str(queued + 1))


def test_rows_change_in_place_and_new_ones_wait_for_a_click(open_page, engine: World) -> None:
    job = engine.submit("job.slow.count", {"to": 30, "pause": 0.25}, labels={"set": "live"})
    page = open_page("jobs?label=set%3Dlive")
    row = page.locator("tbody tr").first
    expect(row).to_contain_text("RUNNING")
    row.evaluate("(element) => { element.mark = 'the same'; }")
    other = engine.submit("job.text.shout", {"text": "new"}, labels={"set": "live"})
    expect(row).to_contain_text("SUCCEEDED")
    assert row.evaluate("(element) => element.mark") == "the same"
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("button", name="Show 1 new").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.locator("tbody tr").first).to_contain_text(other.job_id[-8:])
    assert job.job_id[-8:] in page.locator("tbody tr").last.inner_text()


def test_filters_are_in_the_url_and_stay_after_a_reload(open_page, jobs: dict[str, Job]) -> None:
    page = open_page("jobs")
    page.get_by_role("link", name=re.compile("^FAILED")).click()
    expect(page).to_have_url(re.compile(r"state=FAILED"))
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("/")
    page.keyboard.type("job.text.")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"q=job.text"))
    expect(page.locator("main")).to_contain_text("No job matches")
    page.reload()
    expect(page.get_by_role("searchbox")).to_have_value("job.text.")
    page.go_back()
    expect(page.locator("tbody tr")).to_have_count(1)
