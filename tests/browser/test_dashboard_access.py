"""Names, roles and contrast on every page, light and dark, by axe-core; and its words."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from penstock.core.job import Job
from penstock.dashboard.colours import COLOURS, LIKE
from penstock.dashboard.files import file_at
from penstock.dashboard.vocabulary import LIFECYCLES, stylesheet
from penstock.lifecycles.canonical import JobState

PATHS = ["", "jobs", "approvals", "pipelines", "schedules", "submit", "chat", "workers", "models"]
PATHS += ["containers", "spools", "policy", "keys", "audit", "submit?topic=job.text.shout"]
PATHS += ["@shout", "@failed", "@mail", "@pipeline", "@split", "@denied"]
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def axe() -> str:
    found = find_spec("axe_playwright_python")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).with_name("axe.min.js").read_text()


def path_of(path: str, jobs: dict[str, Job]) -> str:
    return f"jobs/{jobs[path[1:]].job_id}" if path.startswith("@") else path


def broken(page: Page) -> list[str]:
    """The rules of axe that a page breaks, in both colour schemes."""
    page.evaluate(axe())
    found: list[str] = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        found += page.evaluate(
            "() => axe.run().then(found => found.violations.map("
            "one => `${one.id}: ${one.nodes.map(node => node.target).join(' ')}`))"
        )
    return found


@pytest.mark.parametrize("path", PATHS)
def test_no_rule_of_axe_is_broken(path: str, open_page, jobs: dict[str, Job]) -> None:
    page = open_page(path_of(path, jobs))
    expect(page.locator("#live")).to_have_text("Live")
    assert broken(page) == []


def test_no_rule_of_axe_is_broken_by_dialogs_and_the_sign_in_form(
    open_page, jobs: dict[str, Job]
) -> None:
    page = open_page("jobs")
    page.get_by_role("button", name="Cancel matching …").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert broken(page) == []
    stranger = open_page("", key=None)
    expect(stranger.get_by_label("API key")).to_be_visible()
    assert broken(stranger) == []


SHOWN = ".badge, .reason, .tile, .chips [class*=state-], .numbers > div, th.number, .facts > div"
UNEXPLAINED = """(shown) => [...document.querySelectorAll(shown)]
  .filter(one => !one.closest('[title]'))
  .filter(one => !one.matches('.facts > div') || /^[+\\d]/.test(one.lastChild.textContent))
  .map(one => one.textContent)"""


@pytest.mark.parametrize("path", PATHS)
def test_states_reasons_and_numbers_are_explained_on_hover(
    path: str, open_page, jobs: dict[str, Job]
) -> None:
    page = open_page(path_of(path, jobs))
    expect(page.locator("#live")).to_have_text("Live")
    assert page.evaluate(UNEXPLAINED, SHOWN) == []


@pytest.mark.parametrize("path", PATHS)
def test_a_phone_shows_all_without_scrolling_sideways(
    path: str, open_page, jobs: dict[str, Job]
) -> None:
    page = open_page(path_of(path, jobs), **PHONE)
    expect(page.locator("main h1")).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="Menu").click()
    expect(page.get_by_role("link", name="Jobs", exact=True)).to_be_visible()


def test_a_tap_explains_where_nothing_can_be_hovered_over(open_page, jobs: dict[str, Job]) -> None:
    page = open_page(f"jobs/{jobs['shout'].job_id}", **PHONE)
    page.locator("h1 .badge").tap()
    expect(page.locator("#notices")).to_contain_text("Ended with a result")
    page.locator(".facts div", has_text="Priority").tap()
    expect(page.locator("#notices")).to_contain_text("the head start that a job has in the queue")


def block(name: str) -> str:
    words = file_at("static/words.js")
    assert words is not None
    return words.content.decode().partition(f"export const {name} = {{")[2].partition("\n};")[0]


def plain(text: str) -> str:
    """Without the marks of Markdown."""
    return " ".join(
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("*", "").replace("`", "").split()
    )


def test_terms_are_those_of_the_glossary() -> None:
    terms = re.findall(r'^  "?([a-z0-9 ]+)"?: "(.*)",$', block("TERMS"), re.M)
    assert len(terms) > 50
    glossary = plain(Path("docs/glossary.md").read_text("utf-8"))
    for term, sentence in terms:
        assert f"{term}: {sentence}" in glossary, term


def test_states_of_other_things_are_those_of_the_glossary() -> None:
    told = {
        (kind, state, meaning)
        for kind, states in re.findall(r"^  (\w+): \{(.*)\},$", block("STATUSES"), re.M)
        for state, meaning in re.findall(r'(\w+): "([^"]*)"', states)
    }
    rows = re.findall(
        r"^\| (\w+) \| ([A-Z_]+) \| (.*) \|$", Path("docs/glossary.md").read_text("utf-8"), re.M
    )
    assert told == set(rows)


def codes(page: str, columns: int) -> dict[str, str]:
    """What a page says of each error code, in tables whose last of `columns` columns says it."""
    found: dict[str, str] = {}
    for line in Path("docs", page).read_text("utf-8").partition("## Item")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) >= columns and re.fullmatch(r"(`[A-Z_]+`(, )?)+", cells[0]):
            for code in re.findall(r"\w+", cells[0]):
                found.setdefault(code, plain(cells[columns - 1].rstrip("| ")))
    return found


def test_reasons_are_those_of_the_pages_of_error_codes() -> None:
    told = dict(re.findall(r'^  (\w+): "(.*)",$', block("REASONS"), re.M))
    models = codes("how-to/language-models.md", 2)
    containers = codes("reference/containers.md", 3)
    assert told == models | containers | codes("reference/error-codes.md", 3)
    assert {"OOM_KILLED", "NODE_LOST", "WORKER_LOST"} <= told.keys()


def test_every_state_has_a_colour_that_can_be_read() -> None:
    assert list(COLOURS) == list(JobState)
    for colour in COLOURS.values():
        for ground in ("#ffffff", "#f6f8fa"):
            assert contrast(colour.light, ground) >= 4.5
        for ground in ("#0d1117", "#161b22"):
            assert contrast(colour.dark, ground) >= 4.5


def test_every_state_of_every_lifecycle_has_a_colour() -> None:
    css = stylesheet().decode()
    for machine in LIFECYCLES.values():
        for state in machine.states:
            assert f".state-{state.upper()}" in css, state
    names = [name for names in LIKE.values() for name in names]
    assert len(names) == len(set(names))


def contrast(one: str, other: str) -> float:
    """By WCAG 2: from 1 to 21."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
