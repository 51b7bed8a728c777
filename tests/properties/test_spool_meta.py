"""Whatever is in metadata, it is valid JSON, one key a line, and comes back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.spool.disk.job import Meta, encode_meta

_text = st.text(max_size=30)
_metas = st.builds(
    Meta,
    submitted_at=_text,
    parent=_text,
    tags=st.lists(_text, max_size=4).map(tuple),
    artifacts=st.lists(_text, max_size=4).map(tuple),
    duration_s=st.none() | st.floats(),
    status=st.sampled_from(["", "done", "failed"]),
    model=_text,
    engine=st.text(st.characters(codec=None), max_size=30),
    seed=st.none() | st.integers(-(2**63), 2**64),
    other=st.dictionaries(_text.filter(lambda name: name not in Meta.__struct_fields__), _text),
)


@pytest.mark.seed("004", "14.10")
@given(_metas)
def test_metadata_is_always_valid_json_with_each_key_on_its_line(meta: Meta) -> None:
    written = encode_meta(meta).decode()
    found = json.loads(written)
    lines = written.split("\n")
    assert lines[0] == "{"
    assert lines[-2:] == ["}", ""]
    assert len(lines) == len(found) + 3
    assert all(line.startswith('  "') for line in lines[1:-2])
    assert found["submitted_at"] == meta.submitted_at
    assert found.get("tags", []) == list(meta.tags)
    assert found.get("engine", "") == meta.engine.encode(errors="replace").decode()
    assert all(found[name] == value for name, value in meta.other.items())
