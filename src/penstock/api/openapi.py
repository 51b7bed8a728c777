"""The OpenAPI 3.1 document, made from the table of operations."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from textwrap import dedent
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct

from penstock import __version__
from penstock.api.operation import ANY, PUBLIC, Operation
from penstock.api.problems import TITLES, Problem

Document = dict[str, Any]

_REF = "#/components/schemas/{name}"
_VARIES = re.compile(r"\{(\w+)(?:\.\.\.)?\}")
_TAGS = {
    resource: tag
    for tag, resources in {
        "Jobs": ("jobs", "dead"),
        "Blobs": ("blobs",),
        "Events": ("events",),
        "Schedules": ("schedules",),
        "Pipelines": ("pipelines", "runs", "breakers"),
        "Limits": ("limits",),
        "Workers and pools": ("topics", "workers", "pools", "join-tokens", "credentials"),
        "Pipes": ("pipes",),
        "Safety rules": ("policy",),
        "Keys and audit": ("keys", "audit"),
        "OpenAI": ("chat", "completions", "embeddings", "models", "files", "batches"),
    }.items()
    for resource in resources
}
_LOCATED = ((201, "Job"), (202, "RunStarted"))
"""Operations whose reply has a Location header."""
_ABOUT = """\
A durable job engine. Everything under `/v1`, and `/metrics`, needs a key: \
`Authorization: Bearer <key>`. Times are seconds since the epoch, UTC. Errors are problem \
documents (RFC 9457) with a stable `code`; where a field is wrong, `field` names it. Fields may \
be added to answers at any time; a field that a request may not have is refused."""


class OpenApiInfo(Struct, frozen=True, kw_only=True):
    """Title, description and conventions of an OpenAPI document."""

    title: str
    about: str
    tags: Mapping[str, str]
    """The heading of a resource, by the first segment of its paths."""
    other_tag: str
    key: str
    """Description of the API key."""
    any_key: str = "Any key."
    """Note at operations that accept any key."""
    problem: type[Struct]
    """Type of an error body."""
    problem_type: str
    refusals: tuple[int, ...]
    """Error statuses of every operation that needs a key."""
    body_refusals: tuple[int, ...]
    """Error statuses of every operation with a body."""


ENGINE = OpenApiInfo(
    title="Penstock",
    about=_ABOUT,
    tags=_TAGS,
    other_tag="The engine",
    key="A key of the engine.",
    problem=Problem,
    problem_type="application/problem+json",
    refusals=(401, 403),
    body_refusals=(400, 413, 415),
)


def document(operations: Sequence[Operation], info: OpenApiInfo = ENGINE) -> Document:
    kinds = [kind for operation in operations for kind in _kinds(operation)] + [info.problem]
    _, schemas = msgspec.json.schema_components(
        [kind for kind in kinds if _has_schema(kind)], ref_template=_REF
    )
    found = structs_in(kinds)
    for name, schema in schemas.items():
        _flatten(schema)
        _describe(schema, found.get(name))
    if "Job" in schemas:
        _complete(schemas["Job"])
        del schemas["Job"]["properties"]["pages"]  # see `records.job_json`
    paths: Document = {}
    for operation in operations:
        entries = paths.setdefault(_VARIES.sub(r"{\1}", operation.path), {})
        entries[operation.method.lower()] = _entry(operation, schemas, info)
    queries = {operation.query.__name__ for operation in operations if operation.query}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": info.title,
            "version": __version__,
            "description": info.about,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in dict.fromkeys([*info.tags.values(), info.other_tag])],
        "paths": paths,
        "components": {
            "schemas": {name: schemas[name] for name in sorted(schemas) if name not in queries},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": info.key}
            },
        },
    }


def _complete(job: Document) -> None:
    """A job's record is written by hand, with what its Struct does not have."""
    job["properties"] = {
        "job_id": {"type": "string"},
        **job["properties"],
        "why": {"type": "string", "description": "Where it was asked for."},
    }
    job["required"] = ["job_id", *job["required"]]


def _kinds(operation: Operation) -> list[Any]:
    own = (operation.query, operation.body, operation.answer, operation.problem_kind)
    return [*own, *operation.others.values()]


def _has_schema(kind: Any) -> bool:
    return kind is not None and kind not in (bytes, str)


def _flatten(schema: Any) -> None:
    """Pairs as lists of two: not every reader knows `prefixItems`."""
    if isinstance(schema, list | tuple):
        for one in schema:
            _flatten(one)
    elif isinstance(schema, dict):
        kinds = schema.get("prefixItems", [])
        if kinds and all(kind == kinds[0] for kind in kinds):
            del schema["prefixItems"]
            schema["items"] = kinds[0]
        for one in schema.values():
            _flatten(one)


