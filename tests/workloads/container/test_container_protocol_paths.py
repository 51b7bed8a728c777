"""Where a file that comes with a job, or out of one, may be."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every

from penstock.workloads.container.protocol.paths import MAX_DEPTH, checked_folder, checked_path


@every(
    "given, path",
    [
        ("a", "a"),
        ("a/b.txt", "a/b.txt"),
        ("./a", "a"),
        ("a//b", "a/b"),
        ("a/./b/", "a/b"),
        (".hidden", ".hidden"),
        ("...", "..."),
        ("a..b", "a..b"),
        ("-rf", "-rf"),
        ("with space", "with space"),
        ("größe/文件", "größe/文件"),
        ("x" * 255, "x" * 255),
    ],
)
def test_a_path_has_one_normal_form(given: str, path: str) -> None:
    assert checked_path(given) == path


@every(
    "path, why",
    [
        ("", "empty"),
        (".", "names no file"),
        ("./.", "names no file"),
        ("/etc/passwd", "absolute"),
        ("//etc", "absolute"),
        ("/", "absolute"),
        ("..", r"'\.\.'"),
        ("../x", r"'\.\.'"),
        ("a/../../x", r"'\.\.'"),
        ("a/..", r"'\.\.'"),
        ("C:/x", "drive"),
        ("c:x", "drive"),
        ("a\\b", "backslash"),
        ("..\\x", "backslash"),
        ("\\\\host\\share", "backslash"),
        ("a\0b", "NUL"),
        ("a\nb", "control"),
        ("a\x7f", "control"),
        ("a\x9bb", "control"),
        ("a\ud800", "UTF-8"),
        ("x" * 256, "part longer"),
        ("ü" * 128, "part longer"),
        ("/".join(["x" * 200] * 6), "bytes long"),
        ("/".join(["x"] * (MAX_DEPTH + 1)), "deep"),
    ],
)
def test_a_path_that_could_lead_elsewhere_is_refused_with_a_reason(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        checked_path(path)


def test_the_top_is_a_folder_but_no_file() -> None:
    assert checked_folder(".") == "."
    assert checked_folder("./") == "."
    assert checked_folder("a/") == "a"
    with pytest.raises(ValueError, match=r"\.\."):
        checked_folder("..")
    with pytest.raises(ValueError, match="empty"):
        checked_folder("")


@given(st.text(st.sampled_from("ab./\\:C\0\n-~é"), max_size=30) | st.text(max_size=30))
def test_what_is_accepted_stays_below_its_folder_and_is_stable(path: str) -> None:
    try:
        checked = checked_path(path)
    except ValueError:
        return
    assert posixpath.normpath(checked) == checked
    assert posixpath.normpath(f"/top/{checked}").startswith("/top/")
    assert checked_path(checked) == checked
