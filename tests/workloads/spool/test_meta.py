"""meta.json, options.json and type.txt: in the original's form, and whatever is in them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.job import Priority
from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.config import JobKind, SpoolOptions, Sync
from penstock.workloads.spool.disk.files import Unfit
from penstock.workloads.spool.disk.job import (
    OPTIONS,
    Meta,
    checked,
    encode_meta,
    encode_options,
    read_kind,
    read_meta,
    read_options,
    seen_meta,
    stamp,
    time_of,
    write_meta,
)


def test_a_new_job_s_metadata_is_written_as_the_original_writes_it() -> None:
    meta = Meta(submitted_at=stamp(1736700000.123456), mode=JobKind.VISION)
    assert encode_meta(meta) == (
        b'{\n  "submitted_at": "2025-01-12T16:40:00.123456Z",\n  "mode": "vision"\n}\n'
    )


def test_an_ended_job_s_metadata_is_written_as_the_original_writes_it() -> None:
    meta = Meta(
        submitted_at="s",
        parent="1_2_3",
        tags=("a", "b-c"),
        completed_at="c",
        duration_s=1.5,
        artifacts=("result.txt",),
        status="done",
    )
    assert encode_meta(meta).decode().splitlines() == [
        "{",
        '  "submitted_at": "s",',
        '  "mode": "text",',
        '  "parent": "1_2_3",',
        '  "tags": ["a", "b-c"],',
        '  "completed_at": "c",',
        '  "duration_s": 1.50,',
        '  "artifacts": ["result.txt"],',
        '  "status": "done"',
        "}",
    ]


def test_a_failed_job_has_all_the_keys_that_the_original_looks_for() -> None:
    written = encode_meta(Meta(status="failed")).decode()
    for key in ("completed_at", "duration_s", "artifacts", "status"):
        assert f'"{key}": ' in written
    assert json.loads(written)["duration_s"] == 0


def test_what_is_ours_follows_what_the_original_knows() -> None:
    written = encode_meta(Meta(status="done", seed=0, code="X", cached_tokens=0)).decode()
    assert written.index('"status"') < written.index('"code"') < written.index('"seed": 0')
    assert '"cached_tokens": 0' in written
    assert "prompt_tokens" not in written


def _as_the_original_reads(written: str, key: str) -> str:
    """It knows no JSON: it looks for the key, and reads on to where the value must end."""
    found = written.split(f'"{key}": ', 1)[1]
    if found.startswith('"'):
        return found[1:].split('"', 1)[0]
    if found.startswith("["):
        return found[1:].split("]", 1)[0]
    return found.split(",", 1)[0].split("\n", 1)[0]


def test_the_original_finds_every_key_that_it_knows_whatever_else_is_there() -> None:
    meta = Meta(
        submitted_at=stamp(0),
        mode=JobKind.EMBED,
        parent="1_2_3",
        tags=("a", "b"),
        completed_at=stamp(1),
        duration_s=0.126,
        artifacts=("embedding.json",),
        status="done",
        model='"status": "failed"',
        other={"note": '"mode": "tts"', "mine": {"status": "x"}},
    )
    written = encode_meta(meta).decode()
    read = {key: _as_the_original_reads(written, key) for key in Meta.__struct_fields__[:8]}
    assert read == {
        "submitted_at": "1970-01-01T00:00:00.000000Z",
        "mode": "embed",
        "parent": "1_2_3",
        "tags": '"a", "b"',
        "completed_at": "1970-01-01T00:00:01.000000Z",
        "duration_s": "0.13",
        "artifacts": '"embedding.json"',
        "status": "done",
    }


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
def test_a_number_that_json_has_no_word_for_is_still_valid_json(number: float) -> None:
    meta = Meta(duration_s=number, tokens_per_second=number, status="done")
    assert json.loads(encode_meta(meta))["duration_s"] == 0


def test_metadata_comes_back_as_it_was(tmp_path: Path) -> None:
    meta = Meta(
        submitted_at=stamp(1.0),
        tags=("x",),
        retry_of="1_2_3",
        model="smol.lm",
        engine='a "quoted" \x01 engine ü',
        prompt_tokens=3,
        tokens_per_second=2.25,
        seed=-1,
        other={"theirs": [1.23456, {"deep": None}]},
    )
    write_meta(tmp_path, meta, Sync.NONE)
    assert read_meta(tmp_path) == meta
    assert os.listdir(tmp_path) == ["meta.json"]


def test_without_its_file_metadata_is_empty(tmp_path: Path) -> None:
    assert read_meta(tmp_path) == Meta()


def test_another_program_s_metadata_is_kept_when_it_is_rewritten(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"submitted_at":"s","mode":"text","colour":"red"}')
    write_meta(tmp_path, read_meta(tmp_path), Sync.NONE)
    assert json.loads((tmp_path / "meta.json").read_text())["colour"] == "red"


def test_null_is_as_good_as_missing(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"parent": null, "tags": null, "duration_s": null}')
    assert read_meta(tmp_path) == Meta()


_BROKEN = {
    "no JSON": b"{nonsense",
    "nothing": b"",
    "a list": b"[1, 2]",
    "not UTF-8": b'{"mode": "\xff"}',
    "cut off": b'{"submitted_at": "2025',
    "tags that are none": b'{"tags": 5}',
    "a duration that is none": b'{"duration_s": "long"}',
    "a parent that is a number": b'{"parent": [1]}',
    "as deep as a well": b'{"x": ' + b"[" * 100_000,
    "endless": b" " * (2 << 20),
}


@pytest.mark.parametrize("data", _BROKEN.values(), ids=_BROKEN)
def test_metadata_that_can_t_be_is_unfit_and_says_so(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "meta.json").write_bytes(data)
    with pytest.raises(Unfit, match=r"meta\.json: "):
        read_meta(tmp_path)
    assert seen_meta(tmp_path) == Meta()


@pytest.mark.parametrize("time", [0.0, 1736700000.123456, 4102444800.5])
def test_times_come_back(time: float) -> None:
    assert time_of(stamp(time)) == pytest.approx(time, abs=1e-6)
    assert time_of("yesterday") is None


def test_the_kind_is_the_first_word_of_its_file(tmp_path: Path) -> None:
    assert read_kind(tmp_path) is JobKind.TEXT
    (tmp_path / "type.txt").write_text("")
    assert read_kind(tmp_path) is JobKind.TEXT
    (tmp_path / "type.txt").write_text("embed\nand more")
    assert read_kind(tmp_path) is JobKind.EMBED


def test_an_unknown_kind_is_unfit_and_the_known_are_named(tmp_path: Path) -> None:
    (tmp_path / "type.txt").write_bytes(b"dance\xff")
    with pytest.raises(Unfit, match="text, embed, vision, tts"):
        read_kind(tmp_path)


def test_options_come_back_as_they_were(tmp_path: Path) -> None:
    options = SpoolOptions(
        model="m",
        sampling=Sampling(temperature=0.0, seed=7),
        stop=("\n",),
        schema={"type": "object"},
        priority=Priority.INTERACTIVE,
        deadline=5.0,
    )
    (tmp_path / OPTIONS).write_bytes(encode_options(options))
    assert read_options(tmp_path) == options


def test_without_its_file_options_are_the_defaults(tmp_path: Path) -> None:
    assert read_options(tmp_path) == SpoolOptions()


_IMPOSSIBLE = {
    "no JSON": "{",
    "an unknown field": '{"temprature": 1}',
    "too hot": '{"sampling": {"temperature": 50}}',
    "no tokens": '{"max_tokens": 0}',
    "a word for a number": '{"max_tokens": "many"}',
    "an empty stop": '{"stop": [""]}',
    "a priority that is none": '{"priority": "now!"}',
    "a schema and a grammar": '{"schema": {}, "grammar": "x"}',
    "raw with a system prompt": '{"raw": true, "system": "s"}',
    "no time at all": '{"timeout": 0}',
    "deep": '{"schema": ' + '{"a":' * 100_000,
}


@pytest.mark.parametrize("text", _IMPOSSIBLE.values(), ids=_IMPOSSIBLE)
def test_options_that_ask_for_the_impossible_are_unfit(tmp_path: Path, text: str) -> None:
    (tmp_path / "options.json").write_text(text)
    with pytest.raises(Unfit, match=r"options\.json: "):
        read_options(tmp_path)


_MADE = {
    "no tokens": SpoolOptions(max_tokens=0),
    "a deadline that never comes": SpoolOptions(deadline=math.nan),
    "a temperature that is no number": SpoolOptions(sampling=Sampling(temperature=math.nan)),
    "a schema that is no JSON": SpoolOptions(schema={"x": object()}),
    "a system prompt that is no text": SpoolOptions(system="\udc80"),
}


@pytest.mark.parametrize("options", _MADE.values(), ids=_MADE)
def test_options_made_in_a_program_are_checked_as_those_in_a_file(options: SpoolOptions) -> None:
    with pytest.raises(InvalidRequest, match="options: "):
        checked(options)
