"""`--set roles.decode.replicas=4`: a dotted path and a YAML value."""

from collections.abc import Sequence
from typing import Any

from penstock.core.config import Path
from penstock.core.document import parse_yaml
from penstock.core.errors import ConfigError

SET = "--set"


class Overrides:
    """Values set on the command line, applied to a document before validation."""

    def __init__(self, assignments: Sequence[str] = ()) -> None:
        """Parse `--set` values.

        Raises:
            ConfigError: a value is not `key=value`, not YAML, or sets a field twice.
        """
        self._values: dict[Path, Any] = {}
        self._flags: dict[Path, str] = {}
        self._made: dict[Path, Path] = {}  # mapping created by an assignment: path of that assignment
        for assignment in assignments:
            key, equals, value = assignment.partition("=")
            if not equals or not all(key.split(".")):
                raise ConfigError(
                    f"{SET} {assignment}: must be key=value, as in {SET} roles.aggregated.replicas=2"
                )
            self.assign(key.strip(), parse_yaml(value, source=f"{SET} {key}", is_file=False), flag=SET)

    def assign(self, key: str, value: Any, *, flag: str) -> None:
        """Add one assignment.

        Args:
            key: dotted path, such as `roles.decode.replicas`.
            value: plain data; a string is read as the field's type.
            flag: flag named in errors.

        Raises:
            ConfigError: another assignment sets the same field.
        """
        path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        for other, flag_before in self._flags.items():
            if _overlap(path, other, self._values[other]):
                raise ConfigError(
                    f"{_named(flag, path)} and {_named(flag_before, other)} set the same field; give one of them"
                )
        self._values[path] = value
        self._flags[path] = flag

    def apply(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `data` with every assigned path set; creates missing mappings.

        Raises:
            ConfigError: a path leads through a value that is no mapping.
        """
        for path, value in self._values.items():
            for length in range(1, len(path)):
                if not _holds(data, path[:length]):
                    self._made[path[:length]] = path
            data = _with_value(data, path, value, f"{self._flags[path]} {'.'.join(map(str, path))}")
        return data

    def assigned(self) -> dict[str, Any]:
        """Return the assigned values by dotted path."""
        return {".".join(map(str, path)): value for path, value in self._values.items()}

    def source_of(self, path: Path, otherwise: str) -> str:
        """Give the flag that set the value at `path`, else `otherwise`."""
        for assigned, flag in reversed(self._flags.items()):
            if path[: len(assigned)] == assigned:
                return flag
        if path in self._made:
            return _named(self._flags[self._made[path]], self._made[path])
        return otherwise


def _named(flag: str, path: Path) -> str:
    return f"{flag} {'.'.join(map(str, path))}" if flag == SET else flag


def _overlap(path: Path, other: Path, other_value: Any) -> bool:
    """Tell whether two assignments set the same field, or the first overwrites the second."""
    if path == other[: len(path)]:
        return True
    return other == path[: len(other)] and _holds(other_value, path[len(other) :])


def _holds(node: Any, path: Path) -> bool:
    for part in path:
        inside = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        if part not in inside:
            return False
        node = node[part]
    return True


def _with_value(node: Any, path: Path, value: Any, where: str) -> Any:
    if not path:
        return value
    first, *rest = path
    if isinstance(node, list) and isinstance(first, int) and first < len(node):
        return [*node[:first], _with_value(node[first], tuple(rest), value, where), *node[first + 1 :]]
    if node is None:
        node = {}
    if isinstance(node, list):
        raise ConfigError(
            f"{where}: {first!r} is no index of a list of {len(node)}; set the whole list, as [...]"
        )
    if not isinstance(node, dict):
        raise ConfigError(f"{where}: {first!r} can only be set in a mapping, got {node!r}")
    return {**node, first: _with_value(node.get(first), tuple(rest), value, where)}
