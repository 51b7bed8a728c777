"""Whether llama.cpp can be loaded here, and what is said where it can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.adapters.llama import process
from penstock.workloads.llm.values import LlmCode, LlmFailure

# What an empty Debian does: the linker finds no OpenMP library unless somebody says where one is.
WITHOUT_OPENMP = """
import os, pathlib
places = os.environ.get("LD_LIBRARY_PATH", "").split(":")
if not any(pathlib.Path(place, "libgomp.so.1").exists() for place in places if place):
    raise ImportError("libgomp.so.1: cannot open shared object file: No such file or directory")
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with packages, that is looked at first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(process, "engine_version", lambda: "xllamacpp 1")
    return tmp_path


def test_an_openmp_library_that_another_package_brings_is_used(site: Path) -> None:
    (site / "xllamacpp.py").write_text(WITHOUT_OPENMP)
    (site / "some.libs").mkdir()
    (site / "some.libs" / "libgomp-abc.so.1.0.0").touch()
    assert process.check_engine() == "xllamacpp 1"


def test_without_any_it_says_how_to_get_one(site: Path) -> None:
    (site / "xllamacpp.py").write_text("raise ImportError('libgomp.so.1: cannot open it')")
    with pytest.raises(LlmFailure, match="apt-get install libgomp1") as missing:
        process.check_engine()
    assert missing.value.code is LlmCode.ENGINE_MISSING


def test_what_dies_while_it_is_loaded_is_told(site: Path) -> None:
    (site / "xllamacpp.py").write_text("import os; print('noise', flush=True); os._exit(3)")
    with pytest.raises(LlmFailure, match="status 3"):
        process.check_engine()
