"""Writes the field tables of docs/configuration.md, and deploy/kubernetes/crd.yaml, from the Config classes: `python tools/config_reference.py`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pydantic

from penstock.core.config import field_docs
from penstock.deploy.manifests.pod_graph import dump_all
from penstock.deploy.operator.definitions import definitions
from penstock.graph import Graph

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "configuration.md"
DEFINITIONS = _ROOT / "deploy" / "kubernetes" / "crd.yaml"
BEGIN, END = "<!-- fields: made by tools/config_reference.py -->\n", "<!-- end of fields -->\n"
_REPEATED = {"roles.prefill", "roles.decode"}  # the same fields as roles.aggregated


def tables(config: type[pydantic.BaseModel]) -> Iterator[str]:
    """Yield one Markdown table for the plain fields of the graph, then one for each of its parts."""
    head = "| field | default | meaning |\n|---|---|---|\n"
    docs, parts = field_docs(config), {}
    yield f"### Top level\n\n{head}"
    for name, field in config.model_fields.items():
        if part := next(iter(_models_in(field.annotation)), None):
            parts[_place(name, field)] = part
        yield _row(name, field, docs.get(name))
    for place, part in parts.items():
        yield f"\n### `{place}`\n\n{head}"
        yield from rows(part, place)
    yield "\n"


def rows(config: type[pydantic.BaseModel], path: str) -> Iterator[str]:
    """Yield a row for each field of `config` under its dotted place, those of the configs inside it behind their own."""
    docs = field_docs(config)
    for name, field in config.model_fields.items():
        place = f"{path}.{name}"
        yield _row(place, field, docs.get(name))
        if place not in _REPEATED and (inner := next(iter(_models_in(field.annotation)), None)):
            yield from rows(inner, _place(place, field))


def _place(place: str, field: Any) -> str:
    return place + ("[]" if "tuple" in str(field.annotation) else "")


def _row(place: str, field: Any, meaning: str | None) -> str:
    inner = next(iter(_models_in(field.annotation)), None)
    return f"| `{place}` | {_default(field, inner)} | {meaning} |\n"


def _default(field: Any, inner: type[pydantic.BaseModel] | None) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, pydantic.BaseModel) and inner:
        return "its fields"
    return f"`{value!r}`" if not isinstance(value, str) else f"`{value}`"


def _models_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def render(page: str) -> str:
    """Return the page with its tables made anew."""
    fields = "".join(tables(Graph))
    return re.sub(f"(?s){re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{fields}{END}", page)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    crds = dump_all(definitions())
    if "--check" in sys.argv:
        sys.exit(render(page) != page or DEFINITIONS.read_text(encoding="utf-8") != crds)
    PAGE.write_text(render(page), encoding="utf-8")
    DEFINITIONS.write_text(crds, encoding="utf-8")
