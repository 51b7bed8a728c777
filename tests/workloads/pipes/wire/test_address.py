from __future__ import annotations

import pytest

from penstock.core.errors import Misconfigured
from penstock.workloads.pipes.wire.identity import join, parse


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7000", "127.0.0.1", 7000),
        ("node-a.example:0", "node-a.example", 0),
        ("[::1]:7000", "::1", 7000),
        (":7000", "", 7000),
        (" host:1 ", "host", 1),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert parse(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:x", "host:70000", "::1:7000", "h:-1", "h:¹"]
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(Misconfigured, match="not an address"):
        parse(text)


@pytest.mark.parametrize("text", ["127.0.0.1:7000", "[::1]:7000"])
def test_it_is_written_as_it_is_read(text: str) -> None:
    assert join(*parse(text)) == text
