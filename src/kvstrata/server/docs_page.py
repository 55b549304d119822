"""`/docs`: the OpenAPI description as a plain page that loads nothing from anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from starlette.responses import HTMLResponse

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2rem; border-top: 1px solid #8886; padding-top: 1rem; font-size: 1.1rem; }
code, pre { font: 14px/1.4 ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
tr { border-bottom: 1px solid #8883; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #dde; } a { color: #9cf; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def docs_page(schema: Mapping[str, Any]) -> HTMLResponse:
    """The page for an OpenAPI description."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(schema['info'].get('description', ''))}</p>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts.extend(_operation(method, path, operation, schema))
    return HTMLResponse("\n".join(parts), headers={"content-security-policy": _POLICY})


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schema: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        yield "<h3>Body</h3>"
        yield from _table(body, schema)
    answer = (
        operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
    )
    if answer is not None:
        yield "<h3>Answer</h3>"
        yield from _table(answer, schema)


def _table(shape: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    resolved = _resolved(shape, schema)
    required = resolved.get("required", ())
    yield "<table><tr><th>Field</th><th>Type</th><th></th></tr>"
    for name, field in resolved.get("properties", {}).items():
        told = escape(field.get("description", ""))
        kind = escape(_type(field)) + (" (required)" if name in required else "")
        yield f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{told}</td></tr>"
    yield "</table>"


def _resolved(shape: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = shape.get("$ref")
    if reference is None:
        return shape
    found: Mapping[str, Any] = schema["components"]["schemas"][reference.rpartition("/")[2]]
    return found


def _type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        return " or ".join(_type(choice) for choice in field["anyOf"] if choice.get("type") != "null")
    if "const" in field:
        return json.dumps(field["const"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "anything"))