def _describe(schema: Document, kind: type[Struct] | None) -> None:
    """Add docstrings as descriptions to a schema."""
    schema.pop("title", None)
    if kind is None:
        return
    said = sentences(kind)
    for name, field in schema.get("properties", {}).items():
        if name in said:
            field["description"] = said[name]


def _entry(operation: Operation, schemas: Document, info: OpenApiInfo) -> Document:
    entry: Document = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [info.tags.get(operation.tag, info.other_tag)],
        "security": [] if operation.role is PUBLIC else [{"key": []}],
    }
    description = " ".join(filter(None, (operation.description, who(operation, info))))
    entry["description"] = description
    if parameters := [*_path_parameters(operation), *_query_parameters(operation, schemas)]:
        entry["parameters"] = parameters
    if operation.body is not None:
        entry["requestBody"] = {
            "required": not operation.may_be_empty,
            "content": _content(operation.body_type, operation.body),
        }
    entry["responses"] = _responses(operation, info)
    return entry


def who(operation: Operation, info: OpenApiInfo) -> str:
    """The required role, in a sentence."""
    if operation.role is PUBLIC:
        return "Needs no key."
    if operation.role is ANY:
        return info.any_key
    return f"Role: {operation.role}."


def _path_parameters(operation: Operation) -> list[Document]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _VARIES.findall(operation.path)
    ]


def _query_parameters(operation: Operation, schemas: Document) -> list[Document]:
    if operation.query is None:
        return []
    parameters = []
    for name, schema in schemas[operation.query.__name__]["properties"].items():
        plain = {key: value for key, value in schema.items() if key != "description"}
        parameter = {"name": name, "in": "query", "schema": _without_null(plain)}
        if "description" in schema:
            parameter["description"] = schema["description"]
        parameters.append(parameter)
    return parameters


def _without_null(schema: Document) -> Document:
    """A parameter is left out rather than null."""
    if schema.get("default", 0) is None:
        schema = {key: value for key, value in schema.items() if key != "default"}
    kinds = [kind for kind in schema.pop("anyOf", []) if kind != {"type": "null"}]
    return {**schema, **kinds[0]} if kinds else schema


def _responses(operation: Operation, info: OpenApiInfo) -> Document:
    responses = {str(operation.status): _success(operation, operation.status, operation.answer)}
    for status, kind in operation.others.items():
        responses[str(status)] = _success(operation, status, kind)
    common = () if operation.role is PUBLIC else info.refusals
    with_body = () if operation.body is None else info.body_refusals
    for status in sorted({*common, *with_body, *operation.refusals}):
        responses[str(status)] = _refusal(TITLES[status], operation, info)
    responses["default"] = _refusal("Any other problem", operation, info)
    return responses


def _success(operation: Operation, status: int, kind: Any) -> Document:
    answer: Document = {"description": HTTPStatus(status).phrase}
    if kind is not None:
        answer["content"] = _content(operation.answer_type, kind)
        if status == operation.status:
            answer["content"] |= {media_type: {} for media_type in operation.other_types}
    if (status, getattr(kind, "__name__", "")) in _LOCATED:
        answer["headers"] = {
            "Location": {"description": "Where the job is.", "schema": {"type": "string"}}
        }
    return answer


def _content(media_type: str, kind: Any) -> Document:
    if kind is bytes:
        return {media_type: {}}
    if media_type == "application/x-ndjson":
        schema = {"type": "string", "description": f"Lines; each is a {kind.__name__}, as JSON."}
        return {media_type: {"schema": schema}}
    return {media_type: {"schema": _schema(kind)}}


def _schema(kind: Any) -> Document:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def _refusal(description: str, operation: Operation, info: OpenApiInfo) -> Document:
    if operation.problem_kind is not None:
        content = _content("application/json", operation.problem_kind)
    else:
        content = _content(info.problem_type, info.problem)
    return {"description": description, "content": content}


@cache
def sentences(kind: type[Struct]) -> dict[str, str]:
    """Docstrings by field, inherited ones included; empty without the source."""
    found: dict[str, str] = {}
    kind = getattr(kind, "__source__", kind)  # what a derived Struct has its fields from
    for ancestor in reversed(kind.__mro__):
        if issubclass(ancestor, Struct) and ancestor is not Struct:
            found |= _own(ancestor)
    return found


def _own(kind: type) -> dict[str, str]:
    try:
        body = ast.parse(dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    found = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        match item, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def structs_in(kinds: Iterable[Any]) -> dict[str, type[Struct]]:
    """Every Struct that these types are made of, by name."""
    found: dict[str, type[Struct]] = {}
    ahead = list(kinds)
    while ahead:
        kind = ahead.pop()
        ahead.extend(get_args(kind))
        if isinstance(kind, type) and issubclass(kind, Struct) and kind.__name__ not in found:
            found[kind.__name__] = kind
            ahead.extend(get_type_hints(kind).values())
    return found
