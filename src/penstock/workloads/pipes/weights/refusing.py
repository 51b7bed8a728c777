"""Why a model's files are not taken, in one tone."""

from __future__ import annotations

from pathlib import Path

from penstock.workloads.llm.values import LlmCode, LlmFailure


def not_found(path: Path, why: str) -> LlmFailure:
    return LlmFailure(LlmCode.MODEL_NOT_FOUND, f"{path} {why}", path=str(path))


def invalid(path: Path, why: str) -> LlmFailure:
    return LlmFailure(LlmCode.MODEL_INVALID, f"{path} {why}", path=str(path))


def not_supported(path: Path, why: str) -> LlmFailure:
    return LlmFailure(LlmCode.NOT_SUPPORTED, f"{path} {why}", path=str(path))
