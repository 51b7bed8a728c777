"""The rules in force are those of their file, or the last good ones."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from penstock.control.policy import Rulebook
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
    api = Watched(tmp_path / "rules.toml")
    api.path.write_text(DENY)
    await api.look(1)
    assert api.said == "allow (default)"
    await api.look(1)
    assert api.said == "deny (default)"
    assert api.changes == ["deny (default)"]


@run_async
async def test_a_file_that_is_half_written_is_not_taken_even_if_it_can_be_read(
    tmp_path: Path,
) -> None:
    api = Watched(tmp_path / "rules.toml", ALLOW + RULE)
    with api.path.open("w") as file:
        for piece in (ALLOW, "# more to come\n", RULE.replace("one", "two")):
            file.write(piece)
            file.flush()
            await api.look(1)
            assert api.said == "deny (one)"
    await api.look(1)
    assert api.said == "deny (two)"
    assert (api.changes, api.book.problem) == (["deny (two)"], "")


@run_async
async def test_the_service_looks_by_itself(tmp_path: Path) -> None:
    api = Watched(tmp_path / "rules.toml")
    service = asyncio.create_task(api.book.run())
    api.path.write_text(DENY)
    while not api.changed.is_set():
        api.clock.advance(1.0)
        await asyncio.sleep(0.001)  # a thread reads the file
    assert api.said == "deny (default)"
    service.cancel()
    with pytest.raises(asyncio.CancelledError):
        await service


@run_async
async def test_a_broken_file_leaves_the_last_good_rules_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api = Watched(tmp_path / "rules.toml", DENY)
    api.path.write_text(DENY + "oops")
    with caplog.at_level(logging.INFO):
        await api.look(5)
    assert api.said == "deny (default)"
    assert "rules.toml: not valid TOML" in api.book.problem
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert api.book.problem in record.getMessage()
    assert api.changes == []


@run_async
async def test_a_file_that_is_mended_clears_the_problem(tmp_path: Path) -> None:
    api = Watched(tmp_path / "rules.toml", DENY)
    api.path.write_text("oops")
    await api.look()
    assert api.book.problem
    api.path.write_text(DENY)
    await api.look()
    assert (api.book.problem, api.changes) == ("", [])
    api.path.write_text("oops")
    await api.look()
    api.path.write_text(ALLOW)
    await api.look()
    assert (api.book.problem, api.changes) == ("", ["allow (default)"])


@run_async
async def test_a_file_that_is_gone_leaves_the_last_good_rules_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api = Watched(tmp_path / "rules.toml", DENY)
    api.path.unlink()
    await api.look(5)
    assert len(caplog.records) == 1
    assert api.said == "deny (default)"
    assert "can't be read" in api.book.problem
    api.path.write_text(ALLOW)
    await api.look()
    assert (api.said, api.book.problem) == ("allow (default)", "")


@run_async
async def test_a_file_that_could_not_be_read_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Watched(tmp_path / "rules.toml")
    api.path.write_text(DENY)

    def fail(path: Path) -> bytes:
        raise Misconfigured("rules: can't be read") from OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.control.policy.read_text", fail)
        await api.look(3)
    assert api.book.problem == "rules: can't be read"
    await api.look()
    assert (api.said, api.book.problem) == ("deny (default)", "")


@run_async
async def test_a_file_that_changes_while_it_is_read_is_not_taken_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Watched(tmp_path / "rules.toml", ALLOW + RULE)

    def late(path: Path) -> bytes:
        text = path.read_bytes()
        path.write_text(DENY + "# and more")
        return text

    api.path.write_text(ALLOW)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.control.policy.read_text", late)
        await api.look()
        with pytest.raises(Misconfigured, match="changed while it was read"):
            api.path.write_text(ALLOW)
            await api.book.reload()
    assert api.said == "deny (one)"
    await api.look()
    assert api.said == "deny (default)"


@run_async
async def test_a_touched_file_with_the_same_text_changes_nothing(tmp_path: Path) -> None:
    api = Watched(tmp_path / "rules.toml", DENY)
    before = api.book.loaded_at
    api.clock.advance(60)
    os.utime(api.path, (1, 1))
    await api.look()
    assert (api.changes, api.book.loaded_at) == ([], before)


@run_async
async def test_a_file_put_in_place_of_the_old_one_is_seen_though_size_and_time_are_the_same(
    tmp_path: Path,
) -> None:
    api = Watched(tmp_path / "rules.toml", 'default = "deny"#\n')
    await api.look(3)
    stat = api.path.stat()
    new = tmp_path / "new"
    new.write_text('default = "allow"\n')
    os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new.replace(api.path)
    assert (api.path.stat().st_size, api.path.stat().st_mtime_ns) == (
        stat.st_size,
        stat.st_mtime_ns,
    )
    await api.look()
    assert api.said == "allow (default)"


@run_async
async def test_a_reload_takes_the_file_at_once(tmp_path: Path) -> None:
    api = Watched(tmp_path / "rules.toml")
    api.clock.advance(60)
    api.path.write_text(DENY)
    rules = await api.book.reload()
    assert rules is api.kernel.rules
    assert api.said == "deny (default)"
    assert api.changes == ["deny (default)"]
    assert api.book.loaded_at == api.clock.now()
    await api.look(3)
    assert len(api.changes) == 1


@run_async
async def test_a_reload_of_a_broken_file_is_refused_and_keeps_the_last_good_rules(
    tmp_path: Path,
) -> None:
    api = Watched(tmp_path / "rules.toml", DENY)
    api.path.write_text('default = "perhaps"')
    with pytest.raises(Misconfigured, match="perhaps"):
        await api.book.reload()
    assert api.said == "deny (default)"
    assert "perhaps" in api.book.problem


@run_async
async def test_reloads_and_looks_at_once_end_with_what_the_file_says(tmp_path: Path) -> None:
    api = Watched(tmp_path / "rules.toml")
    for text in (DENY, ALLOW, DENY) * 10:
        api.path.write_text(text)
        await asyncio.gather(api.look(), api.book.reload(), api.look(), api.book.reload())
        assert api.said == ("deny" if text == DENY else "allow") + " (default)"


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
    with pytest.raises(Misconfigured, match=r"rules\.toml: not valid TOML"):
        Watched(tmp_path / "rules.toml", "oops")
