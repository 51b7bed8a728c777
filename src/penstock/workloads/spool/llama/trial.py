"""Whether llama.cpp can be used here."""

from __future__ import annotations

from importlib import metadata

from penstock.core.llm import LlmCode, LlmFailure

PACKAGE = "xllamacpp"


def engine_version() -> str:
    """As `xllamacpp 2026.10.11549`. Raises LlmFailure if it is not installed. Whether it can be
    loaded is seen when a model is: that is done in a process of its own."""
    try:
        return f"{PACKAGE} {metadata.version(PACKAGE)}"
    except metadata.PackageNotFoundError:
        raise LlmFailure(
            LlmCode.ENGINE_MISSING,
            f"{PACKAGE}, which brings llama.cpp, is not installed: pip install 'penstock[llm]'",
        ) from None
