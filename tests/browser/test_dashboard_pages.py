"""Every page shows what is there, and changes as it happens."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, expect
from tests.support.browser.world import World

from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.spool import Status
from penstock.ports.engine_api import KeyRole
from penstock.workloads.llm.values import EngineUnavailable, LlmCode, ModelFacts
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
    "broken": ["FAILED", "NON_ZERO_EXIT"],
    "endless": ["RUNNING"],
    "answer": ["SAY SOMETHING"],
    "split": ["Route over nodes", "cellar", "12-23", "OVER SEVERAL MACHINES"],
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


def test_a_job_moves_and_logs_before_ones_eyes(
    open_page, engine: World, jobs: dict[str, Job]
) -> None:
    long = open_page(f"jobs/{jobs['running'].job_id}")
    expect(long.locator(".why-box .meter")).to_contain_text("%")
    job = engine.submit("job.slow.count", {"to": 15, "pause": 0.2})
    page = open_page(f"jobs/{job.job_id}")
    expect(page.locator(".log")).to_contain_text("counted 3")
    expect(page.locator("h1")).to_contain_text("SUCCEEDED")
    expect(page.locator(".log")).to_contain_text("counted 15")
    page.get_by_label("Search in the log").fill("counted 1")
    expect(page.locator(".log-view")).to_contain_text("7 of 15 lines")


def test_the_log_is_followed_until_one_scrolls_up(open_page, engine: World) -> None:
    job = engine.submit("job.slow.count", {"to": 600, "pause": 0.01})
    page = open_page(f"jobs/{job.job_id}")
    box, button = page.locator(".log"), page.get_by_role("button", name=re.compile("^Follow"))
    box.scroll_into_view_if_needed()
    lines = box.locator(".log-line")
    expect(lines.nth(60)).to_be_attached()
    expect(lines.last).to_be_in_viewport()
    box.hover()
    page.mouse.wheel(0, -200)
    expect(button).to_have_text("Follow")
    page.wait_for_timeout(300)  # a wheel's scrolling is smooth
    top, number = box.evaluate("box => box.scrollTop"), lines.count()
    expect(lines).not_to_have_count(number)
    assert box.evaluate("box => box.scrollTop") == top, "what one reads stays"
    button.click()
    expect(button).to_have_text("Following")
    expect(lines.filter(has_text="counted 600")).to_be_in_viewport()


def cell(row: Locator, heading: str) -> Locator:
    return row.locator(f"td[data-title='{heading}']")


def test_a_container_that_runs_shows_what_it_has_used(open_page, jobs: dict[str, Job]) -> None:
    row = open_page("containers").locator("tbody tr", has_text="endless:1")
    expect(row).to_contain_text("RUNNING")
    expect(cell(row, "Memory")).to_have_text("1.0 MiB")
    expect(cell(row, "CPU")).to_have_text("250 ms")


def test_a_container_that_failed_shows_its_exit_code_and_what_it_used(
    open_page, jobs: dict[str, Job]
) -> None:
    page = open_page("containers")
    row = page.locator("tbody tr", has_text="broken:1")
    for heading, text in (("Exit", "3"), ("Memory", "3.0 MiB"), ("CPU", "1.5 s")):
        expect(cell(row, heading)).to_have_text(text)
    row.get_by_role("link").click()
    card = page.locator("section.card", has=page.get_by_role("heading", name="Container"))
    for fact in ("Imagebroken:1", "Exit code3", "Peak memory3.0 MiB", "Processor time1.5 s"):
        expect(card.locator(".facts > div").filter(has_text=fact)).to_have_count(1)


def test_a_running_containers_page_shows_what_it_has_used(open_page, jobs: dict[str, Job]) -> None:
    page = open_page(f"jobs/{jobs['endless'].job_id}")
    expect(page.locator(".facts > div", has_text="Peak memory")).to_contain_text("1.0 MiB")


OWN_LIFECYCLES = {
    "container": ("container job", ["queued", "running", "finished"]),
    "broken": ("container job", ["queued", "running", "failed"]),
    "endless": ("container job", ["queued", "running"]),
    "pipeline": ("pipeline job", ["PENDING", "RUNNING", "PARTIAL"]),
    "split": ("job processor", ["VALIDATING", "EMBED", "PROCESS_LAYERS", "HEAD", "SEND", "DONE"]),
}


@pytest.mark.parametrize("name", OWN_LIFECYCLES)
def test_a_job_is_drawn_on_the_lifecycle_of_its_own_kind(
    name: str, open_page, jobs: dict[str, Job]
) -> None:
    lifecycle, way = OWN_LIFECYCLES[name]
    page = open_page(f"jobs/{jobs[name].job_id}")
    drawing = page.get_by_role("img", name=f"The states of a {lifecycle}")
    expect(drawing.locator(".node.on text:first-of-type")).to_have_text(way)
    expect(drawing.locator(".node.current text:first-of-type")).to_have_text(way[-1])
    expect(page.get_by_role("img", name="The states of a canonical job")).to_be_visible()


def test_a_batch_is_drawn_on_its_lifecycle(open_page, engine: World) -> None:
    batch = engine.batch("one", "two")
    page = open_page(f"jobs/{batch.id}")
    drawing = page.get_by_role("img", name="The states of a batch")
    way = ["validating", "in_progress", "finalizing", "completed"]
    expect(drawing.locator(".node.on text:first-of-type")).to_have_text(way)


def test_the_speed_of_a_model_is_shown(open_page, engine: World) -> None:
    row = open_page("models").locator("tbody tr", has_text="parrot")
    expect(cell(row, "Tokens/s")).to_have_text("0.0")
    chat = {"kind": "chat", "messages": [{"role": "user", "content": "one two three four"}]}
    engine.wait(engine.submit("job.llm.parrot", chat))
    expect(cell(row, "Tokens/s")).to_have_text(re.compile("[1-9]"))


def test_a_map_shows_which_node_holds_which_layers(open_page, jobs: dict[str, Job]) -> None:
    page = open_page("models")
    card = page.locator("section.card", has=page.get_by_role("heading", name="duet over nodes"))
    expect(card).to_contain_text("attic (layers 0-11) → cellar (layers 12-23)")
    expect(card.locator(".row")).to_have_count(3)
    row = page.get_by_role("table", name="Nodes").locator("tbody tr").nth(1)
    expect(cell(row, "Tokens/s")).to_have_text("42.0")
    expect(cell(row, "Cache")).to_have_text("96.0 MiB of 512 MiB")
    model = page.get_by_role("table", name="Language models").locator("tr", has_text="duet")
    expect(cell(model, "First token")).to_have_text("180 ms")


def test_the_overview_draws_jobs_by_state_and_lists_pools_and_failures(
    open_page, jobs: dict[str, Job]
) -> None:
    page = open_page("")
    for name, state in (("Jobs that ended, by state", "FAILED"), ("Unfinished jobs", "RUNNING")):
        chart = page.get_by_role("img", name=re.compile(name))
        expect(chart.locator(f".bar.state-{state}").first).to_be_attached()
    for name in ("Per minute", "Wait p50", "Wait p99"):
        number = page.locator(".numbers div", has_text=name)
        expect(number).to_contain_text(re.compile(r"\d"))
    failures = page.get_by_role("table", name="Failures by reason")
    expect(failures).to_contain_text("ZeroDivisionError")
    expect(failures.locator(".reason", has_text="DENIED")).to_have_attribute(
        "title", re.compile("a safety rule refused it")
    )
    expect(page.get_by_role("table", name="Workers")).to_contain_text("slots")
    needs = page.locator(".needs")
    expect(needs).to_contain_text("awaits approval")
    expect(needs).to_contain_text("dead letter")


def test_the_overview_changes_as_jobs_end(open_page, engine: World, jobs: dict[str, Job]) -> None:
    page = open_page("")
    tile = page.locator(".tile.state-SUCCEEDED .number")
    ended = page.locator(".numbers div", has_text="Ended").locator("dd")
    expect(tile).to_have_text(re.compile(r"\d"))
    before, counted = int(tile.inner_text()), int(ended.inner_text())
    for n in range(3):
        engine.wait(engine.submit("job.site.page", {"n": n}))
    expect(tile).to_have_text(str(before + 3))
    expect(ended).to_have_text(str(counted + 3))


def test_failures_lead_to_their_jobs(open_page, jobs: dict[str, Job]) -> None:
    page = open_page("")
    failures = page.get_by_role("table", name="Failures by reason")
    for topic, job in (("job.shell.run", "denied"), ("job.math.divide", "failed")):
        failures.get_by_role("link", name=topic).click()
        rows = page.get_by_role("table", name="Jobs", exact=True).locator("tbody tr")
        expect(rows).to_contain_text(jobs[job].job_id[-8:])
        page.go_back()


def test_the_overview_tells_of_a_rule_file_that_is_broken(open_page, engine: World) -> None:
    page = open_page("")
    needs, rules = page.locator(".needs"), engine.settings.rules
    assert rules is not None
    expect(needs).not_to_contain_text("rule file")
    good = rules.read_text()
    try:
        rules.write_text(good + '\n[[rules]]\nid = "x"\ndecision = "perhaps"\n')
        expect(needs).to_contain_text("The rule file was not accepted", timeout=45_000)
        expect(needs).to_contain_text("perhaps")
        needs.get_by_role("link", name="rule file").click()
        expect(page.get_by_role("alert")).to_contain_text("the last valid rules stay in force")
        expect(page.get_by_role("table", name="Rules")).to_contain_text("no-shell")
    finally:
        rules.write_text(good)
    page.get_by_role("button", name="Reload the rule file").click()
    expect(page.locator("#notices")).to_contain_text("Reloaded")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_overview_tells_of_a_language_engine_that_is_ill(
    open_page, engine: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(*_: object) -> ModelFacts:
        raise EngineUnavailable(LlmCode.OUT_OF_MEMORY, "no memory is left")

    monkeypatch.setattr("penstock.workloads.llm.health._FIRST_DELAY", 0.2)
    monkeypatch.setattr("penstock.workloads.llm.health._LONGEST_DELAY", 0.2)
    page, chat = open_page(""), {"kind": "chat", "messages": [{"role": "user", "content": "hi"}]}
    with monkeypatch.context() as ill:
        ill.setattr(engine.parrot, "load", load)
        job = engine.submit("job.llm.parrot", chat)
        needs = page.locator(".needs")
        expect(needs).to_contain_text("job.llm.parrot can't run: OUT_OF_MEMORY")
        expect(page.get_by_role("link", name="Models 1")).to_be_visible()
        needs.get_by_role("link", name="job.llm.parrot").click()
        expect(page.locator("tbody tr").first).to_contain_text("no memory is left")
        models = open_page("models")
        row = models.locator("tbody tr", has_text="parrot")
        expect(row.locator(".badge")).to_have_text("ILL")
        expect(row).to_contain_text("no memory is left")
    assert engine.wait(job).state is JobState.SUCCEEDED
    expect(row.locator(".badge")).to_have_text("READY")


def test_a_schedule_shows_its_next_times(open_page, jobs: dict[str, Job]) -> None:
    page = open_page("schedules")
    page.get_by_text("then").click()
    expect(page.get_by_role("list", name="Next times of nightly").locator("li")).to_have_count(4)


def test_the_audit_log_is_searched(open_page, jobs: dict[str, Job]) -> None:
    page = open_page("audit")
    page.get_by_label("Action, as key.*").fill("key.*")
    page.get_by_role("button", name="Search").click()
    expect(page).to_have_url(re.compile("action=key"))
    rows = page.locator("tbody tr")
    expect(rows.first).to_contain_text("key.create")
    expect(rows.filter(has_text="schedule.put")).to_have_count(0)


def test_runs_of_a_pipeline_are_small_multiples(open_page, jobs: dict[str, Job]) -> None:
    page = open_page("pipelines")
    for name in ("whole run", "price", "label", "receipt"):
        expect(page.get_by_role("group", name=f"Times of {name}")).to_be_visible()
    page.get_by_role("link", name=re.compile("whole run: PARTIAL")).first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("Retry failed items")


def test_a_job_in_a_spool_is_counted_in_its_folder(open_page, engine: World) -> None:
    page = open_page("spools")
    row = page.locator("tbody tr")
    expect(row).to_contain_text("IDLE")
    queued = engine.spool.counts()[Status.QUEUED]
    expect(cell(row, "input/ready")).to_have_text(str(queued))
    Work(engine.spool.workspace).submit("And another thing.")
    expect(cell(row, "input/ready")).to_have_text(str(queued + 1))
    drawing = page.get_by_role("img", name="The states of a spooled job")
    expect(drawing.locator(".node.on")).to_contain_text(f"QUEUED{queued + 1} jobs")


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


def test_jobs_are_filtered_by_topic_tenant_label_time_and_text(
    open_page, jobs: dict[str, Job]
) -> None:
    page = open_page("jobs?since=1h")
    expect(page.get_by_label("Accepted")).to_have_value("1h")
    rows = page.locator("tbody tr")
    for name, value, job in (
        ("Tenant", "acme", "acme"),
        ("Topic", "job.math.*", "failed"),
        ("Label", "team=red", "shout"),
    ):
        page.get_by_label(name, exact=True).fill(value)
        page.keyboard.press("Enter")
        expect(page.get_by_title("Take this filter away")).to_contain_text(value)
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text(jobs[job].job_id[-8:])
        page.get_by_title("Take this filter away").click()
        expect(page.get_by_title("Take this filter away")).to_have_count(0)
    page.get_by_role("searchbox").fill("divide")  # a part of a topic
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("since=1h&q=divide"))
    expect(rows).to_have_count(1)


def test_text_of_an_error_is_found(open_page, engine: World, jobs: dict[str, Job]) -> None:
    full = engine.wait(engine.submit("job.text.fail", {"text": "the Disk is full"}))
    page = open_page("jobs")
    rows = page.locator("tbody tr")
    for text, job in (
        ("disk IS full", full),
        ("zerodivision", jobs["failed"]),
        (full.job_id[:24], full),  # the beginning of an id comes first
    ):
        page.get_by_role("searchbox").fill(text)
        page.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text(job.job_id[-8:])
    page.get_by_role("searchbox").fill("disk is full")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").first).to_contain_text(
        "that ended without success, with “disk is full”"
    )
    page.get_by_role("button", name="Retry matching …").click()
    expect(page.get_by_role("dialog")).to_contain_text("error=disk is full")
    page.get_by_role("dialog").get_by_role("button", name="Retry 1").click()
    expect(page.locator("#notices")).to_contain_text("1 job of 1 retried")


def test_filters_are_in_the_url_and_stay_after_a_reload(open_page, jobs: dict[str, Job]) -> None:
    page = open_page("jobs")
    page.get_by_role("link", name=re.compile("^TIMEOUT")).click()
    expect(page).to_have_url(re.compile(r"state=TIMEOUT"))
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("/")
    page.keyboard.type("job.text.")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"q=job.text"))
    expect(page.locator("main")).to_contain_text("No job matches")
    expect(page.locator("main")).to_contain_text("does not look into inputs and logs")
    page.reload()
    expect(page.get_by_role("searchbox")).to_have_value("job.text.")
    page.go_back()
    expect(page.locator("tbody tr")).to_have_count(1)
