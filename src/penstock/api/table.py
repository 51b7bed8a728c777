"""HTTP operations derived from the table that stands beside the engine's API.

`penstock.ports.operations` says what the table has. A handler of its own (`bound`) is only for
operations whose HTTP shape differs from that of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Raw, Struct, defstruct

from penstock.api.operation import ANY, H, Operation, Pace, marked
from penstock.api.reply import JSON_HEADERS, NOTHING, Headers, Reply, encode
from penstock.core.job import Job
from penstock.ports.engine_api import Cancellation, Ended, EngineApi
from penstock.ports.operations import (
    Binding,
    Method,
    Parameters,
    bindings_of,
    cursor,
    methods_of,
    parts_of,
    position,
)
from penstock.workloads.llm.batches import Batches
from penstock.workloads.pipeline.interface import ItemView, Pipelines, item_view
from penstock.workloads.pipeline.records import ItemRecord

if TYPE_CHECKING:
    from penstock.api.call import Call

Seconds = Annotated[float, Meta(ge=0, le=60.0)]
"""How long one request may wait."""
_PAGES = b',"pages":'


def job_json(job: Job) -> bytes:
    # An id has no character that JSON would want escaped (penstock.core.check). Its journal
    # pages, the last field, are the engine's own business.
    body = encode(job)
    return b'{"job_id":"%b",%b}' % (job.request.job_id.encode(), body[1 : body.rindex(_PAGES)])


def raw(job: Job) -> Raw:
    """For an answer that has a job within it."""
    return Raw(job_json(job))


def list_json(jobs: Iterable[Job]) -> bytes:
    return b"[%b]" % b",".join([job_json(job) for job in jobs])


def located(job: Job) -> Headers:
    return (*JSON_HEADERS, (b"location", b"/v1/jobs/" + job.request.job_id.encode()))


VIEWS: dict[type, tuple[type, Callable[[Any], Any]]] = {
    Job: (Job, raw),
    Cancellation: (Cancellation, lambda one: {"job": raw(one.job), "ended": one.ended}),
    Ended: (Ended, lambda one: {"job_id": one.job_id, "job": raw(one.job)}),
    ItemRecord: (ItemView, item_view),
}
"""By the type of a record: the type that the OpenAPI document shows, and what makes the JSON."""


class Row(Struct, frozen=True):
    """One route of the table."""

    part: str
    """The part of the engine's API that has the method; empty: the API itself."""
    method: Method
    binding: Binding


_INTERFACES = {
    "": EngineApi,
    **parts_of(EngineApi, {"Batches": Batches, "Pipelines": Pipelines}),
}
ROWS: dict[str, Row] = {
    binding.name: Row(part, method, binding)
    for part, interface in _INTERFACES.items()
    for _, method in methods_of(interface)
    for binding in bindings_of(method)
    if binding.path
}
"""By the operation's name."""


def row_fields(name: str, /, **fields: Any) -> dict[str, Any]:
    """The fields of the Operation that a row of the table stands for, and further ones."""
    binding = ROWS[name].binding
    return {
        "method": binding.method,
        "path": binding.path,
        "name": name,
        "summary": binding.summary,
        "description": binding.description,
        "role": binding.role or ANY,
        "audited": binding.action,
        "all_tenants": binding.all_tenants,
        "status": binding.status,
        "refusals": binding.refusals,
        "pace": Pace.WAITS if binding.waits else Pace.PROMPT,
        **fields,
    }


def bound(name: str, /, **fields: Any) -> Callable[[H], H]:
    """Declare the handler of an operation of the table whose HTTP shape is its own.

    `fields` are those of Operation.
    """
    return marked(**row_fields(name, **fields))


def derived(name: str) -> Operation:
    """An operation whose handler, query, body and answer come from the method's signature."""
    row = ROWS[name]
    binding, parameters = row.binding, Parameters(row.method)
    query, body = _query_of(binding, parameters), _body_of(binding, parameters)
    answer, write = _answer_of(binding, parameters.answer)
    part, method, paging = row.part, row.method.__name__, binding.paging

    async def handler(call: Call) -> Reply:
        values: dict[str, Any] = {**binding.given, **call.params}
        limit = 0
        if query is not None:
            asked = call.query(query)
            for wire, parameter in binding.query.items():
                values[parameter] = getattr(asked, wire)
            if paging is not None:
                limit = values["limit"]
                values["limit"] += 1
                if asked.cursor is not None:  # type: ignore[attr-defined]
                    kind = parameters.kinds[paging.start]
                    values[paging.start] = position(name, kind, asked.cursor)  # type: ignore[attr-defined]
        if body is not None:
            given = await call.json(body)
            for field in body.__struct_fields__:
                values[field] = parameters.converted(field, getattr(given, field))
        target = getattr(call.api, part) if part else call.api
        with call.attending() if binding.waits else nullcontext():
            found = await getattr(target, method)(**parameters.arguments(values))
        if found is None:
            return NOTHING
        if paging is not None:
            found, following = found[:limit], found[limit:] and cursor_of(binding, found[limit - 1])
            return Reply(write(found, following or None))
        headers = located(found) if binding.status == 201 and answer is Job else JSON_HEADERS
        return Reply(write(found, None), binding.status, headers)

    fields = () if body is None else msgspec.structs.fields(body)
    own = row_fields(
        name,
        query=query,
        body=body,
        may_be_empty=binding.method == "POST" and not any(field.required for field in fields),
        answer=answer,
    )
    if query is not None or body is not None:
        own["refusals"] += (422,)
    return Operation(handler=handler, **own)


