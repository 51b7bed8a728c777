"""Whether llama.cpp can be used here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import metadata

import msgspec

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.spool.llama import child, reasons

PACKAGE = "xllamacpp"
_PATIENCE = 60.0
"""Seconds that loading the library may take on a busy machine."""


def engine_version() -> str:
    """As `xllamacpp 2026.10.11549`. Raises LlmFailure if it is not installed. Whether it can be
    loaded is seen when a model is: that is done in a process of its own."""
    try:
        return f"{PACKAGE} {metadata.version(PACKAGE)}"
    except metadata.PackageNotFoundError:
        raise reasons.of_import(f"No module named {PACKAGE!r}") from None


def check_engine() -> str:
    """Its version, after it was loaded in a process of its own; takes a second or so. Raises
    LlmFailure, which says what is missing and how to get it."""
    version = engine_version()
    with tempfile.TemporaryDirectory(prefix="penstock-llm-check-") as folder:
        command = [sys.executable, "-P", child.__file__, folder, child.CHECK]
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE
            )
        except subprocess.TimeoutExpired:
            raise LlmFailure(
                LlmCode.ENGINE_ERROR, f"llama.cpp was not loaded within {_PATIENCE:g} seconds"
            ) from None
    for line in ended.stdout.splitlines():
        try:
            said = msgspec.json.decode(line, type=dict[str, str])
        except msgspec.DecodeError:
            continue
        if said.get("event") == "missing":
            raise reasons.of_import(said.get("why", ""))
        return version
    raise reasons.of_child(ended.returncode, ended.stderr.decode(errors="replace").splitlines())
