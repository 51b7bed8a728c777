"""One format of errors: whatever is wrong with a request, each route tells it in the same form.

Paths of OpenAI, Anthropic and Ollama have the form that their SDKs know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.api.house import Answer, House, house

from penstock.api.operation import PUBLIC, Operation
from penstock.api.operations import OPERATIONS
from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async

JSON = "application/json"
LIMITS: dict[str, Any] = {"max_body": 2000, "max_upload": 4000}
WRITING = [one for one in OPERATIONS if one.body is not None]
READING_JSON = [one for one in WRITING if one.body_type == JSON]
PAGES = [
    one for one in OPERATIONS if one.path == "/dashboard" or one.path.startswith("/dashboard/")
]
"""Below it every path is a view of the page, which reads the query itself."""
FOREIGN = {one.path for one in OPERATIONS if one.problem is not None}


def at(operation: Operation, query: str = "") -> str:
    path = operation.path.replace("...", "")
    for name in ("{", "}"):
        path = path.replace(name, "")
    return path + query


async def sent(one: House, operation: Operation, query: str = "", **given: Any) -> Answer:
    return await one.call(operation.method, at(operation, query), **given)


def wrong_form(operation: Operation, answer: Answer, status: int) -> str:
    """What is wrong with the answer; empty if nothing is."""
    where = f"{operation.method} {operation.path} -> {answer.status} {answer.body[:150]!r}"
    if answer.status != status:
        return f"expected {status}: {where}"
    told = answer.json
    if operation.problem is not None:
        fine = answer.headers["Content-Type"] == JSON and "error" in told
        return "" if fine else f"not the form of a model API: {where}"
    texts = {name: told.get(name) for name in ("type", "title", "detail", "code")}
    fine = (
        answer.headers["Content-Type"] == "application/problem+json"
        and told.get("status") == status
        and all(isinstance(text, str) and text for text in texts.values())
        and texts["type"] == "urn:penstock:problem:" + told["code"].lower().replace("_", "-")
    )
    return "" if fine else f"no problem document: {where}"


@run_async
async def test_401_without_a_key_and_403_without_the_role(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        weak = {role: await one.key(f"not-{role}", *_others(role)) for role in KeyRole}
        wrong = []
        for operation in OPERATIONS:
            if operation.role is PUBLIC:
                continue
            wrong.append(wrong_form(operation, await sent(one, operation, token=""), 401))
            role = operation.role
            if isinstance(role, KeyRole) and operation in WRITING:
                answer = await sent(one, operation, token=weak[role])
                wrong.append(wrong_form(operation, answer, 403))
        assert not list(filter(None, wrong))


def _others(role: KeyRole) -> tuple[KeyRole, ...]:
    """A role that does not include this one."""
    return (KeyRole.APPROVE,) if role is KeyRole.SUBMIT else (KeyRole.SUBMIT,)


@run_async
async def test_405_for_another_method_and_404_for_another_path(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        wrong, paths = [], {operation.path: operation for operation in OPERATIONS}
        for operation in paths.values():
            answer = await one.call("TRACE", at(operation))
            wrong.append(wrong_form(operation, answer, 405))
            assert answer.headers["Allow"]
            beyond = await one.call("GET", at(operation) + "/there/is/nothing/here")
            if not operation.path.endswith("...}") and operation not in PAGES:
                wrong.append(wrong_form(operation, beyond, 404))
        assert not list(filter(None, wrong))


@run_async
async def test_404_for_what_is_not_there(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        named = [o for o in OPERATIONS if o.method == "GET" and "{" in o.path and 404 in o.refusals]
        named = [o for o in named if o.id != "get_blob"]  # its name says whether it can be one
        named = [o for o in named if o not in PAGES]
        answers = [(o, await sent(one, o)) for o in named]
        assert not list(filter(None, (wrong_form(o, answer, 404) for o, answer in answers)))
        assert len(named) > 15


@run_async
async def test_400_413_415_and_422_for_bodies(tmp_path: Path) -> None:
    async with house(tmp_path, **LIMITS) as one:
        wrong = []
        for operation in WRITING:
            large = b'{"a": "' + b"x" * 5000 + b'"}'
            if operation.body_type in (JSON, "*/*"):
                answer = await sent(one, operation, data=large, headers={"Content-Type": JSON})
                wrong.append(wrong_form(operation, answer, 413))
            if operation.body_type != "*/*":
                answer = await sent(one, operation, data=b"{}", headers={"Content-Type": "a/b"})
                wrong.append(wrong_form(operation, answer, 415))
        for operation in READING_JSON:
            answer = await sent(one, operation, data=b"{", headers={"Content-Type": JSON})
            wrong.append(wrong_form(operation, answer, 400))
            if operation.problem is None:
                answer = await sent(one, operation, body={"nonsense": 1})
                wrong.append(wrong_form(operation, answer, 422))
        assert not list(filter(None, wrong))


@run_async
async def test_422_for_a_parameter_that_nobody_knows(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        wrong = []
        for operation in OPERATIONS:
            if operation.body is None and operation not in PAGES:
                answer = await sent(one, operation, "?nonsense=1")
                status = 422 if operation.problem is None else 400
                wrong.append(wrong_form(operation, answer, status))
        assert not list(filter(None, wrong))


def test_only_the_paths_of_model_apis_have_another_form() -> None:
    assert {path.split("/")[1] for path in FOREIGN} <= {"v1", "api", "tokenize", "detokenize"}
    own = {one.path for one in OPERATIONS if one.problem is None}
    assert not own & FOREIGN


@pytest.mark.parametrize("path", ["/v1", "/nothing", "/v1/jobs/a/b/c"])
@run_async
async def test_an_unknown_path_is_a_problem_document(path: str, tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        answer = await one.call("GET", path)
        assert (answer.status, answer.headers["Content-Type"]) == (404, "application/problem+json")
        assert json.loads(answer.body)["code"] == "NOT_FOUND"
