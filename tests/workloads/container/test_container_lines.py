"""A container's output as log lines."""

from __future__ import annotations

from penstock.workloads.container.files.output import Lines
from penstock.workloads.container.job import Stream

OUT, ERR = Stream.STDOUT, Stream.STDERR


class Heard(list[tuple[str, str]]):
    def tell(self, text: str, level: str) -> None:
        self.append((text, level))


def test_lines_are_told_when_they_end_each_with_its_stream() -> None:
    heard = Heard()
    lines = Lines(heard.tell, 1000)
    lines.hear(OUT, b"on")
    lines.hear(ERR, b"oh no\r\n")
    assert heard == [("oh no", "stderr")]
    lines.hear(OUT, b"e\n\ntwo")
    assert heard[1:] == [("one", "stdout"), ("", "stdout")]
    lines.end()
    assert heard[3:] == [("two", "stdout")]


def test_a_character_that_comes_in_pieces_is_whole() -> None:
    heard = Heard()
    lines = Lines(heard.tell, 1000)
    for byte in "ä€😀\n".encode():
        lines.hear(OUT, bytes([byte]))
    assert heard == [("ä€😀", "stdout")]


def test_what_is_no_text_is_told_with_marks() -> None:
    heard = Heard()
    lines = Lines(heard.tell, 1000)
    lines.hear(OUT, b"a\xffb\n\xe2\x82")
    lines.end()
    assert heard == [("a\ufffdb", "stdout"), ("\ufffd", "stdout")]


def test_a_line_without_end_is_told_in_pieces() -> None:
    heard = Heard()
    lines = Lines(heard.tell, 1_000_000)
    lines.hear(OUT, b"x" * 20_000)
    lines.end()
    assert [len(text) for text, _ in heard] == [8192, 8192, 20_000 - 2 * 8192]


def test_beyond_so_many_bytes_one_warning_is_the_last_word() -> None:
    heard = Heard()
    lines = Lines(heard.tell, 10)
    lines.hear(OUT, b"0123456789\n")
    lines.hear(OUT, b"more\n" * 1000)
    lines.hear(ERR, b"still\n")
    lines.end()
    assert [level for _, level in heard] == ["stdout", "warning", "stderr"]
    assert "more than 10 bytes" in heard[1][0]
