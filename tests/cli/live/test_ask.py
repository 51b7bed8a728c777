"""`penstock ask`: a question as a job, and its answer."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.cli.commands import Penstock
from tests.support.waiting import eventually

GREEDY = ("--temperature", "0", "--max-tokens", "6")
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[Penstock]:
    """An engine that serves the model."""
    shared = Penstock(tmp_path_factory.mktemp("asked"))
    shared.env["PENSTOCK_MODELS__THREADS"] = "1"
    (shared.folder / "endless.gbnf").write_text('root ::= "a " root')
    with shared.up("--no-http", "--model", str(model_file)):
        yield shared


def test_the_answer_is_printed_and_ends_its_line(asked: Penstock) -> None:
    done = asked("ask", "Say", "hi.", *GREEDY)
    assert done.stdout.strip()
    assert done.stdout.endswith("\n")
    assert done.stderr == ""


def test_it_is_a_job_like_any_other(asked: Penstock) -> None:
    told = asked.json("ask", "Say hi.", *GREEDY)
    assert told["model"] == MODEL
    assert told["usage"]["completion_tokens"] == 6
    assert told["finish_reason"] == "length"
    job = asked.json("show", told["job_id"])
    assert (job["state"], job["request"]["topic"]) == ("SUCCEEDED", f"job.llm.{MODEL}")
    assert told["text"] == asked("ask", "Say hi.", *GREEDY).stdout.removesuffix("\n")


def test_words_and_standard_input_are_one_prompt(asked: Penstock) -> None:
    piped = asked("ask", "Say:", *GREEDY, given="hi\n").stdout
    assert piped == asked("ask", "Say:\n\nhi", *GREEDY).stdout
    assert piped == asked("ask", *GREEDY, given="Say:\n\nhi").stdout


def test_what_it_took_is_told_on_standard_error(asked: Penstock) -> None:
    done = asked("ask", "Say hi.", *GREEDY, "--stats", "--model", "smollm2")
    assert done.stderr.startswith(f"{MODEL}: ")
    assert "6 answer tokens" in done.stderr
    assert "tokens/s" in done.stderr


def test_an_answer_follows_a_schema(asked: Penstock) -> None:
    schema = '{"enum": ["yes", "no"]}'
    answer = asked.out("ask", "Is water wet?", "--schema", schema, "--max-tokens", "20")
    assert msgspec.json.decode(answer) in ("yes", "no")


def test_a_question_that_fails_says_why(asked: Penstock) -> None:
    said = asked.err("ask", "x", "--schema", '{"type": "nonsense"}', code=1)
    assert "FAILED" in said
    assert "nonsense" in said


def test_ctrl_c_cancels_the_job(asked: Penstock) -> None:
    args = ("--grammar", "endless.gbnf", "--max-tokens", "5000")
    with asked.start("ask", "Tell a story that never ends.", *args) as process:
        assert process.stdout is not None
        assert process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    eventually(lambda: asked.json("ps", "--state", "cancelled"))


def test_a_model_that_is_not_served_is_named_with_those_that_are(asked: Penstock) -> None:
    said = asked.err("ask", "x", "--model", "gpt-9", code=3)
    assert "there is no model 'gpt-9'" in said
    assert MODEL in said


def test_without_an_engine_it_runs_in_this_process(penstock: Penstock, model_file: Path) -> None:
    penstock.env["PENSTOCK_MODELS__THREADS"] = "1"
    told = penstock.json("ask", "Say hi.", *GREEDY, "--model", str(model_file))
    assert told["usage"]["completion_tokens"] == 6
    assert penstock.state(told["job_id"]) == "SUCCEEDED"


def test_an_engine_without_models_is_left_alone(penstock: Penstock, model_file: Path) -> None:
    penstock.env["PENSTOCK_MODELS__THREADS"] = "1"
    with penstock.up("--no-http", "--no-worker"):
        assert penstock.out("ask", "Say hi.", *GREEDY, "--model", str(model_file))
        assert penstock.json("ps") == []


def test_who_has_no_model_is_told_how_to_get_one(penstock: Penstock) -> None:
    penstock.env["PENSTOCK_MODELS__DIR"] = str(penstock.folder / "models")
    said = penstock.err("ask", "Hello?", code=2)
    assert "get one with 'penstock model pull smollm2'" in said


def test_who_has_no_engine_is_told_how_to_install_it(penstock: Penstock) -> None:
    """A folder in front of the installed packages, in which the metadata can't be found."""
    (penstock.folder / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "found = metadata.version\n"
        "def version(name):\n"
        "    if name == 'xllamacpp':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
    )
    penstock.env["PYTHONPATH"] = str(penstock.folder)
    process = penstock.start("ask", "Hello?", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 8
    assert "pip install 'penstock[llm]'" in said


@pytest.mark.parametrize(
    ("args", "given", "words"),
    [
        ((), "", "there is no prompt"),
        (("",), "", "there is no prompt"),
        (("x", "--temperature", "9"), "", "temperature: expected float <= 5.0"),
        (("x", "--system", "@nowhere"), "", "--system: can't read nowhere"),
    ],
    ids=["nothing", "empty", "temperature", "file"],
)
def test_what_is_wrong_with_a_question_is_said(
    penstock: Penstock, args: tuple[str, ...], given: str, words: str
) -> None:
    assert words in penstock.err("ask", *args, given=given, code=2)
