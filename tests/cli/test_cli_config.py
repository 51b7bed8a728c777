"""`penstock config show`: every setting, its value and where that comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cli.exits import Exit
from penstock.cli.program import run
from penstock.config.loading import TYPES

FILE = """
concurrency = 8
store = "postgresql://ada:swordfish@db/penstock?password=swordfish"

[node]
key = "swordfish"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    (tmp_path / "penstock.toml").write_text(FILE)
    monkeypatch.setenv("PENSTOCK_HTTP__LISTEN", "127.0.0.1:7471")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, Any]]:
    assert run(["config", "show", "--json", *args]) == Exit.OK
    return {one["name"]: one for one in msgspec.json.decode(capsys.readouterr().out)}


def test_every_setting_tells_its_value_and_its_source(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shown(capsys, "--data", str(folder / "here"))
    assert [*found] == [*TYPES]
    sources = {name: (one["source"], one["origin"]) for name, one in found.items()}
    assert sources["concurrency"] == ("file", "penstock.toml, line 2")
    assert sources["http.listen"] == ("environment", "PENSTOCK_HTTP__LISTEN")
    assert sources["data_dir"] == ("option", "option data_dir")
    assert sources["timeouts.lease"] == ("default", "")
    assert (found["concurrency"]["value"], found["concurrency"]["default"]) == (8, 32)
    assert found["data_dir"]["value"] == str(folder / "here")


def test_no_form_of_the_settings_has_a_secret(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ("table", "wide", "name", "json"):
        assert run(["config", "show", "-o", form]) == Exit.OK
        told = capsys.readouterr()
        assert "swordfish" not in told.out + told.err
    found = shown(capsys, "store", "node.key")
    assert found["store"]["value"] == "postgresql://ada:********@db/penstock?password=********"
    assert found["node.key"]["value"] == "********"


def test_a_section_a_glob_or_what_was_changed_is_shown_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {name.partition(".")[0] for name in shown(capsys, "http")} == {"http"}
    assert set(shown(capsys, "*.lease")) == {"timeouts.lease", "node.lease"}
    assert set(shown(capsys, "--changed")) == {"concurrency", "store", "node.key", "http.listen"}
    assert run(["config", "show", "htp"]) == Exit.NOT_FOUND
    assert "did you mean http?" in capsys.readouterr().err


def test_a_wrong_setting_is_refused_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "penstock.toml").write_text("concurency = 8")
    assert run(["config", "show"]) == Exit.USAGE
    told = capsys.readouterr().err
    assert "penstock.toml, line 1" in told
    assert "did you mean concurrency?" in told


def test_a_variable_that_is_not_a_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVICE_HOST", "10.0.0.1")
    assert run(["config", "show", "--changed"]) == Exit.OK
    assert "not settings, so ignored: PENSTOCK_SERVICE_HOST" in capsys.readouterr().err
