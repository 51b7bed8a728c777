"""The rules in force are those of their file, or the last good ones."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from penstock.control.rulebook import Rulebook
from penstock.control.safety import SafetyKernel
from penstock.core.errors import Misconfigured
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import a_request

ALLOW, DENY = 'default = "allow"\n', 'default = "deny"\n'
RULE = '[[rules]]\nid = "one"\ndecision = "deny"\n'


class Watched:
    """A rulebook on a file, and what was heard of it."""

    def __init__(self, path: Path, text: str = ALLOW) -> None:
        self.path, self.clock, self.kernel = path, VirtualClock(), SafetyKernel()
        path.write_text(text)
        self.book = Rulebook(self.kernel, path, self.clock)
        self.book.load()
        self.changes: list[str] = []
        self.changed = asyncio.Event()
        self.book.on_change = self._hear

    def _hear(self) -> None:
        self.changes.append(self.said)
        self.changed.set()

    @property
    def said(self) -> str:
        """Which rule speaks, and what it says."""
        verdict = self.kernel.decide(a_request())
        return f"{verdict.decision.value} ({verdict.rule_id})"

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            await self.book.look()


@run_async
async def test_a_changed_file_is_taken_when_it_has_been_still(tmp_path: Path) -> None:
    desk = Watched(tmp_path / "rules.toml")
    desk.path.write_text(DENY)
    await desk.look(1)
    assert desk.said == "allow (default)"
    await desk.look(1)
    assert desk.said == "deny (default)"
    assert desk.changes == ["deny (default)"]


@run_async
async def test_a_file_that_is_half_written_is_not_taken_even_if_it_can_be_read(
    tmp_path: Path,
) -> None:
    desk = Watched(tmp_path / "rules.toml", ALLOW + RULE)
    with desk.path.open("w") as file:
        for piece in (ALLOW, "# more to come\n", RULE.replace("one", "two")):
            file.write(piece)
            file.flush()
            await desk.look(1)
            assert desk.said == "deny (one)"
    await desk.look(1)
    assert desk.said == "deny (two)"
    assert (desk.changes, desk.book.problem) == (["deny (two)"], "")


@run_async
async def test_the_service_looks_by_itself(tmp_path: Path) -> None:
    desk = Watched(tmp_path / "rules.toml")
    service = asyncio.create_task(desk.book.run())
    desk.path.write_text(DENY)
    while not desk.changed.is_set():
        desk.clock.advance(1.0)
        await asyncio.sleep(0.001)  # a thread reads the file
    assert desk.said == "deny (default)"
    service.cancel()
    with pytest.raises(asyncio.CancelledError):
        await service


@run_async
async def test_a_broken_file_leaves_the_last_good_rules_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Watched(tmp_path / "rules.toml", DENY)
    desk.path.write_text(DENY + "oops")
    with caplog.at_level(logging.INFO):
        await desk.look(5)
    assert desk.said == "deny (default)"
    assert "rules.toml, line 2" in desk.book.problem
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert desk.book.problem in record.getMessage()
    assert desk.changes == []


@run_async
async def test_a_file_that_is_mended_clears_the_problem(tmp_path: Path) -> None:
    desk = Watched(tmp_path / "rules.toml", DENY)
    desk.path.write_text("oops")
    await desk.look()
    assert desk.book.problem
    desk.path.write_text(DENY)
    await desk.look()
    assert (desk.book.problem, desk.changes) == ("", [])
    desk.path.write_text("oops")
    await desk.look()
    desk.path.write_text(ALLOW)
    await desk.look()
    assert (desk.book.problem, desk.changes) == ("", ["allow (default)"])


@run_async
async def test_a_file_that_is_gone_leaves_the_last_good_rules_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Watched(tmp_path / "rules.toml", DENY)
    desk.path.unlink()
    await desk.look(5)
    assert len(caplog.records) == 1
    assert desk.said == "deny (default)"
    assert "can't be read" in desk.book.problem
    desk.path.write_text(ALLOW)
    await desk.look()
    assert (desk.said, desk.book.problem) == ("allow (default)", "")


@run_async
async def test_a_file_that_could_not_be_read_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Watched(tmp_path / "rules.toml")
    desk.path.write_text(DENY)

    def fail(path: Path) -> bytes:
        raise Misconfigured("rules: can't be read") from OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.control.rulebook.read_text", fail)
        await desk.look(3)
    assert desk.book.problem == "rules: can't be read"
    await desk.look(1)
    assert (desk.said, desk.book.problem) == ("deny (default)", "")


@run_async
async def test_a_file_that_changes_while_it_is_read_is_not_taken_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Watched(tmp_path / "rules.toml", ALLOW + RULE)

    def late(path: Path) -> bytes:
        text = path.read_bytes()
        path.write_text(DENY + "# and more")
        return text

    desk.path.write_text(ALLOW)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.control.rulebook.read_text", late)
        await desk.look()
        with pytest.raises(Misconfigured, match="changed while it was read"):
            desk.path.write_text(ALLOW)
            await desk.book.reload()
    assert desk.said == "deny (one)"
    await desk.look()
    assert desk.said == "deny (default)"


@run_async
async def test_a_touched_file_with_the_same_text_changes_nothing(tmp_path: Path) -> None:
    desk = Watched(tmp_path / "rules.toml", DENY)
    before = desk.book.loaded_at
    desk.clock.advance(60)
    os.utime(desk.path, (1, 1))
    await desk.look()
    assert (desk.changes, desk.book.loaded_at) == ([], before)


@run_async
async def test_a_file_put_in_place_of_the_old_one_is_seen_though_size_and_time_are_the_same(
    tmp_path: Path,
) -> None:
    desk = Watched(tmp_path / "rules.toml", 'default = "deny"#\n')
    await desk.look(3)
    stat = desk.path.stat()
    new = tmp_path / "new"
    new.write_text('default = "allow"\n')
    os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new.replace(desk.path)
    assert (desk.path.stat().st_size, desk.path.stat().st_mtime_ns) == (
        stat.st_size,
        stat.st_mtime_ns,
    )
    await desk.look()
    assert desk.said == "allow (default)"


@run_async
async def test_a_change_right_after_the_start_is_seen_whatever_the_file_system_s_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.control.rulebook._stamp", lambda path: (1,))
    desk = Watched(tmp_path / "rules.toml")
    desk.path.write_text(DENY)
    await desk.look()
    assert desk.said == "deny (default)"


@run_async
async def test_a_reload_takes_the_file_at_once(tmp_path: Path) -> None:
    desk = Watched(tmp_path / "rules.toml")
    desk.clock.advance(60)
    desk.path.write_text(DENY)
    rules = await desk.book.reload()
    assert rules is desk.kernel.rules
    assert desk.said == "deny (default)"
    assert desk.changes == ["deny (default)"]
    assert desk.book.loaded_at == desk.clock.now()
    await desk.look(3)
    assert len(desk.changes) == 1


@run_async
async def test_a_reload_of_a_broken_file_is_refused_and_keeps_the_last_good_rules(
    tmp_path: Path,
) -> None:
    desk = Watched(tmp_path / "rules.toml", DENY)
    desk.path.write_text('default = "perhaps"')
    with pytest.raises(Misconfigured, match="perhaps"):
        await desk.book.reload()
    assert desk.said == "deny (default)"
    assert "perhaps" in desk.book.problem


@run_async
async def test_reloads_and_looks_at_once_end_with_what_the_file_says(tmp_path: Path) -> None:
    desk = Watched(tmp_path / "rules.toml")
    for text in (DENY, ALLOW, DENY) * 10:
        desk.path.write_text(text)
        await asyncio.gather(desk.look(), desk.book.reload(), desk.look(), desk.book.reload())
        assert desk.said == ("deny" if text == DENY else "allow") + " (default)"


@run_async
async def test_without_a_file_there_is_nothing_to_look_at_or_to_reload() -> None:
    kernel = SafetyKernel()
    book = Rulebook(kernel, None, VirtualClock())
    book.load()
    await book.look()
    assert kernel.built_in
    assert book.source == ""
    with pytest.raises(Misconfigured, match="no rule file: the built-in rules allow everything"):
        await book.reload()


def test_a_broken_file_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"rules\.toml, line 1"):
        Watched(tmp_path / "rules.toml", "oops")
