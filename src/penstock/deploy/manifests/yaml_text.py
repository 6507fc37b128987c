"""YAML of manifests: stable order, no anchors, text of several lines as a block."""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text and not any(line != line.rstrip() for line in text.split("\n")) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(document: Any) -> str:
    """Write one document, its keys in their order, in ASCII: other characters are escaped, as readers disagree on some."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000)


def dump_all(objects: Iterable[Mapping[str, Any]]) -> str:
    """Write one document for each object."""
    return "".join(f"---\n{dump(each)}" for each in objects)
