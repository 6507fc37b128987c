"""`--set roles.decode.replicas=4`: one dotted path, one value written as in YAML."""

from collections.abc import Sequence
from typing import Any

from penstock.core.config import Path
from penstock.core.errors import ConfigError
from penstock.graph.document import parse_yaml

FLAG = "--set"


class Overrides:
    """Assignments from the command line, applied to a document before it is validated."""

    def __init__(self, assignments: Sequence[str]) -> None:
        """Read the assignments.

        Raises:
            ConfigError: one is not `key=value`, or its value is no YAML.
        """
        self._values: dict[Path, Any] = {}
        for assignment in assignments:
            key, equals, value = assignment.partition("=")
            parts = key.strip().split(".")
            if not equals or not all(parts):
                raise ConfigError(
                    f"{FLAG} {assignment}: must be key=value, as in {FLAG} roles.aggregated.replicas=2"
                )
            path = tuple(int(part) if part.isdecimal() else part for part in parts)
            self._values[path] = parse_yaml(value, source=f"{FLAG} {key}")

    def apply(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `data` with every assigned path set; mappings on the way are made where absent.

        Raises:
            ConfigError: a path leads through something that is no mapping.
        """
        for path, value in self._values.items():
            data = _with_value(data, path, value, path)
        return data

    def source_of(self, path: Path, otherwise: str) -> str:
        """Name where the value at `path` came from: the flag, or `otherwise`."""
        if any(path[: len(assigned)] == assigned for assigned in self._values):
            return FLAG
        return otherwise


def _with_value(node: Any, path: Path, value: Any, whole: Path) -> Any:
    if not path:
        return value
    first, *rest = path
    if isinstance(node, list) and isinstance(first, int) and first < len(node):
        return [*node[:first], _with_value(node[first], tuple(rest), value, whole), *node[first + 1 :]]
    if node is None:
        node = {}
    if not isinstance(node, dict):
        done = ".".join(str(part) for part in whole[: len(whole) - len(path)])
        key = ".".join(str(part) for part in whole)
        what = (
            f"a list of {len(node)}; set it whole, as [...]"
            if isinstance(node, list)
            else f"{node!r}, not a mapping"
        )
        raise ConfigError(f"{FLAG} {key}: {done} is {what}")
    return {**node, first: _with_value(node.get(first), tuple(rest), value, whole)}
