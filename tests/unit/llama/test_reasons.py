"""From what an engine wrote, how it ended or what it replied, to a reason."""

from __future__ import annotations

import signal

import pytest

from penstock.core.llm import LlmCode
from penstock.workloads.spool.llama import reasons
from penstock.workloads.spool.llama.process import Purpose
from penstock.workloads.spool.llama.sizing import Size

PURPOSE = Purpose(
    model="m", path="/models/m.gguf", size=Size(slots=1, context=256, threads=1, memory=1)
)


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("No module named 'xllamacpp'", "pip install 'penstock[llm]'"),
        ("libgomp.so.1: cannot open shared object file", "libgomp1"),
        ("GLIBC_2.99 not found", "GLIBC_2.99"),
    ],
    ids=["not-installed", "no-openmp", "other"],
)
def test_an_engine_that_is_missing_says_what_to_install(why: str, told: str) -> None:
    failure = reasons.of_import(why)

    assert failure.code is LlmCode.ENGINE_MISSING
    assert told in failure.message


LOADING = {
    "damage": (1, ["0.00.1 E llama_model_load: error loading model: bad magic"], "MODEL_INVALID"),
    "silence": (1, [], "MODEL_INVALID"),
    "gone": (1, ["gguf_init_from_file: failed to open: No such file or directory"],
             "MODEL_NOT_FOUND"),
    "memory": (1, ["ggml_aligned_malloc: insufficient memory", "alloc: failed to allocate buffer"],
               "OUT_OF_MEMORY"),
    "bad_alloc": (-6, ["terminate called: std::bad_alloc"], "OUT_OF_MEMORY"),
    "abort": (-signal.SIGABRT, ["GGML_ASSERT(x) failed"], "ENGINE_CRASHED"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOADING)
def test_loading_fails_for_a_reason(case: str) -> None:
    status, errors, code = LOADING[case]

    assert reasons.of_loading(PURPOSE, status, errors, False).code == code


def test_a_kill_while_the_kernel_killed_for_memory_was_for_memory() -> None:
    def code(status: int, killed: bool) -> LlmCode:
        return reasons.of_loading(PURPOSE, status, [], killed).code

    assert code(-signal.SIGKILL, True) is LlmCode.OUT_OF_MEMORY
    assert code(-signal.SIGKILL, False) is LlmCode.ENGINE_CRASHED
    assert code(-signal.SIGSEGV, True) is LlmCode.ENGINE_CRASHED


def test_the_reason_is_told_without_the_engines_trimmings() -> None:
    line = "0.00.034 E llama_model_load: error loading model: check_dims: tensor 'x' not found"
    failure = reasons.of_loading(PURPOSE, 1, [line], False)

    assert failure.message == "the file of the model m can't be read: tensor 'x' not found"


def test_a_death_names_its_signal_unless_memory_was_the_reason() -> None:
    crash = reasons.of_death("m", -signal.SIGSEGV, ["0.01.002 E srv  update: bad thing"], False)
    killed = reasons.of_death("m", -signal.SIGKILL, [], True)

    assert crash.code is LlmCode.ENGINE_CRASHED
    assert crash.message == "the engine of m was ended by SIGSEGV: bad thing"
    assert killed.code is LlmCode.OUT_OF_MEMORY
    assert "memory" in killed.message
    assert "signal 99" in reasons.of_death("m", -99, [], False).message
    assert "status 3" in reasons.of_death("m", 3, [], False).message


REPLIES = {
    "context": (400, {"type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 8},
                "CONTEXT_EXCEEDED"),
    "batch": (500, {"message": "input (401 tokens) is too large to process. increase the physical"
                    " batch size (current batch size: 256)"}, "CONTEXT_EXCEEDED"),
    "request": (400, {"message": "Prompt contains invalid tokens"}, "INVALID_PROMPT"),
    "template": (500, {"message": "Jinja Exception: roles must alternate"}, "INVALID_PROMPT"),
    "unable": (501, {"message": "This server can't"}, "NOT_SUPPORTED"),
    "image": (500, {"message": "image input is not supported - hint: mmproj"}, "NOT_SUPPORTED"),
    "other": (500, {"message": "decode failed"}, "ENGINE_ERROR"),
    "grammar": (400, {"message": "failed to parse grammar"}, "INVALID_SCHEMA"),
}  # fmt: skip


@pytest.mark.parametrize("case", REPLIES)
def test_a_refusal_becomes_a_reason(case: str) -> None:
    status, error, code = REPLIES[case]

    assert reasons.of_reply(status, {"error": error}, is_held=case == "grammar").code == code


def test_our_own_part_of_the_process_may_fail_too() -> None:
    failure = reasons.of_child(1, ["AttributeError: no attribute 'n_ctx'"])

    assert failure.code is LlmCode.ENGINE_ERROR
    assert "n_ctx" in failure.message


def test_deaths_for_memory_are_counted_where_the_kernel_tells() -> None:
    assert reasons.kills_for_memory() >= 0
