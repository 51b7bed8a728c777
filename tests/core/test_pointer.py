"""The codec of `data:` and `blob:` URIs, and the allow-list of others'."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.rows import every

from penstock.core.errors import UnreadablePointer
from penstock.core.pointer import (
    INDIRECT,
    BlobName,
    data_media_type,
    decode_data,
    encode_data,
    locate,
    name_blob,
    parse_blob,
    parse_source,
    scheme_of,
    shown,
)

media_types = st.sampled_from(["application/json", "image/png", "text/plain;charset=utf-8"])
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(st.binary(), media_types)
def test_a_data_uri_gives_back_what_went_in(data: bytes, media_type: str) -> None:
    uri = encode_data(data, media_type)
    assert decode_data(uri) == data
    assert data_media_type(uri) == media_type
    assert uri.isascii()


@pytest.mark.parametrize(
    ("data", "uri"),
    [
        (b'{"a": [1, "x?&y"]}', 'data:application/json,{"a": [1, "x?&y"]}'),
        (b"", "data:application/json,"),
        (b'"50%"', "data:application/json;base64,IjUwJSI="),
        (b'"#1"', "data:application/json;base64,IiMxIg=="),
        (b"[1,\n2]", "data:application/json;base64,WzEsCjJd"),
        ('"é"'.encode(), "data:application/json;base64,IsOpIg=="),
        (b"\xff", "data:application/json;base64,/w=="),
    ],
)
def test_json_that_needs_no_escaping_is_written_unchanged(data: bytes, uri: str) -> None:
    assert encode_data(data) == uri
    assert decode_data(uri) == data


@given(st.text(st.characters(max_codepoint=130)))
def test_text_gives_back_what_went_in(text: str) -> None:
    assert decode_data(encode_data(text.encode())) == text.encode()


@given(digests, media_types)
def test_a_blob_uri_gives_back_the_name_that_made_it(digest: str, media_type: str) -> None:
    name = BlobName(digest, media_type)
    assert parse_blob(name.uri) == name


@given(st.text())
@example("base64,")
@example(";base64,=")
@example(",%ff%")
def test_any_text_behind_data_is_read_or_refused_and_nothing_else(text: str) -> None:
    with suppress(UnreadablePointer):
        assert isinstance(decode_data("data:" + text), bytes)


@pytest.mark.parametrize(
    ("uri", "data", "media_type"),
    [
        ("data:,", b"", "text/plain;charset=US-ASCII"),
        ("data:,a%20b,c", b"a b,c", "text/plain;charset=US-ASCII"),
        ("data:;charset=utf-8,%C3%A9", "é".encode(), "text/plain;charset=utf-8"),
        ("data:application/json,[1]", b"[1]", "application/json"),
        ("data:;base64,aGk=", b"hi", "text/plain;charset=US-ASCII"),
        ("data:image/gif;base64,R0lG", b"GIF", "image/gif"),
    ],
)
def test_every_form_of_data_uri_can_be_read(uri: str, data: bytes, media_type: str) -> None:
    assert decode_data(uri) == data
    assert data_media_type(uri) == media_type


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("data:application/json;base64", "no comma"),
        ("data:application/json;base64,YQ", "padding"),
        ("data:application/json;base64,Y Q==", "not valid base64"),
        ("data:application/json;base64,YQ==YQ==", "not valid base64"),
        ("data:application/json;base64,é", "not valid base64"),
        ("data:,é", "written as %XX"),
        ("data:,100%", "two hex digits"),
    ],
)
def test_a_malformed_data_uri_is_refused_with_its_fault(uri: str, problem: str) -> None:
    with pytest.raises(UnreadablePointer, match=problem):
        decode_data(uri)


def test_only_a_blob_that_is_not_json_says_its_media_type() -> None:
    assert ";type" not in name_blob(b"x").uri
    assert name_blob(b"x", "image/png").uri.endswith(";type=image/png")


def test_a_scheme_is_read_in_any_case() -> None:
    assert scheme_of("HTTPS://host/") == "https"


def test_an_error_shows_no_query_because_it_may_hold_a_signature() -> None:
    assert shown("https://host/a?sig=secret") == "'https://host/a?...'"


def permits(prefix: str, uri: str) -> bool:
    return parse_source(prefix).permits(locate(uri))


@pytest.mark.parametrize(
    ("prefix", "uri"),
    [
        ("https://host/a", "https://host/a"),
        ("https://host/a", "https://host/a/b/c.json"),
        ("https://host/a/", "https://host/a/b"),
        ("https://host/a", "https://host/a?version=2"),
        ("https://HOST/a", "HTTPS://host/a"),
        ("https://host", "https://host/anything"),
        ("s3://bucket/in", "s3://bucket/in/key"),
        ("memory://", "memory://a/b"),
        ("file:///in", "file:///in/a"),
        ("file:///in", "file://localhost/in/a"),
    ],
)
def test_a_source_permits_itself_and_what_lies_below(prefix: str, uri: str) -> None:
    assert permits(prefix, uri)


@every(
    "uri",
    [
        "https://host/abc",
        "https://host/",
        "https://host/b",
        "https://host//a",
        "https://host/A",
        "https://host/%61",
        "https://host.evil/a",
        "https://host@evil/a",
        "https://evil@host/a",
        "https://host:8443/a",
        "https://evil/https://host/a",
        "http://host/a",
    ],
)
def test_a_source_permits_nothing_beside_it(uri: str) -> None:
    assert not permits("https://host/a", uri)


@every(
    "uri",
    [
        "https://host/a/../b",
        "https://host/a/..",
        "https://host/a/./b",
        "https://host/a/%2e%2e/b",
        "https://host/a/%2E./b",
        "https://host/a/%252e%252e/b",
        "https://host/a/..%2fb",
        "https://host/a/..%5cb",
        "https://host/a\\..\\b",
        "https://host/a/ b",
        "https://host/a/\nb",
        "https://host/a/x::file:///etc/passwd",
        "https://[host/a",
        "file:a",
        "file://elsewhere/a",
    ],
)
def test_a_pointer_that_could_be_read_in_two_ways_is_refused(uri: str) -> None:
    with pytest.raises(UnreadablePointer):
        locate(uri)


@every(
    "prefix",
    [
        "",
        "folder",
        "/folder",
        "https:",
        "https://",
        "s3://",
        "file:///",
        "file:folder",
        "https://host/a/../b",
        "https://host/a?b",
        "https://host/a#b",
        *(f"{scheme}://x" for scheme in sorted(INDIRECT)),
    ],
)
def test_a_source_that_is_unclear_or_too_wide_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_source(prefix)


segments = st.lists(st.text("ab.%2e/\\:?#@", max_size=4), max_size=5).map("/".join)


@given(segments)
def test_no_path_leads_out_of_a_source(path: str) -> None:
    uri = "https://host/a/b" + path
    try:
        permitted = permits("https://host/a/b", uri)
    except UnreadablePointer:
        return
    assert not permitted or (path == "" or path[0] in "/?#")
