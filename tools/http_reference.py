"""The page reference/http-api.md, made from the table of operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.api.openapi import Document, document
from penstock.api.operations import OPERATIONS
from penstock.api.options import HttpOptions
from penstock.api.problems import STATUS, TITLES
from penstock.core.errors import PenstockError

INTRODUCTION = """\
# The HTTP API

An engine that listens (`penstock up --http`, or the setting `http.listen`) answers
there. [How to use it](../how-to/http.md) shows the most common calls; the server itself has this
page at `/docs` and the OpenAPI 3.1 document at `/openapi.json`, both without a key.

- Everything under `/v1`, and `/metrics`, needs a key: `Authorization: Bearer <key>`.
- A body is JSON (`Content-Type: application/json`) unless the operation says otherwise. A field
  or parameter that does not exist is refused, with the one that was probably meant. So is a name
  that comes twice, nesting deeper than 64, and what is not JSON, as NaN.
- A job is its record, as `penstock show --json` prints it. Times are seconds since the epoch, UTC.
- Answers may get new fields at any time; ignore those that you do not know.
- `HEAD` works wherever `GET` does, except for streams; `OPTIONS` lists the methods of a path.
- Job ids in a path are written as they are, URIs of blobs escaped as one segment.

## Problems

What is refused is answered with a problem document (RFC 9457, `application/problem+json`):

```json
{
  "type": "urn:penstock:problem:invalid",
  "title": "Invalid value",
  "status": 422,
  "detail": "jobs[3].lables: unknown field",
  "code": "INVALID",
  "hint": "did you mean labels?",
  "field": "jobs[3].lables",
  "problem": "unknown field"
}
```

`code` is stable and meant for programs; it is that of the [error](error-codes.md) that Python
raises. `hint` says what to do next. A 429 or 503 has `Retry-After`. A 500 has nothing but an
`incident`, under which the server's log tells more.

"""

LIMITS = """\
## Limits

A client that takes too much, or too long, is answered and cut off. These are the defaults;
those that are [settings](settings.md) can be changed.

