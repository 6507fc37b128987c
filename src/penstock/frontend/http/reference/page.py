"""The reference as one HTML page without scripts: it needs no network, and a screen reader reads it in order."""

from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
code { font-family: ui-monospace, monospace; }
h2 { border-top: 1px solid; padding-top: .5rem; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0; }
summary { cursor: pointer; }
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


def reference_page(document: dict[str, Any]) -> str:
    """Render an OpenAPI document."""
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    contents = "".join(
        f'<li><a href="#{escape(it["operationId"])}"><code>{method} {escape(path)}</code></a> {escape(it["summary"])}</li>'
        for method, path, it in operations
    )
    sections = "".join("".join(_operation(*operation)) for operation in operations)
    schemas = "".join("".join(_schema(*item)) for item in sorted(document["components"]["schemas"].items()))
    info = document["info"]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])} API</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main>'
        f"<h1>{escape(info['title'])} API {escape(info['version'])}</h1>"
        '<p>As a document for programs: <a href="/openapi.json">OpenAPI</a>. Keys go in <code>Authorization: Bearer</code>.</p>'
        f"<nav aria-label='Operations'><ul>{contents}</ul></nav>{sections}<h2>Types</h2>{schemas}</main></body></html>"
    )


def _operation(method: str, path: str, it: dict[str, Any]) -> Iterator[str]:
    yield f'<section id="{escape(it["operationId"])}"><h2><code>{method} {escape(path)}</code></h2>'
    yield f"<p>{escape(it['summary'])}.</p>"
    if parameters := it.get("parameters"):
        rows = "".join(
            f"<tr><th scope='row'><code>{escape(one['name'])}</code></th><td>{one['in']}</td>"
            f"<td>{_type(one['schema'])}</td></tr>"
            for one in parameters
        )
        yield f"<table><caption>Parameters</caption>{rows}</table>"
    for content in it.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, <code>{content[0]}</code>: {_type(content[1]['schema'])}</p>"
    for status, answer in it["responses"].items():
        kinds = ", ".join(
            f"<code>{kind}</code> {_type(item.get('schema', {}))}" for kind, item in answer["content"].items()
        )
        yield f"<p>{escape(status)}: {kinds}</p>"
    yield "</section>"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<details id="type-{escape(name)}"><summary><code>{escape(name)}</code></summary>'
    if text := schema.get("description"):
        yield f"<p>{escape(text)}</p>"
    if "properties" not in schema:
        yield f"<p>{_type(schema)}</p></details>"
        return
    required = set(schema.get("required", ()))
    yield "<table><thead><tr><th>field</th><th>type</th><th>default</th></tr></thead><tbody>"
    for field, kind in schema["properties"].items():
        default = "required" if field in required else escape(str(kind.get("default", "")))
        yield f"<tr><th scope='row'><code>{escape(field)}</code></th><td>{_type(kind)}</td><td>{default}</td></tr>"
    yield "</tbody></table></details>"


def _type(schema: dict[str, Any]) -> str:
    """Say a type in HTML."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#type-{name}"><code>{name}</code></a>'
    if options := schema.get("anyOf"):
        return " or ".join(map(_type, options))
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    if values := schema.get("enum"):
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    properties = schema.get("properties")
    return f"{kind} with <code>{escape(', '.join(properties))}</code>" if properties else kind
