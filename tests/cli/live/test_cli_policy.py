"""`penstock policy`, with real processes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cli.commands import Penstock
from tests.support.waiting import eventually

RULES = """
default = "allow"

[[rules]]
id = "quiet"
decision = "deny"
topics = ["job.text.shout"]
labels = { loud = "very*" }
env_keys = ["SECRET_*"]
reason = "not so loud"

[[rules]]
id = "slowly"
decision = "throttle"
topics = ["job.text.*"]
rate = "1000/s"
"""
OTHER = 'default = "deny"\n'


@pytest.fixture(scope="module")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    """An engine with rules, and two jobs that it judged."""
    shared = Penstock(tmp_path_factory.mktemp("ruled"))
    (shared.folder / "rules.toml").write_text(RULES)
    (shared.folder / "other.toml").write_text(OTHER)
    with shared.up("--app", "jobs:app", "--rules", "rules.toml"):
        shared.submit("job.text.shout", {"text": "x"}, "--id", "soft", "--wait")
        shared(
            *("submit", "job.text.shout", "--input", '{"text": "x"}', "--id", "loud", "--wait"),
            *("--label", "loud=very-very", "--env", "SECRET_KEY=hush-hush"),
            code=6,
        )
        yield shared


# -- without an engine ----------------------------------------------------------------------


def test_a_good_file_is_shown_as_it_was_understood(penstock: Penstock) -> None:
    (penstock.folder / "rules.toml").write_text(RULES)
    said = penstock.out("policy", "check", "rules.toml").splitlines()
    assert said[0].startswith("rules.toml: 2 rules, snapshot ")
    assert [line.split()[:3] for line in said[2:]] == [
        ["1", "quiet", "deny"],
        ["2", "slowly", "throttle"],
        ["default", "allow", "no"],
    ]
    assert "topics: job.text.shout; labels.loud: very*; env_keys: SECRET_*" in said[2]
    assert "1000/s" in said[3]


def test_a_checked_file_is_json_for_programs(penstock: Penstock) -> None:
    text = RULES + '[[rules]]\nid = "late"\ndecision = "deny"\ntopics = ["job.text.fail"]'
    (penstock.folder / "rules.toml").write_text(text)
    told = penstock.json("policy", "check", "rules.toml")
    assert [rule["id"] for rule in told["rules"]] == ["quiet", "slowly", "late"]
    assert told["default"] == "allow"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("oops\n", "rules rules.toml: not valid TOML: "),
        (
            RULES.replace("1000/s", "fast"),
            "rule 2 (slowly): rate: 'fast' is not a rate",
        ),
    ],
)
@pytest.mark.parametrize("command", ["check", "simulate"])
def test_a_wrong_file_is_refused_before_anything_else(
    penstock: Penstock, command: str, text: str, said: str
) -> None:
    (penstock.folder / "rules.toml").write_text(text)
    assert said in penstock.err("policy", command, "rules.toml", code=2)


def test_a_file_that_is_not_there_is_named(penstock: Penstock) -> None:
    assert "rules nowhere.toml: can't be read" in penstock.err(
        "policy", "check", "nowhere.toml", code=2
    )


@pytest.mark.parametrize("args", [("show",), ("reload",), ("explain", "x")])
def test_the_rules_in_force_need_an_engine(penstock: Penstock, args: tuple[str, ...]) -> None:
    penstock.err("policy", *args, code=8)


def test_an_engine_does_not_start_with_a_wrong_file(penstock: Penstock) -> None:
    (penstock.folder / "rules.toml").write_text(RULES.replace("very*", "[very"))
    assert "rule 1 (quiet): labels.loud: '[very' has a '['" in penstock.err(
        "up", "--rules", "rules.toml", code=2
    )


# -- with one -------------------------------------------------------------------------------


def test_a_job_s_verdict_is_explained_step_by_step(ruled: Penstock) -> None:
    said = ruled.out("policy", "explain", "loud")
    assert "judged  deny by rule quiet of " in said
    assert ": not so loud" in said
    assert "✓  very*" in said
    assert "SECRET_KEY" in said
    assert "hush" not in said
    assert "slowly" not in said


def test_an_explanation_for_programs_has_then_now_and_the_trace(ruled: Penstock) -> None:
    told = ruled.json("policy", "explain", "soft")
    assert (told["then"]["rule_id"], told["now"]["rule_id"]) == ("slowly", "slowly")
    quiet, slowly = told["trace"]
    assert (quiet["matched"], slowly["matched"]) == (False, True)
    found = {entry["field"]: entry["matched"] for entry in quiet["conditions"]}
    assert found == {"topics": True, "labels.loud": False, "env_keys": False}


def test_no_job_no_explanation(ruled: Penstock) -> None:
    assert "no job 'nobody'" in ruled.err("policy", "explain", "nobody", code=3)


def test_a_simulation_shows_what_would_differ(ruled: Penstock) -> None:
    said = ruled.out("policy", "simulate", "other.toml").splitlines()
    assert said[0].startswith("2 jobs by rules ")
    assert said[0].endswith(": deny 2")
    assert said[1] == "1 job would be judged otherwise"
    assert said[4].split() == [
        *("soft", "job.text.shout"),
        *("throttle", "1000/s", "(slowly)", "deny", "(default)"),
    ]
    assert ruled.json("policy", "simulate", "other.toml", "--limit", "1")["looked_at"] == 1
    same = ruled.out("policy", "simulate", "rules.toml")
    assert same.endswith("none would be judged otherwise")


def test_colours_tell_decisions_apart_in_a_terminal(ruled: Penstock) -> None:
    ours, theirs = pty.openpty()
    environ = {k: v for k, v in ruled.env.items() if k != "NO_COLOR"}
    command = [sys.executable, "-m", "penstock.cli", "policy", "explain", "loud"]
    with subprocess.Popen(
        command,
        cwd=ruled.folder,
        env={**environ, "TERM": "xterm-256color", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
    ):
        os.close(theirs)
        said = b""
        while piece := _read(ours):
            said += piece
    os.close(ours)
    assert b"\x1b[1;31mdeny\x1b[0m" in said
    assert "\x1b[32m✓\x1b[0m".encode() in said


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


def test_a_changed_file_holds_after_a_reload_and_a_wrong_one_is_told_of(penstock: Penstock) -> None:
    path = penstock.folder / "rules.toml"
    path.write_text(RULES)
    with penstock.up("--app", "jobs:app", "--rules", "rules.toml"):
        before = penstock.json("policy", "show")
        assert [rule["id"] for rule in before["rules"]] == ["quiet", "slowly"]
        assert before["source"] == str(path.resolve())
        path.write_text(OTHER)
        after = penstock.json("policy", "reload")
        assert (after["rules"], after["default"]) == ([], "deny")
        penstock("submit", "job.text.shout", "--input", '{"text": "x"}', "--wait", code=6)
        path.write_text("oops")
        assert "not valid TOML" in penstock.err("policy", "reload", code=2)
        shown = penstock("policy", "show")
        assert after["snapshot"] in shown.stdout
        assert "was not accepted: rules" in shown.stderr


def test_a_changed_file_is_taken_without_being_told(penstock: Penstock) -> None:
    path: Path = penstock.folder / "rules.toml"
    path.write_text('default = "allow"')
    with penstock.up("--app", "jobs:app", "--rules", "rules.toml"):
        path.write_text(OTHER)
        eventually(lambda: penstock.json("policy", "show")["default"] == "deny")
        penstock("submit", "job.text.shout", "--input", '{"text": "x"}', "--wait", code=6)


def test_without_a_rule_file_show_and_reload_say_so(running: Penstock) -> None:
    assert running.out("policy", "show").startswith("built-in: no rule file is set")
    assert "there is no rule file" in running.err("policy", "reload", code=2)