| what | how much | answer |
|---|---|---|
"""


Row = tuple[str, str, str]


def page() -> str:
    told = document(OPERATIONS)
    return "".join(
        [
            INTRODUCTION,
            *_statuses(),
            LIMITS,
            *_limits(HttpOptions()),
            "\n",
            *operations_of(told),
            "## Types\n\n",
            *types_of(told),
        ]
    )


def _statuses() -> Iterator[str]:
    yield "| status | title | errors |\n|---|---|---|\n"
    by_status: dict[int, list[type[PenstockError]]] = {status: [] for status in TITLES}
    for kind, status in STATUS.items():
        by_status[status].append(kind)
    for status, kinds in by_status.items():
        names = ", ".join(f"`{kind.__name__}`" for kind in kinds)
        yield f"| {status} | {TITLES[status]} | {names} |\n"
    yield "\n"


def _limits(options: HttpOptions) -> Iterator[str]:
    rows = [
        ("size of a body", size_of(options.max_body), "413"),
        ("size of a blob, and of a batch of jobs", size_of(options.max_upload), "413"),
        ("nesting of a body", f"{options.max_depth}", "400"),
        *connection_limits(options),
        (
            "open streams",
            f"{options.max_streams:,}, of one key {options.streams_per_key:,}",
            "429",
        ),
        (
            "requests that wait for a job",
            f"{options.max_waiting:,}, of one key {options.waiting_per_key:,}",
            "429",
        ),
        ("requests a second of one key", "no limit", "429"),
    ]
    yield from rows_of(rows)


def connection_limits(options: HttpOptions) -> list[Row]:
    """Those that every server has."""
    return [
        ("size of a head", size_of(options.max_head), "431"),
        ("time for a head", f"{options.head_timeout:g} s", "408"),
        (
            "time for a body",
            f"{options.body_grace:g} s, and more as long as {options.min_rate:,} bytes a second "
            f"come; {options.body_timeout:g} s in all",
            "408",
        ),
        ("time between two requests of a connection", f"{options.keep_alive:g} s", "it is closed"),
        ("time that a reader takes nothing", f"{options.stall:g} s", "it is cut off"),
        ("open connections", f"{options.max_connections:,}", "503"),
    ]


def rows_of(rows: list[Row]) -> Iterator[str]:
    for what, much, answer in rows:
        yield f"| {what} | {much} | {answer} |\n"


def size_of(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"


def operations_of(told: Document) -> Iterator[str]:
    schemas = told["components"]["schemas"]
    for tag in told["tags"]:
        yield f"## {tag['name']}\n\n"
        for path, entries in told["paths"].items():
            for method, entry in entries.items():
                if tag["name"] in entry["tags"]:
                    yield from _operation(method.upper(), path, entry, schemas)


def _operation(method: str, path: str, entry: Document, schemas: Document) -> Iterator[str]:
    yield f"### `{method} {path}`\n\n{entry['summary']}. {entry['description']}\n\n"
    asked = [one for one in entry.get("parameters", []) if one["in"] == "query"]
    if asked:
        yield "| parameter | type | |\n|---|---|---|\n"
        for one in asked:
            yield f"| `{one['name']}` | {_kind(one['schema'])} | {one.get('description', '')} |\n"
        yield "\n"
    if body := entry.get("requestBody"):
        yield from _body(body, schemas)
    yield f"Answers {_answers(entry['responses'])}.\n\n"


def _body(body: Document, schemas: Document) -> Iterator[str]:
    ((media_type, content),) = body["content"].items()
    may = "" if body["required"] else ", which may be left out"
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if not name:
        said = content.get("schema", {}).get("description", "the content itself")
        yield f"Body (`{media_type}`{may}): {said.rstrip('.')}.\n\n"
        return
    properties = schemas[name].get("properties", {})
    if not properties:
        return
    yield f"Body (`{media_type}`{may}):\n\n| field | type | |\n|---|---|---|\n"
    required = schemas[name].get("required", [])
    for field, schema in properties.items():
        need = "required. " if field in required else ""
        said = (need + schema.get("description", "")).strip()
        yield f"| `{field}` | {_kind(schema)} | {said[:1].upper() + said[1:]} |\n"
    yield "\n"


def types_of(told: Document) -> Iterator[str]:
    """Those that are not shown with an operation already."""
    schemas = told["components"]["schemas"]
    bodies = {
        one["schema"]["$ref"].rpartition("/")[2]
        for entries in told["paths"].values()
        for entry in entries.values()
        for one in entry.get("requestBody", {}).get("content", {}).values()
        if "$ref" in one.get("schema", {})
    }
    for name, schema in schemas.items():
        if "enum" in schema:
            values = ", ".join(f"`{value}`" for value in schema["enum"])
            yield f"### `{name}`\n\nOne of {values}.\n\n"
        elif name not in bodies and (fields := schema.get("properties")):
            yield f"### `{name}`\n\n{_said(schema)}| field | type | |\n|---|---|---|\n"
            for field, kind in fields.items():
                yield f"| `{field}` | {_kind(kind)} | {kind.get('description', '')} |\n"
            yield "\n"


def _said(schema: Document) -> str:
    said = " ".join(schema.get("description", "").split())
    return f"{said}\n\n" if said else ""


def _answers(responses: Document) -> str:
    good = [(status, one) for status, one in responses.items() if status[0] in "23"]
    bad = [status for status in responses if status[0] == "4"]
    said = ", ".join(f"{status}{_content(one)}" for status, one in good)
    return f"{said}; problems {', '.join(bad)}" if bad else said


def _content(answer: Document) -> str:
    kinds = [_kind(one.get("schema", {})) for one in answer.get("content", {}).values()]
    types = [f"`{media_type}`" for media_type in answer.get("content", {})]
    if not types:
        return ""
    return f" with {kinds[0]}" if kinds[0].startswith("`") else f" ({types[0]})"


def _kind(schema: Document) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        kinds = [_kind(kind) for kind in schema["anyOf"] if kind != {"type": "null"}]
        return " or ".join(kinds)
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"] if value != "")
    kind: Any = schema.get("type", "any JSON")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_kind(schema['additionalProperties'])}"
    return str(kind)
