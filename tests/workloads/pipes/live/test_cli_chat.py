"""`penstock chat`: a conversation at a real terminal, with an engine that needs no model."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.cli.commands import Penstock
from tests.support.pipes.terminals import Terminal
from tests.support.waiting import eventually

MODELS = """
    import asyncio

    import msgspec
    import penstock
    from penstock.workloads.llm.values import ChatRequest, Choice, Delta, HopTime, LlmResult
    from penstock.workloads.llm.values import Timings, Usage

    app = penstock.App()


    @app.job("job.chat.Echo", idempotent=True)
    async def echo(**asked):
        return await answer(msgspec.convert(asked, ChatRequest))


    async def answer(chat):
        ctx = penstock.current()
        said = chat.messages[-1].content
        turns = "/".join(f"{one.role[0]}:{one.content}" for one in chat.messages)
        if said == "fail":
            raise ValueError("it did not work")
        if said == "wait":
            ctx.progress(None, "layers 3-5 are missing")
            await asyncio.sleep(60)
        for word in f"I heard {turns}".split(" "):
            ctx.stream(msgspec.json.encode(Delta(text=word + " ")).decode())
        if said == "endless":
            await asyncio.sleep(60)
        choice = Choice(text=f"I heard {turns} ")
        hops = (HopTime(node="b", layers="0-14", compute_ms=20.0, passes=2, tokens=9),)
        return msgspec.to_builtins(
            LlmResult(
                model="Echo",
                engine="test",
                choices=(choice,),
                usage=Usage(7, 3),
                timings=Timings(1.0, 100.0),
                hops=hops,
            )
        )
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    shared = Penstock(tmp_path_factory.mktemp("chat"))
    (shared.folder / "models.py").write_text(textwrap.dedent(MODELS))
    with shared.up("--no-http", "--app", "models:app"):
        yield shared


@pytest.fixture
def chat(served: Penstock) -> Iterator[Terminal]:
    with Terminal(served.folder, served.env, "chat", "--stats") as terminal:
        assert "Echo; /help" in terminal.read_to("> ")
        yield terminal


def test_each_turn_has_those_before_it(chat: Terminal) -> None:
    chat.type("one\n")
    assert "I heard u:one" in chat.read_to("> ")
    chat.type("two\n")
    assert "I heard u:one/a:I heard u:one /u:two" in chat.read_to("> ")


def test_what_an_answer_took_and_its_way_are_told(chat: Terminal) -> None:
    chat.type("one\n")
    told = chat.read_to("on the network")
    assert "Echo: 7 prompt tokens, 3 answer tokens, 30 tokens/s" in told
    assert "b, layers 0-14: 10 ms a pass" in told


def test_ctrl_c_ends_the_answer_and_not_the_conversation(served: Penstock, chat: Terminal) -> None:
    chat.type("endless\n")
    chat.read_to("I heard u:endless ")
    chat.interrupt("> ")
    chat.type("next\n")
    assert "u:endless/a:I heard u:endless /u:next" in chat.read_to("> ")
    assert served.json("ps", "--state", "cancelled")


def test_who_waits_is_told_what_for_and_may_stop_waiting(chat: Terminal) -> None:
    chat.type("wait\n")
    chat.read_to("layers 3-5 are missing")
    chat.interrupt("> ")
    chat.type("next\n")
    assert "I heard u:next" in chat.read_to("> ")  # nothing was said, so nothing stays of it


def test_a_turn_that_failed_is_told_and_taken_back(chat: Terminal) -> None:
    chat.type("fail\n")
    assert "penstock: job" in (told := chat.read_to("> "))
    assert "ended FAILED: ValueError: it did not work" in told
    chat.type("next\n")
    assert "I heard u:next" in chat.read_to("> ")


def test_ctrl_c_at_the_prompt_begins_the_line_anew(chat: Terminal) -> None:
    chat.type("not this")
    chat.read_to("not this")
    chat.interrupt("> ")
    chat.type("this\n")
    assert "I heard u:this" in chat.read_to("> ")


def test_clear_forgets(chat: Terminal) -> None:
    chat.type("one\n")
    chat.read_to("> ")
    chat.type("/clear\n")
    assert "a new conversation" in chat.read_to("> ")
    chat.type("two\n")
    assert "I heard u:two" in chat.read_to("> ")


def test_a_saved_conversation_is_the_input_of_a_job(
    served: Penstock, chat: Terminal, tmp_path: Path
) -> None:
    chat.type("one\n")
    chat.read_to("> ")
    file = tmp_path / "saved.json"
    for words in ("saved", "File exists"):
        chat.type(f"/save {file}\n")
        assert words in chat.read_to("> ")
    saved = msgspec.json.decode(file.read_bytes())
    assert [one["role"] for one in saved["messages"]] == ["user", "assistant"]
    assert served.submit("job.chat.Echo", saved)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("/save", "no file given: /save FILE"),
        ("/save x.json", "the conversation is empty"),
        ("/claer", "there is no /claer; did you mean /clear?"),
        ("/help", "write the conversation to a file"),
        ("//clear", "I heard u:/clear"),
        ("  ", ""),
    ],
)
def test_a_line_with_a_stroke_is_a_command(chat: Terminal, typed: str, words: str) -> None:
    chat.type(f"{typed}\n")
    assert words in chat.read_to("> ")


@pytest.mark.parametrize("typed", ["/exit\n", "\x04"])
def test_it_ends_when_one_has_had_enough(chat: Terminal, typed: str) -> None:
    chat.type(typed)
    assert chat.ended() == 0


def test_a_signal_that_ends_it_ends_its_job(served: Penstock, chat: Terminal) -> None:
    before = len(served.json("ps", "--state", "cancelled"))
    chat.type("endless\n")
    chat.read_to("I heard u:endless ")
    chat.process.send_signal(signal.SIGTERM)
    assert chat.ended() == 130
    eventually(lambda: len(served.json("ps", "--state", "cancelled")) == before + 1)


def test_an_engine_that_comes_back_is_talked_with_again(tmp_path: Path) -> None:
    penstock = Penstock(tmp_path)
    (tmp_path / "models.py").write_text(textwrap.dedent(MODELS))
    engine = ("--no-http", "--app", "models:app")
    penstock.env["PENSTOCK_TIMEOUTS__RECONNECT"] = "1"
    with penstock.up(*engine) as first, Terminal(tmp_path, penstock.env, "chat") as chat:
        chat.read_to("> ")
        chat.type("one\n")
        chat.read_to("> ")
        first.kill()
        first.wait()
        chat.type("two\n")
        assert "penstock: 'submit' failed: the connection" in chat.read_to("> ")
        with penstock.up(*engine):
            chat.type("three\n")
            assert "u:one/a:I heard u:one /u:three" in chat.read_to("> ")


def test_what_is_piped_in_is_one_turn(served: Penstock) -> None:
    assert served.out("chat", given="one\ntwo\n") == "I heard u:one\ntwo"
    told = msgspec.json.decode(served("chat", "--json", given="one").stdout)
    assert (told["model"], told["text"]) == ("Echo", "I heard u:one ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "there is nothing to answer: standard input is empty"),
        (("--temperature", "9"), "temperature: expected float <= 5.0"),
    ],
)
def test_what_is_wrong_is_said(served: Penstock, args: tuple[str, ...], words: str) -> None:
    assert words in served.err("chat", *args, given="\n", code=2)


def test_nobody_is_asked_to_type_json(served: Penstock) -> None:
    with Terminal(served.folder, served.env, "chat", "--json") as terminal:
        terminal.read_to("give a text on standard input")
        assert terminal.ended() == 2
