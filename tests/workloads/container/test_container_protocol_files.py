"""Files that come with a job, and Dockerfiles."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.container.container_submissions import (
    BUILDING,
    DIGEST,
    FACTS,
    accept,
    building,
    code_and_field,
    job,
)
from tests.support.rows import every

from penstock.workloads.container.config import BuildRules, ImageRules, InputRules, WorkerConfig
from penstock.workloads.container.job import ErrorCode, InputFile
from penstock.workloads.container.protocol.dockerfile import bases_of

# --- inputs ---


def test_a_file_is_given_as_text_as_base64_or_by_a_pointer() -> None:
    pointer = "blob:sha256-" + "0" * 64
    made = accept(
        job(
            inputs=[
                {"path": "./a//b.txt", "text": "é\0\n", "unknown": 1},
                {"path": "c", "base64": b64encode(b"\xff\x00").decode(), "executable": True},
                {"path": "d", "pointer": pointer, "text": None},
                {"path": ".", "pointer": "data:,x", "archive": "tar"},
                {"path": "e/f", "base64": "", "archive": "zip"},
            ]
        )
    ).job
    assert made.inputs == (
        InputFile(path="a/b.txt", text="é\0\n"),
        InputFile(path="c", base64="/wA=", executable=True),
        InputFile(path="d", pointer=pointer),
        InputFile(path=".", pointer="data:,x", archive="tar"),
        InputFile(path="e/f", base64="", archive="zip"),
    )


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "C:/x", "a\\..\\b", "a\0b"],
)
def test_a_file_that_would_lie_elsewhere_is_an_invalid_field(path: str) -> None:
    asked = job(inputs=[{"path": "ok", "text": ""}, {"path": path, "text": ""}])
    assert code_and_field(asked) == (ErrorCode.INVALID_FIELD, "inputs[1].path")


@every(
    "entry, field",
    [
        (None, "inputs[0]"),
        ("a", "inputs[0]"),
        ([], "inputs[0]"),
        ({}, "inputs[0].path"),
        ({"path": 5, "text": ""}, "inputs[0].path"),
        ({"path": "a"}, "inputs[0]"),
        ({"path": "a", "text": "x", "base64": ""}, "inputs[0]"),
        ({"path": "a", "text": 5}, "inputs[0].text"),
        ({"path": "a", "text": "\ud800"}, "inputs[0].text"),
        ({"path": "a", "base64": "x"}, "inputs[0].base64"),
        ({"path": "a", "base64": "AAAA\n"}, "inputs[0].base64"),
        ({"path": "a", "base64": "A=AA"}, "inputs[0].base64"),
        ({"path": "a", "base64": "é"}, "inputs[0].base64"),
        ({"path": "a", "base64": 7}, "inputs[0].base64"),
        ({"path": "a", "pointer": "no-scheme"}, "inputs[0].pointer"),
        ({"path": "a", "pointer": ""}, "inputs[0].pointer"),
        ({"path": "a", "pointer": "data:;base64,x"}, "inputs[0].pointer"),
        ({"path": "a", "pointer": "https://x/" + "a" * 20_000}, "inputs[0].pointer"),
        ({"path": "a", "text": "", "archive": "rar"}, "inputs[0].archive"),
        ({"path": "a", "text": "", "archive": True}, "inputs[0].archive"),
        ({"path": "a", "text": "", "archive": ["tar"]}, "inputs[0].archive"),
        ({"path": "..", "text": "", "archive": "tar"}, "inputs[0].path"),
        ({"path": "a", "text": "", "executable": 1}, "inputs[0].executable"),
    ],
)
def test_a_file_that_is_not_whole_is_an_invalid_field(entry: Any, field: str) -> None:
    assert code_and_field(job(inputs=[entry])) == (ErrorCode.INVALID_FIELD, field)


@pytest.mark.parametrize("inputs", ["a", {}, 5, True, {"path": "a"}])
def test_inputs_that_are_no_list_are_an_invalid_field(inputs: Any) -> None:
    assert code_and_field(job(inputs=inputs)) == (ErrorCode.INVALID_FIELD, "inputs")


@pytest.mark.parametrize(
    "paths",
    [
        ["a", "a"],
        ["a", "./a"],
        ["a", "a/b"],
        ["a/b", "a"],
        ["a/b/c", "a/b"],
        ["a", "a/"],
    ],
)
def test_two_files_are_never_in_each_others_way(paths: list[str]) -> None:
    asked = job(inputs=[{"path": path, "text": ""} for path in paths])
    assert code_and_field(asked) == (ErrorCode.INVALID_FIELD, "inputs[1].path")


def test_archives_may_share_a_folder_but_not_with_a_file() -> None:
    archive = {"path": "a", "text": "", "archive": "tar"}
    assert len(accept(job(inputs=[archive, archive, {"path": "a/b", "text": ""}])).job.inputs) == 3
    for inputs in ([archive, {"path": "a", "text": ""}], [{"path": "a", "text": ""}, archive]):
        assert code_and_field(job(inputs=inputs)) == (ErrorCode.INVALID_FIELD, "inputs[1].path")


def test_files_beyond_what_the_worker_allows_are_not_allowed() -> None:
    config = WorkerConfig(inputs=InputRules(max_files=2, max_file_bytes=10, max_bytes=15))

    def files(*sizes: int) -> dict[str, Any]:
        return job(inputs=[{"path": f"f{n}", "text": "x" * size} for n, size in enumerate(sizes)])

    assert accept(files(10, 5), config)
    assert code_and_field(files(1, 1, 1), config) == (ErrorCode.NOT_ALLOWED, "inputs")
    assert code_and_field(files(1, 11), config) == (ErrorCode.NOT_ALLOWED, "inputs[1].text")
    assert code_and_field(files(8, 8), config) == (ErrorCode.NOT_ALLOWED, "inputs")
    coded = job(inputs=[{"path": "a", "base64": b64encode(b"x" * 11).decode()}])
    assert code_and_field(coded, config) == (ErrorCode.NOT_ALLOWED, "inputs[0].base64")
    pointed = job(inputs=[{"path": "a", "pointer": "data:,12345678901"}])
    assert code_and_field(pointed, config) == (ErrorCode.NOT_ALLOWED, "inputs[0].pointer")


# --- Dockerfiles ---


@every(
    "text, bases",
    [
        ("FROM alpine", ("alpine",)),
        ("from alpine:3 as one\nFROM one\nfrom ONE AS two\n", ("alpine:3",)),
        ("# comment\n\n  FROM --platform=linux/amd64 alpine AS x\nRUN true\r\n", ("alpine",)),
        ("ARG V=1\nFROM scratch\nENV A=$V\n", ("scratch",)),
        ("FROM \\\n  alpine \\\n  # why\n  AS x\nFROM x\n", ("alpine",)),
        ("FR\\\nOM alpine", ("alpine",)),
        ("FROM alpine\nRUN echo \\\nFROM evil\n", ("alpine",)),
        ("FROM a AS x\nFROM b\nCOPY --from=x /a /a\nCOPY --from=0 /a /a\n", ("a", "b")),
        ("FROM a\nCOPY --from=tools:1 --chown=1:1 /a /b\n", ("a", "tools:1")),
        ("FROM a\nCOPY --from=7 /a /b\n", ("a", "7")),
        (f"FROM a@{DIGEST}\nFROM a@{DIGEST}\n", (f"a@{DIGEST}",)),
        ("FROM a\nRUN echo $((1<<2)) && cat <<<x && a\\\n  b\n", ("a",)),
        ("FROM a\n# syntax=later comments are comments\n", ("a",)),
        (
            'FROM a\nCOPY ["a", "b", "/c/"]\nCMD ["--mount"]\nHEALTHCHECK --interval=5s CMD x\n',
            ("a",),
        ),
    ],
)
def test_every_image_that_a_dockerfile_names_is_found(text: str, bases: tuple[str, ...]) -> None:
    assert bases_of(text) == bases


@every(
    "text, why",
    [
        ("", "no FROM"),
        ("# only a comment", "no FROM"),
        ("ARG A=1", "no FROM"),
        ("RUN true\nFROM a", "before the first FROM"),
        ("# syntax=evil/frontend\nFROM a", "directives"),
        ("#Syntax = evil\nFROM a", "directives"),
        ("\n# note\n# escape=`\nFROM a", "directives"),
        ("# check=skip=all\nFROM a", "directives"),
        ("// syntax=evil\nFROM a", "not an instruction"),
        ('{"syntax": "evil"}\nFROM a', "not an instruction"),
        ("ARG B=evil\nFROM $B", "line 2"),
        ("ARG B=evil\nFROM ${B:-x}", "line 2"),
        ('FROM "evil"', "not a name"),
        ("FROM ev\\il", "not a name"),
        ("FROM -evil", "not supported with FROM"),
        ("FROM --foo=bar evil", "not supported with FROM"),
        ("FROM", "followed by an image"),
        ("FROM a b", "followed by an image"),
        ("FROM a BS c", "followed by an image"),
        ("FROM a AS $x", "not the name of a stage"),
        ("FROM a AS 1", "not the name of a stage"),
        ("FROM a\nADD http://x/y /z", "ADD is not supported"),
        ("FROM a\nadd x /z", "ADD is not supported"),
        ("FROM a\nONBUILD RUN x", "ONBUILD is not supported"),
        ("FROM a\nINCLUDE x", "not an instruction"),
        ("FROM a\n\\\\\nFROM b", "two backslashes"),
        ("FROM a\nRUN x \\\\\nFROM b", "two backslashes"),
        ("FROM a\nRUN x \\\n\nFROM b AS c", "empty line after a backslash"),
        ("FROM a\nRUN x \\", "ends in a backslash"),
        ("FROM a\nRUN <<EOF\nFROM scratch AS evil\nEOF\nFROM evil", "heredocs"),
        ("FROM a\nRUN cat 3<<-'EOF'\nx\nEOF", "heredocs"),
        ("FROM a\nCOPY <<x /y\nx", "heredocs"),
        ("FROM a\nRUN --mount=type=bind,from=evil x", "not supported with RUN"),
        ("FROM a\nRUN --network=host x", "not supported with RUN"),
        ("FROM a\nRUN --security=insecure x", "not supported with RUN"),
        ("FROM a\nCOPY --from=$X /a /b", "not supported with COPY"),
        ("FROM a\nCOPY --fr\\om=evil /a /b", "not supported with COPY"),
        ("FROM a\nCOPY --from= /a /b", "is empty"),
        ("FROM a AS goodevil\nCOPY --from=good\\\n  evil /x", "space before the backslash"),
        ("FROM a AS goodevil\nFROM good\\\n evil", "space before the backslash"),
        ("FROM a\u00a0AS x", "space that is not a plain one"),
        ("FROM a\nRUN x \\\u00a0\nFROM scratch AS y", "space that is not a plain one"),
        ("FROM a\x0bb", "control character"),
        ("FROM a\rFROM b", "control character"),
        ("\ufeffFROM a", "not an instruction"),
        ("FROM a\n" * 33, "more than 32 stages"),
        ("FROM a\n#" + "x" * (128 << 10), "larger than"),
    ],
)
def test_what_builders_could_read_in_another_way_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        bases_of(text)


def test_a_build_brings_a_dockerfile_and_its_context() -> None:
    asked = building(
        "FROM alpine\nCOPY a /a\n",
        context=[{"path": "a", "text": "x"}, {"path": "b", "base64": ""}],
    )
    made = accept(asked, BUILDING).job
    assert made.image == ""
    assert made.build is not None
    assert made.build.bases == ("alpine",)
    assert [file.path for file in made.build.context] == ["a", "b"]


@pytest.mark.seed("003", "2.4")
@pytest.mark.parametrize(
    ("build", "field"),
    [
        (None, "runtime.build"),
        ({}, "runtime.build.dockerfile"),
        ("FROM a", "runtime.build"),
        ([], "runtime.build"),
        ({"dockerfile": 5}, "runtime.build.dockerfile"),
        ({"dockerfile": ""}, "runtime.build.dockerfile"),
        ({"dockerfile": "FROM a\0"}, "runtime.build.dockerfile"),
        ({"dockerfile": "FROM \ud800"}, "runtime.build.dockerfile"),
        ({"dockerfile": "FROM alpine", "context": {}}, "runtime.build.context"),
        (
            {"dockerfile": "FROM alpine", "context": [{"path": "../x", "text": ""}]},
            "runtime.build.context[0].path",
        ),
        (
            {"dockerfile": "FROM alpine", "context": [{"path": "./Dockerfile", "text": ""}]},
            "runtime.build.context[0].path",
        ),
    ],
)
def test_a_build_that_is_not_whole_is_an_invalid_field(build: Any, field: str) -> None:
    asked = building("")
    asked["runtime"]["build"] = build
    assert code_and_field(asked, BUILDING) == (ErrorCode.INVALID_FIELD, field)


def test_a_build_is_based_on_listed_images_only() -> None:
    def answered(text: str, *bases: str) -> tuple[str, str]:
        config = WorkerConfig(build=BuildRules(enabled=True, bases=bases))
        return code_and_field(building(text), config)

    refused = (ErrorCode.IMAGE_NOT_ALLOWED, "runtime.build.dockerfile")
    assert answered("FROM other", "scratch") == refused
    assert answered("FROM scratch\nCOPY --from=other /a /a", "scratch") == refused
    assert answered("FROM later AS x\nFROM scratch AS later", "scratch") == refused
    assert answered("FROM pinned", f"pinned@{DIGEST}") == refused
    pinned = WorkerConfig(build=BuildRules(enabled=True, bases=(f"pinned@{DIGEST}",)))
    assert accept(building(f"FROM pinned@{DIGEST}"), pinned)


def test_what_is_built_gets_no_grant_that_is_meant_for_a_named_image() -> None:
    asked = building("FROM alpine")
    asked["runtime"]["image"] = "trusted"
    asked["runtime"]["user"] = 0
    trusting = WorkerConfig(
        build=BUILDING.build,
        images=ImageRules(root=("trusted", "alpine:*"), network=("trusted",)),
    )
    assert code_and_field(asked, trusting) == (
        ErrorCode.NOT_ALLOWED,
        "runtime.user",
    )


def test_what_is_built_on_a_sandboxed_image_is_sandboxed() -> None:
    config = WorkerConfig(build=BUILDING.build, images=ImageRules(sandboxed=("alpine:*",)))
    asked = building("FROM alpine")
    asked["runtime"]["runtime"] = "runc"
    answered = code_and_field(asked, config, replace(FACTS, runtimes=("runc", "runsc")))
    assert answered == (ErrorCode.NOT_ALLOWED, "runtime.runtime")
