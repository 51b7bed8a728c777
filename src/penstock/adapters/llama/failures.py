"""Why an engine did not do it: from what it wrote, how it ended, or what it replied."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.workloads.llm.values import LlmCode, LlmFailure

if TYPE_CHECKING:
    from penstock.adapters.llama.process import EngineSpec

_NO_MEMORY = re.compile(
    r"failed to allocate|unable to allocate|cannot allocate|bad_alloc|out of memory|ENOMEM", re.I
)
_PREFIX = re.compile(r"^(?:[\d.]+ [A-Z] +)?(?:srv +\w+: |[a-z]+(?:_[a-z]+)+: )*")
"""Time, level, and which function of llama.cpp said it."""
_LOADING = re.compile(r"error loading model: (.*)")
_WORDY = re.compile(r"^Unable to generate parser for this template\. .*?: ")
_TOO_LARGE = re.compile(r"input \((\d+) tokens\) is too large.*batch size: (\d+)")
_GONE = re.compile(r"No such file or directory")
_GRAMMAR = re.compile(r"grammar|json.?schema|unrecognized type|samplers", re.I)
_LESS = "take a smaller model, a shorter context or fewer slots"
_LAST = 3
"""Lines of standard error that are told of a death."""


def of_import(why: str) -> LlmFailure:
    """llama.cpp can't be loaded at all."""
    if "libgomp" in why:
        return LlmFailure(
            LlmCode.ENGINE_MISSING,
            "llama.cpp needs the OpenMP library libgomp.so.1, which is not installed:"
            " apt-get install libgomp1 (Debian, Ubuntu) or dnf install libgomp (Fedora);"
            " without root, pip install scikit-learn brings a copy that is used instead",
        )
    if "No module named" in why:
        return LlmFailure(
            LlmCode.ENGINE_MISSING,
            "xllamacpp, which brings llama.cpp, is not installed: pip install 'penstock[llm]'",
        )
    return LlmFailure(LlmCode.ENGINE_MISSING, f"llama.cpp can't be loaded here: {why}")


def of_child(status: int, errors: Iterable[str]) -> LlmFailure:
    """Our own part of the process failed: as with a version of the engine that we don't know."""
    return LlmFailure(
        LlmCode.ENGINE_ERROR,
        f"the engine can't be started (status {status}): {_last(errors) or 'it said nothing'}",
    )


def of_loading(
    spec: EngineSpec, status: int, errors: Iterable[str], killed_for_memory: bool
) -> LlmFailure:
    """A model can't be loaded: the process ended before it was ready."""
    text = "\n".join(errors)
    said = text if status > 0 else _last(errors, 1)  # it did nothing but load
    if _is_for_memory(status, killed_for_memory, said):
        return LlmFailure(
            LlmCode.OUT_OF_MEMORY,
            f"there was not enough memory to load the model {spec.model}: {_LESS}",
        )
    if _GONE.search(text):
        return LlmFailure(LlmCode.MODEL_NOT_FOUND, f"there is no file {spec.path}")
    if found := _LOADING.search(text):
        why = cleaned(found[1])
        return LlmFailure(
            LlmCode.MODEL_INVALID, f"the file of the model {spec.model} can't be read: {why}"
        )
    if status < 0:
        return _crash(spec.model, status, errors)
    return LlmFailure(
        LlmCode.MODEL_INVALID,
        f"the model {spec.model} can't be loaded: {_last(errors) or 'no reason was given'}",
    )


def of_death(model: str, status: int, errors: Iterable[str], killed_for_memory: bool) -> LlmFailure:
    """The process ended while answers were under way. `killed_for_memory` says whether the kernel
    killed a process of its group for memory while this one was at work."""
    if _is_for_memory(status, killed_for_memory, _last(errors, 1)):
        return LlmFailure(
            LlmCode.ENGINE_CRASHED,
            f"the engine of {model} ran out of memory while it answered: {_LESS}",
            status=status,
            memory=True,
        )
    return _crash(model, status, errors)


def of_reply(status: int, reply: Mapping[str, Any], *, is_constrained: bool) -> LlmFailure:
    """llama.cpp refused; `is_constrained` if the answer was to follow a schema or a grammar."""
    error = reply.get("error", reply)
    message = cleaned(str(error.get("message", reply)))
    if error.get("type") == "exceed_context_size_error":
        return over_context(int(error["n_prompt_tokens"]), int(error["n_ctx"]))
    if found := _TOO_LARGE.search(message):
        return over_context(int(found[1]), int(found[2]))
    if is_constrained and _GRAMMAR.search(message):
        why = _WORDY.sub("", message)
        return LlmFailure(LlmCode.INVALID_SCHEMA, f"invalid JSON schema or grammar: {why}")
    if status == 501 or "not supported" in message:
        return LlmFailure(LlmCode.NOT_SUPPORTED, message)
    if status == 400 or "template" in message.lower() or "jinja" in message.lower():
        return LlmFailure(LlmCode.INVALID_PROMPT, message)
    return LlmFailure(LlmCode.ENGINE_ERROR, message)


def over_context(prompt: int, context: int) -> LlmFailure:
    return LlmFailure(
        LlmCode.CONTEXT_EXCEEDED,
        f"the prompt has {prompt} tokens, and a job may have {context} here",
        prompt_tokens=prompt,
        context=context,
    )


def of_stall(model: str, seconds: float) -> LlmFailure:
    return LlmFailure(
        LlmCode.ENGINE_CRASHED,
        f"the engine of {model} gave no sign of life for {seconds:g} seconds, and was ended",
    )


def cleaned(text: str) -> str:
    """Without times, names of functions and several lines."""
    lines = (_PREFIX.sub("", line).strip() for line in text.splitlines())
    return "; ".join(line for line in lines if line)


def _is_for_memory(status: int, killed_for_memory: bool, said: str) -> bool:
    """By the signal that ended it: the kernel kills for memory with SIGKILL, and an allocation
    that fails is told last before the process aborts or exits."""
    if status == -signal.SIGKILL:
        return killed_for_memory
    gave_up = status > 0 or status == -signal.SIGABRT
    return gave_up and _NO_MEMORY.search(said) is not None


def _crash(model: str, status: int, errors: Iterable[str]) -> LlmFailure:
    how = f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status}"
    last = _last(errors)
    return LlmFailure(
        LlmCode.ENGINE_CRASHED,
        f"the engine of {model} {how}" + (f": {last}" if last else ""),
        status=status,
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last(errors: Iterable[str], count: int = _LAST) -> str:
    lines = [line for line in errors if line.strip()]
    return cleaned("\n".join(lines[-count:]))
