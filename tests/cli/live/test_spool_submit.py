"""Submitting prompts to a folder: only the id is printed, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.cli.spooling import Spool
from tests.support.rows import every

from penstock.lifecycles.spool import Status
from penstock.workloads.spool.disk.job import read_meta
from penstock.workloads.spool.disk.workspace import is_job_id

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)


def test_it_prints_the_id_and_nothing_else(spool: Spool) -> None:
    said = spool("submit", "What", "is", "2+2?")
    assert said.err == ""
    assert is_job_id(said.text)
    assert said.out == f"{said.text}\n".encode()
    assert spool.file(said.text, "prompt.txt") == b"What is 2+2?"


def test_the_prompt_may_come_on_standard_input_and_loses_one_newline(spool: Spool) -> None:
    for args in ((), ("-",)):
        job_id = spool("submit", *args, given=b"two lines\nand an end\n\n").text
        assert spool.file(job_id, "prompt.txt") == b"two lines\nand an end\n"


@pytest.mark.seed("004", "2.6")
def test_a_prompt_in_a_file_is_taken_as_it_is(spool: Spool) -> None:
    Path("prompt.md").write_bytes("Grüße\n".encode())
    assert spool.file(spool.submit("-f", "prompt.md"), "prompt.txt") == "Grüße\n".encode()


def test_words_are_the_prompt_even_if_something_could_be_read(spool: Spool) -> None:
    job_id = spool("submit", "words", given=b"lines of a loop").text
    assert spool.file(job_id, "prompt.txt") == b"words"


def test_every_option_is_kept_and_zero_is_a_value(spool: Spool) -> None:
    Path("schema.json").write_text('{"type": "object"}')
    job_id = spool.submit(
        *("x", "--model", "smol", "--system", "Be brief.", "--max-tokens", "5"),
        *("--temperature", "0", "--top-p", "0.9", "--top-k", "0", "--min-p", "0"),
        *("--repeat-penalty", "1.1", "--seed", "0", "--stop", "END", "--stop", "."),
        *("--schema", "schema.json", "--logprobs", "0", "--priority", "interactive"),
        *("--timeout", "2m", "--tag", "one", "--tag", "two", "--parent", "1736700000_1_0"),
    )
    assert spool.options(job_id) == {
        "model": "smol",
        "system": "Be brief.",
        "max_tokens": 5,
        "stop": ["END", "."],
        "sampling": {
            "temperature": 0.0,
            "top_p": 0.9,
            "top_k": 0,
            "min_p": 0.0,
            "repeat_penalty": 1.1,
            "seed": 0,
        },
        "logprobs": 0,
        "schema": {"type": "object"},
        "priority": "interactive",
        "timeout": 120.0,
    }
    meta = read_meta(spool.workspace.of(Status.QUEUED, job_id))
    assert (meta.tags, meta.parent) == (("one", "two"), "1736700000_1_0")


def test_without_options_a_job_is_what_it_was_in_the_original(spool: Spool) -> None:
    folder = spool.workspace.of(Status.QUEUED, spool.submit("x"))
    assert sorted(file.name for file in folder.iterdir()) == ["meta.json", "prompt.txt"]


def test_a_schema_may_be_written_out_and_a_grammar_is_a_file(spool: Spool) -> None:
    assert spool.options(spool.submit("x", "--schema", '{"type": "array"}'))["schema"] == {
        "type": "array"
    }
    said = spool("submit", "x", "--schema", '{"type": "array", "uniqueItems": true}')
    assert "may break this of the schema: uniqueItems" in said.err
    Path("yes.gbnf").write_text('root ::= "yes"')
    assert spool.options(spool.submit("x", "--grammar", "yes.gbnf"))["grammar"] == 'root ::= "yes"'


def test_embeddings_and_images_are_kinds_of_their_own(spool: Spool) -> None:
    Path("cat.png").write_bytes(PNG)
    assert spool.file(spool.submit("x", "--embed"), "type.txt") == b"embed"
    seeing = spool.submit("What is this?", "--image", "cat.png")
    assert spool.file(seeing, "type.txt") == b"vision"
    assert spool.file(seeing, "images/image_000000.png") == PNG


@pytest.mark.seed("004", "13.11")
def test_each_line_of_a_file_is_a_job_with_its_own_options_before_the_common_ones(
    spool: Spool,
) -> None:
    lines = b'{"prompt": "a", "max_tokens": 7}\n\n{"prompt": "b", "tags": ["x"], "seed": 1}\n'
    said = spool("submit", "--jsonl", "-", "--max-tokens", "3", "--seed", "9", given=lines)
    first, second = said.text.split()
    assert spool.file(first, "prompt.txt") == b"a"
    assert spool.options(first) == {"max_tokens": 7, "sampling": {"seed": 9}}
    assert spool.options(second) == {"max_tokens": 3, "sampling": {"seed": 1}}
    assert read_meta(spool.workspace.of(Status.QUEUED, second)).tags == ("x",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "b", "temprature": 1}', "temprature: there is no such option; did you mean"),
        (b'{"prompt": "b", "temperature": 9}', "temperature: expected float <= 5.0"),
        (b'{"prompt": "b", "tags": "x"}', "tags: expected array, got str"),
        (b'{"prompt": ""}', "prompt: is empty"),
        (b'{"prompt": 5}', "prompt: is not a string"),
        (b"{}", "prompt: is missing"),
        (b"{oops", "not valid JSON"),
        (b'["b"]', "expected a JSON object"),
    ],
    ids=["unknown", "range", "type", "empty", "number", "missing", "malformed", "list"],
)
def test_a_bad_line_is_named_and_nothing_is_submitted(
    spool: Spool, line: bytes, words: str
) -> None:
    said = spool("submit", "--jsonl", "-", given=b'{"prompt": "a"}\n\n' + line, code=2)
    assert said.out == b""
    assert f"line 3: {words}" in said.err
    assert not spool.path.exists()


@every(
    "args, words",
    [
        ((), "there is no prompt: give it as words, with -f FILE, or on standard input"),
        (("",), "prompt: is empty"),
        (("-", "more"), "two prompts: '-' for standard input, and words"),
        (("x", "-f", "y"), "two prompts: words and --file"),
        (("-f", "nowhere"), "--file: can't read nowhere: No such file"),
        (("x", "--jsonl", "y"), "--jsonl has the prompts"),
        (("--jsonl", "y", "--wait"), "see 'penstock spool wait'"),
        (("--jsonl", "/dev/null"), "--jsonl has no lines"),
        (("x", "--temperature", "9"), "temperature: expected float <= 5.0"),
        (("x", "--temperature", "nan"), "temperature: expected float >= 0.0"),
        (("x", "--max-tokens", "0"), "max_tokens: expected int >= 1"),
        (("x", "--stop", ""), "stop[0]: expected str of length >= 1"),
        (("x", "--timeout", "0"), "timeout: expected float > 0.0"),
        (("x", "--deadline", "2001-01-01"), "deadline: is already past"),
        (("x", "--parent", "../../etc"), "parent: '../../etc' can't be one"),
        (("x", "--tag", "a b"), "tags: 'a b' can't be one"),
        (("x", "--image", "cat.png"), "images: cat.png can't be read"),
        (("x", "--schema", "{"), "--schema: not valid JSON"),
        (("x", "--schema", "none.json"), "--schema: can't read none.json"),
        (("x", "--raw", "--system", "y"), "a raw prompt has no system prompt"),
    ],
)
def test_what_is_wrong_is_said_and_no_workspace_is_made(
    spool: Spool, args: tuple[str, ...], words: str
) -> None:
    said = spool("submit", *args, code=2)
    assert said.out == b""
    assert words in said.err
    assert not spool.path.exists()


def test_an_empty_standard_input_is_no_prompt(spool: Spool) -> None:
    assert "standard input is empty" in spool("submit", given=b"", code=2).err
    assert "standard input is empty" in spool("submit", given=b"\n", code=2).err


def test_a_prompt_that_is_not_utf8_is_refused(spool: Spool) -> None:
    assert "prompt: is not UTF-8" in spool("submit", given=b"\xff\xfe", code=2).err


def test_a_file_is_no_workspace(spool: Spool) -> None:
    spool.path.write_text("")
    for args in (("submit", "x"), ("serve",), ("list",), ("get",)):
        assert "ws is a file, not a folder" in spool(*args, code=2).err


def test_waiting_for_a_job_that_nobody_serves_ends_when_the_time_is_over(spool: Spool) -> None:
    said = spool("submit", "x", "--wait-timeout", "20ms", code=9)
    assert said.out == b""
    assert "did not end within the time given" in said.err
    assert spool.json("status")["QUEUED"] == 1


def test_json_has_the_id(spool: Spool) -> None:
    assert is_job_id(spool.json("submit", "x")["job_id"])
    both = spool.json("submit", "--jsonl", "-", given=b'{"prompt": "a"}\n{"prompt": "b"}')
    assert len({one["job_id"] for one in both}) == 2
