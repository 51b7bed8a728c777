"""From what an engine wrote, how it ended or what it replied, to a reason."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.adapters.llama import failures
from penstock.adapters.llama.machine import Size, memory_kills, memory_limit_of
from penstock.adapters.llama.process import EngineSpec
from penstock.workloads.llm.values import LlmCode

PURPOSE = EngineSpec(
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
    failure = failures.of_import(why)

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

    assert failures.of_loading(PURPOSE, status, errors, False).code == code


@pytest.mark.seed("004", "6.8")
def test_a_kill_while_the_kernel_killed_for_memory_was_for_memory() -> None:
    def code(status: int, killed: bool) -> LlmCode:
        return failures.of_loading(PURPOSE, status, [], killed).code

    assert code(-signal.SIGKILL, True) is LlmCode.OUT_OF_MEMORY
    assert code(-signal.SIGKILL, False) is LlmCode.ENGINE_CRASHED
    assert code(-signal.SIGSEGV, True) is LlmCode.ENGINE_CRASHED


def test_the_reason_is_told_without_the_engines_trimmings() -> None:
    line = "0.00.034 E llama_model_load: error loading model: check_dims: tensor 'x' not found"
    failure = failures.of_loading(PURPOSE, 1, [line], False)

    assert failure.message == "the file of the model m can't be read: tensor 'x' not found"


@pytest.mark.seed("004", "6.8")
def test_a_death_names_its_signal_unless_memory_was_the_reason() -> None:
    crash = failures.of_death("m", -signal.SIGSEGV, ["0.01.002 E srv  update: bad thing"], False)
    killed = failures.of_death("m", -signal.SIGKILL, [], True)

    assert crash.code is LlmCode.ENGINE_CRASHED
    assert crash.message == "the engine of m was ended by SIGSEGV: bad thing"
    assert "ran out of memory" in killed.message
    assert "signal 99" in failures.of_death("m", -99, [], False).message
    assert "status 3" in failures.of_death("m", 3, [], False).message


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

    assert (
        failures.of_reply(status, {"error": error}, is_constrained=case == "grammar").code == code
    )


def test_our_own_part_of_the_process_may_fail_too() -> None:
    failure = failures.of_child(1, ["AttributeError: no attribute 'n_ctx'"])

    assert failure.code is LlmCode.ENGINE_ERROR
    assert "n_ctx" in failure.message


DEATHS = {
    "an earlier word": (-signal.SIGSEGV, ["failed to allocate (retrying)", "bad"], False, False),
    "another signal": (-signal.SIGSEGV, ["failed to allocate"], True, False),
    "an assertion": (-signal.SIGABRT, ["failed to allocate", "GGML_ASSERT(x) failed"], True, False),
    "a kill by somebody": (-signal.SIGKILL, ["failed to allocate"], False, False),
    "the kernel": (-signal.SIGKILL, [], True, True),
    "its last word": (-signal.SIGABRT, ["  what():  std::bad_alloc", ""], False, True),
}  # fmt: skip


@pytest.mark.parametrize("case", DEATHS)
def test_only_what_belongs_to_a_death_makes_it_one_for_memory(case: str) -> None:
    status, errors, killed, for_memory = DEATHS[case]
    failure = failures.of_death("m", status, errors, killed)

    assert failure.code is LlmCode.ENGINE_CRASHED
    assert ("out of memory" in failure.message) is for_memory


def a_tree(folder: Path, groups: str, files: Mapping[str, str]) -> dict[str, Path]:
    """Control groups as a kernel shows them."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {"root": folder / "fs", "proc": folder / "proc"}


LIMITS = {
    "container, v2": ("0::/\n", {"fs/memory.max": "1000\n"}),
    "systemd": (
        "0::/system.slice/penstock.service\n",
        {"fs/system.slice/penstock.service/memory.max": "1000\n"},
    ),
    "slice above": (
        "0::/user.slice/app.scope\n",
        {"fs/user.slice/app.scope/memory.max": "max\n", "fs/user.slice/memory.max": "1000\n"},
    ),
    "v1": (
        "4:memory:/docker/ab\n0::/\n",
        {
            "fs/memory/docker/ab/memory.limit_in_bytes": "1000\n",
            "fs/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    ),
    "v1, the host's path": (
        "5:cpu:/x\n4:memory:/docker/ab\n", {"fs/memory/memory.limit_in_bytes": "1000\n"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_the_memory_limit_of_any_group_above_holds(tmp_path: Path, case: str) -> None:
    assert memory_limit_of(**a_tree(tmp_path, *LIMITS[case])) == 1000


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    assert memory_limit_of(**a_tree(tmp_path, "0::/a\n", {"fs/a/memory.max": "max\n"})) == 0
    assert memory_limit_of(root=tmp_path / "none", proc=tmp_path / "none") == 0


def test_kills_for_memory_are_those_of_the_own_group(tmp_path: Path) -> None:
    one = a_tree(tmp_path, "0::/a/b\n", {"fs/a/b/memory.events": "oom 3\noom_kill 2\n"})
    assert memory_kills(**one) == 2
    old = a_tree(
        tmp_path, "4:memory:/a\n", {"fs/memory/a/memory.oom_control": "under_oom 0\noom_kill 7\n"}
    )
    assert memory_kills(**old) == 7
    assert memory_kills(root=tmp_path / "none", proc=tmp_path / "none") == 0
