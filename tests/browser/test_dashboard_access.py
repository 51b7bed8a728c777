"""Names, roles and contrast on every page, light and dark, by axe-core; and its words."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import expect

from penstock.core.job import Job
from penstock.dashboard.colours import COLOURS, LIKE
from penstock.dashboard.files import file_at
from penstock.dashboard.vocabulary import LIFECYCLES, stylesheet
from penstock.lifecycles.canonical import JobState

PATHS = ["", "jobs", "approvals", "pipelines", "schedules", "submit", "chat", "workers", "models"]
PATHS += ["containers", "policy", "keys", "audit", "@shout", "@failed", "@mail", "@pipeline"]
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def axe() -> str:
    found = find_spec("axe_playwright_python")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).with_name("axe.min.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PATHS)
def test_no_rule_of_axe_is_broken(path: str, scheme: str, open_page, jobs: dict[str, Job]) -> None:
    real = f"jobs/{jobs[path[1:]].job_id}" if path.startswith("@") else path
    page = open_page(real, color_scheme=scheme, reduced_motion="reduce")
    expect(page.locator("#live")).to_have_text("Live")
    page.evaluate(axe())
    broken = page.evaluate(
        "() => axe.run().then(found => found.violations.map("
        "one => `${one.id}: ${one.nodes.map(node => node.target).join(' ')}`))"
    )
    assert broken == []


@pytest.mark.parametrize("path", PATHS)
def test_a_phone_shows_all_without_scrolling_sideways(
    path: str, open_page, jobs: dict[str, Job]
) -> None:
    real = f"jobs/{jobs[path[1:]].job_id}" if path.startswith("@") else path
    page = open_page(real, **PHONE)
    expect(page.locator("main h1")).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="Menu").click()
    expect(page.get_by_role("link", name="Jobs", exact=True)).to_be_visible()


def test_terms_are_those_of_the_glossary() -> None:
    words = file_at("static/words.js")
    assert words is not None
    block = words.content.decode().partition("export const TERMS = {")[2].partition("};")[0]
    terms = re.findall(r'^  "?([a-z ]+)"?: "(.*)",$', block, re.M)
    assert len(terms) > 20
    text = Path("docs/glossary.md").read_text("utf-8").replace("*", "").replace("`", "")
    glossary = " ".join(text.split())
    for term, sentence in terms:
        assert f"{term}: {sentence}" in glossary, term


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
