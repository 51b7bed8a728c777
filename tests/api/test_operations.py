"""The table of operations: what stands beside the engine's API, and what is derived from it."""

from __future__ import annotations

import inspect
from typing import Protocol

import pytest
from msgspec import Struct
from tests.support.rows import every

from penstock.adapters.link.proxy import ONCE
from penstock.api.call import Call
from penstock.api.container import server
from penstock.api.openai import models
from penstock.api.operation import ANY, PUBLIC, route, routes_of
from penstock.api.operations import OPERATIONS
from penstock.api.reply import NOTHING, Reply
from penstock.api.table import ROWS
from penstock.ports.engine_api import EngineApi
from penstock.ports.operations import (
    KeyRole,
    Parameters,
    binding_of,
    bindings_of,
    methods_of,
    operation,
    parts_of,
    proxy_class,
)
from penstock.workloads.llm.batches import Batches
from penstock.workloads.pipeline.interface import Pipelines

PARTS = parts_of(EngineApi, {"Batches": Batches, "Pipelines": Pipelines})
HTTP = {one.id: one for one in OPERATIONS}


class Shelf(Struct, frozen=True, kw_only=True):
    name: str
    height: float = 1.0


class Shelves(Protocol):
    @operation("put_shelf", "PUT /v1/shelves/{name}", role=KeyRole.OPERATE)
    async def put(self, shelf: Shelf) -> Shelf: ...

    @operation("lock_shelf", "POST /v1/shelves/{name}/lock", given={"locked": True})
    @operation("open_shelf", "POST /v1/shelves/{name}/open", given={"locked": False})
    async def lock(self, name: str, *, locked: bool = True) -> None: ...


def test_every_method_that_changes_something_is_an_operation() -> None:
    reads = {"events", "follow", "stream", "stat_blob", "read_blob", "file", "files", "read_file"}
    reads |= {"count"}  # part of the answer to list_jobs
    for interface in (EngineApi, *PARTS.values()):
        unnamed = {name for name, method in methods_of(interface) if not bindings_of(method)}
        assert unnamed <= reads | {"drop_upload", "get", "list"}, interface


@every("name", list(ROWS))
def test_a_route_names_parameters_of_its_method(name: str) -> None:
    binding = ROWS[name].binding
    method = ROWS[name].method
    known = Parameters(method).kinds
    assert {*binding.in_path, *binding.query.values(), *binding.given} <= {*known, "uri", "tenant"}
    assert binding.summary
    if binding.paging is not None:
        assert {binding.paging.start, "limit"} <= set(known)


@every("name", list(ROWS))
def test_every_row_has_an_http_operation_with_its_role(name: str) -> None:
    binding, http = ROWS[name].binding, HTTP[name]
    assert (http.method, http.path) == (binding.method, binding.path)
    assert http.role == (binding.role or ANY)
    assert http.action == binding.action


def test_what_must_not_be_repeated_changes_something() -> None:
    assert "retry" in ONCE
    assert "keys.create" in ONCE
    assert not ONCE & {"get", "find", "submit", "cancel", "schedules.put"}


def test_the_fields_of_a_struct_are_parameters() -> None:
    parameters = Parameters(Shelves.put)
    assert parameters.kinds == {"name": str, "height": float}
    assert parameters.defaults == {"height": 1.0}
    arguments = parameters.arguments({"name": "a", "height": 2.0})
    assert arguments == {"shelf": Shelf(name="a", height=2.0)}
    assert parameters.values(arguments) == {"name": "a", "height": 2.0}


def test_a_method_may_have_several_routes() -> None:
    assert binding_of(Shelves.lock, locked=True).action == "shelf.lock"
    assert binding_of(Shelves.lock, locked=False).action == "shelf.open"
    with pytest.raises(TypeError, match="is not an operation"):
        binding_of(inspect.signature)


def test_a_proxy_has_its_own_methods_and_those_of_the_interface() -> None:
    class Base:
        def put(self) -> str:
            return "own"

    made = proxy_class(Shelves, Base, lambda name, declared: lambda self: name)()
    assert (made.put(), made.lock()) == ("own", "lock")


# -- handlers that declare their routes -----------------------------------------------------


class Shelving:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    @route("GET /shelves/{name}", answer=Shelf, refusals=(404,))
    @route("GET /old/{name}", name="get_old_shelf", summary="Get it the old way", role=PUBLIC)
    async def get_shelf(self, call: Call) -> Reply:
        """Get a shelf.

        With its height,
        in metres.
        """
        return self._reply

    async def unlisted(self, call: Call) -> Reply:
        return self._reply


def test_methods_that_declare_routes_are_operations_with_their_docstrings() -> None:
    one = Shelving(NOTHING)
    new, old = routes_of(one, role=KeyRole.OPERATE, status=201)
    assert (new.method, new.path, new.id) == ("GET", "/shelves/{name}", "get_shelf")
    assert (new.summary, new.description) == ("Get a shelf", "With its height, in metres.")
    assert (new.role, new.status, new.refusals) == (KeyRole.OPERATE, 201, (404,))
    assert (old.path, old.id, old.summary) == ("/old/{name}", "get_old_shelf", "Get it the old way")
    assert old.role is PUBLIC
    assert new.handler == old.handler == one.get_shelf


def test_the_routes_of_a_module_are_those_of_its_own_functions() -> None:
    assert hasattr(server, "get_docs")  # a handler, imported from another module
    assert routes_of(server) == ()
    assert {one.id for one in routes_of(models)} == {"list_models", "get_model"}
