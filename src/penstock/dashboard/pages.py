"""HTML pages without scripts: the OpenAPI document, and signing in."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html import escape
from typing import Any

Document = dict[str, Any]

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 0.92em ui-monospace, monospace; background: var(--soft); padding: 0 0.25em;
  border-radius: 3px; }
h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem; }
nav { columns: 18rem; } nav a { display: block; text-decoration: none; }
details { border: 1px solid var(--line); border-radius: 6px; margin: 0.5rem 0; padding: 0 0.8rem; }
summary { cursor: pointer; padding: 0.5rem 0; }
table { border-collapse: collapse; width: 100%; margin: 0.4rem 0 1rem; }
td, th { border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  padding: 0.25rem 0.6rem 0.25rem 0; }
.method { display: inline-block; min-width: 4.2rem; font-weight: 600; }
"""
STYLE_SOURCE = f"sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}"
"""The style sheet by its hash, for the page's Content-Security-Policy."""

_CODE = re.compile(r"`([^`]+)`")


def page(document: Document) -> str:
    info = document["info"]
    title = f"{info['title']} {info['version']}: HTTP API"
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1><p>{_text(info['description'])}</p>",
            '<p>The same for programs: <a href="/openapi.json">/openapi.json</a>.</p>',
            *_sections(document),
            "<h2>Types</h2>",
            *_types(document["components"]["schemas"]),
            "</body></html>\n",
        ]
    )


def _sections(document: Document) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2>"
        for path, entries in document["paths"].items():
            for method, entry in entries.items():
                if tag["name"] in entry["tags"]:
                    yield from _operation(method.upper(), path, entry)


def _operation(method: str, path: str, entry: Document) -> Iterator[str]:
    yield f'<details id="{escape(entry["operationId"])}"><summary>'
    yield f'<span class="method">{method}</span> <code>{escape(path)}</code> '
    yield f"{_text(entry['summary'])}</summary><p>{_text(entry['description'])}</p>"
    if parameters := entry.get("parameters"):
        yield "<h3>Parameters</h3><table>"
        for parameter in parameters:
            said = _text(parameter.get("description", ""))
            yield _row(parameter["name"], f"{_kind(parameter['schema'])}, {parameter['in']}", said)
        yield "</table>"
    if body := entry.get("requestBody"):
        need = "" if body["required"] else " (may be left out)"
        yield f"<h3>Body{need}</h3><p>{_contents(body['content'])}</p>"
    yield "<h3>Answers</h3><table>"
    for status, answer in entry["responses"].items():
        yield _row(status, _contents(answer.get("content", {})), escape(answer["description"]))
    yield "</table></details>"


def _types(schemas: Document) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f'<details id="type-{name}"><summary><code>{name}</code></summary>'
        if said := schema.get("description"):
            yield f"<p>{_text(said)}</p>"
        if "enum" in schema:
            yield "<p>" + ", ".join(f"<code>{escape(str(one))}</code>" for one in schema["enum"])
            yield "</p>"
        elif properties := schema.get("properties"):
            required = schema.get("required", ())
            yield "<table>"
            for field, kind in properties.items():
                need = " <b>required</b>" if field in required else ""
                yield _row(field, _kind(kind) + need, _text(kind.get("description", "")))
            yield "</table>"
        yield "</details>"


def _row(name: str, kind: str, said: str) -> str:
    return f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{said}</td></tr>"


def _contents(content: Document) -> str:
    return "; ".join(
        f"<code>{escape(media_type)}</code> {_kind(one.get('schema', {}))}"
        for media_type, one in content.items()
    )


def _kind(schema: Document) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#type-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    kind: Any = schema.get("type", "")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_kind(schema['additionalProperties'])}"
    return escape(str(kind))


def _text(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text, quote=False))


def sign_in_page(link: str, problem: str = "") -> bytes:
    """Asks for a key, or with a link only for a press of the button."""
    field = f'<input type="hidden" name="link" value="{escape(link)}">'
    if not link:
        field = (
            '<label class="field"><span>API key</span><input type="password" name="key" required '
            'autofocus autocomplete="current-password"></label>'
        )
    said = f'<p class="problem" role="alert">{escape(problem)}</p>' if problem else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Sign in: Penstock</title>'
        '<link rel="icon" href="/dashboard/static/icon.svg" type="image/svg+xml">'
        '<link rel="stylesheet" href="/dashboard/static/style.css"></head><body>'
        f'<main class="sign-in"><h1>Sign in to Penstock</h1>{said}'
        f'<form method="post" action="/sign-in">{field}<button class="primary">Sign in</button>'
        '</form><p class="soft">It opens the dashboard: what the machines do, and why something '
        "waits.</p></main></body></html>\n"
    ).encode()