def cursor_of(binding: Binding, last: Any) -> str:
    """The cursor of the page that follows this item."""
    assert binding.paging is not None
    place = tuple(getattr(last, name) for name in binding.paging.by)
    return cursor(binding.name, place if len(place) > 1 else place[0])


def _query_of(binding: Binding, parameters: Parameters) -> type[Struct] | None:
    if not binding.query:
        return None
    fields = [_field(parameters, parameter, wire) for wire, parameter in binding.query.items()]
    fields = [_repeatable(*one) if get_origin(one[1]) is tuple else one for one in fields]
    if binding.paging is not None:
        limit = Annotated[int, Meta(ge=1, le=binding.paging.most)]
        fields = [one for one in fields if one[0] != "limit"]
        fields.append(("limit", limit, parameters.defaults["limit"]))
        fields.append(("cursor", Annotated[str | None, Meta(description=CURSOR)], None))
    return _struct(binding, "Query", fields, parameters.source)


def _repeatable(name: str, kind: Any, default: Any) -> Any:
    return name, Annotated[kind, Meta(description="May come several times: any of them.")], default


CURSOR = "`next` of the page before."
NEXT = "The `cursor` of the next page; null on the last."


def _body_of(binding: Binding, parameters: Parameters) -> type[Struct] | None:
    """Body type: every parameter that is in neither path nor query."""
    if binding.method not in ("POST", "PUT"):
        return None
    elsewhere = {*binding.in_path, *binding.query.values(), *binding.given}
    fields = [_field(parameters, name) for name in parameters.kinds if name not in elsewhere]
    return _struct(binding, "Body", fields, parameters.source, strict=True)


def _field(parameters: Parameters, name: str, wire: str = "") -> Any:
    kind = strict(parameters.kinds[name])
    if name not in parameters.defaults:
        return (wire or name, kind)
    default = parameters.defaults[name]
    if isinstance(default, dict):
        default = msgspec.field(default_factory=dict)
    return (wire or name, kind, default)


def strict(kind: Any) -> Any:
    """The same type, whose Structs refuse unknown fields."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        fields = [
            (one.name, strict(one.type))
            if one.required
            else (
                one.name,
                strict(one.type),
                one.default
                if one.default is not msgspec.NODEFAULT
                else msgspec.field(default_factory=one.default_factory),
            )
            for one in msgspec.structs.fields(kind)
        ]
        return defstruct(
            f"{kind.__name__}Fields",
            fields,
            frozen=True,
            forbid_unknown_fields=True,
            namespace={"__doc__": kind.__doc__, "__source__": kind},
        )
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(strict(arg) for arg in get_args(kind))]  # noqa: UP007 made at run time
    return kind


def _answer_of(binding: Binding, kind: Any) -> tuple[Any, Callable[[Any, Any], bytes]]:
    """The type of the answer, and what writes a value (and where the next page begins)."""
    if kind is type(None):
        return None, lambda value, following: b""
    inner = get_args(kind)[0] if get_origin(kind) is list else kind
    shown, view = VIEWS.get(inner, (inner, None))
    field = binding.field
    if field:
        fields: list[Any] = [(field, list[shown] if inner is not kind else shown)]  # type: ignore[valid-type]
        if binding.paging is not None:
            fields.append(("next", Annotated[str | None, Meta(description=NEXT)]))
        kind = _struct(binding, "Answer", fields)
    elif inner is kind:
        kind = shown

    def write(value: Any, following: str | None) -> bytes:
        if view is not None:
            value = [view(one) for one in value] if isinstance(value, list) else view(value)
        if binding.paging is not None:
            value = {field: value, "next": following}
        elif field:
            value = {field: value}
        return encode(value)

    return kind, write


def _struct(
    binding: Binding,
    ending: str,
    fields: list[Any],
    source: type[Struct] | None = None,
    *,
    strict: bool = False,
) -> type[Struct]:
    name = "".join(word.title() for word in binding.name.split("_")) + ending
    described: dict[str, Any] = {} if source is None else {"__source__": source}
    return defstruct(
        name,
        fields,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=strict,
        namespace={"__doc__": None, **described},
    )
