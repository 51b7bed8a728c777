"""From a method and a path to an operation."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.operation import Allowed, Operation, Pace, Router
from penstock.api.operations import OPERATIONS
from penstock.api.problems import Refused
from penstock.api.reply import Reply
from penstock.core.errors import NotFound


async def handler(call: Any) -> Reply:
    return Reply()


def an_operation(method: str, path: str, **fields: Any) -> Operation:
    return Operation(method, path, handler, summary=path, **fields)


ROUTER = Router(
    [
        an_operation("GET", "/a"),
        an_operation("POST", "/a"),
        an_operation("GET", "/a/{id}"),
        an_operation("GET", "/a/batch"),
        an_operation("POST", "/a/batch"),
        an_operation("GET", "/a/{id}/b/{other}"),
        an_operation("POST", "/a:cancel"),
        an_operation("GET", "/events", pace=Pace.STREAMS),
        an_operation("GET", "/a.json"),
    ]
)


def found(method: str, path: str) -> tuple[str, dict[str, str]]:
    operation, params = ROUTER.find(method, path)
    return operation.path, params


def test_a_name_wins_over_what_varies() -> None:
    assert found("GET", "/a/batch") == ("/a/batch", {})
    assert found("GET", "/a/x") == ("/a/{id}", {"id": "x"})


def test_what_varies_may_be_called_like_a_name_beside_it() -> None:
    for operation in OPERATIONS:
        if "{job_id}" in operation.path:
            for name in ("batch", "stream"):
                path = operation.path.replace("{job_id}", name)
                assert Router(OPERATIONS).find(operation.method, path)[0] is operation
    assert found("GET", "/a/batch/b/x") == ("/a/{id}/b/{other}", {"id": "batch", "other": "x"})


def test_segments_are_unescaped_after_they_were_parted() -> None:
    assert found("GET", "/a/x%2Fy/b/%C3%A4") == ("/a/{id}/b/{other}", {"id": "x/y", "other": "ä"})
    assert found("GET", "/a/%2e%2e") == ("/a/{id}", {"id": ".."})


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/b",
        "/a/",
        "/a//",
        "//a",
        "/a/x/b",
        "/a/x/b/",
        "/a/x/c/y",
        "/a/%ff",
        "/A",
        "/aXjson",
    ],
)
def test_what_is_not_there_is_not_found(path: str) -> None:
    with pytest.raises(NotFound):
        ROUTER.find("GET", path)


def test_another_method_is_told_which_there_are() -> None:
    with pytest.raises(Refused) as refused:
        ROUTER.find("DELETE", "/a")
    assert refused.value.status == 405
    assert refused.value.headers == ((b"allow", b"GET, HEAD, OPTIONS, POST"),)


def test_head_is_get_without_its_content_but_not_of_a_stream() -> None:
    assert found("HEAD", "/a/x") == ("/a/{id}", {"id": "x"})
    with pytest.raises(Refused):
        ROUTER.find("HEAD", "/events")
    with pytest.raises(Refused):
        ROUTER.find("HEAD", "/a:cancel")


def test_options_tells_what_there_is() -> None:
    with pytest.raises(Allowed) as allowed:
        ROUTER.find("OPTIONS", "/a:cancel")
    assert allowed.value.methods == ["OPTIONS", "POST"]


def test_every_operation_is_found_by_its_own_path() -> None:
    router = Router(OPERATIONS)
    for operation in OPERATIONS:
        path = operation.path.replace("{", "").replace("}", "")
        assert router.find(operation.method, path)[0] is operation


def test_a_last_segment_can_stand_for_all_that_are_left() -> None:
    router = Router(
        [an_operation("GET", "/a/{id}/files"), an_operation("GET", "/a/{id}/files/{path...}")]
    )

    def rest(path: str) -> dict[str, str]:
        return router.find("GET", path)[1]

    assert rest("/a/x/files") == {"id": "x"}
    assert rest("/a/x/files/one") == {"id": "x", "path": "one"}
    assert rest("/a/x%2Fy/files/one/%C3%A4/../three") == {"id": "x/y", "path": "one/ä/../three"}
    assert rest("/a/x/files/one%2Ftwo//") == {"id": "x", "path": "one/two//"}
    for nothing in ("/a/x/files/", "/a/x/files//b", "/a//files/b", "/a/x/files/%ff"):
        with pytest.raises(NotFound):
            rest(nothing)
