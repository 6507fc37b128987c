"""Field ownership: who set which field, and what server-side apply makes of it.

A path is a tuple of steps, `f:NAME` in a map and `k:{"KEY":VALUE}` in a list of maps that has a key. Other lists are one value.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.kubernetes.problems import Refused
from tests.support.kubernetes.resources import Object

Path = tuple[str, ...]
_KEYS = {
    "containers": ("name",), "initContainers": ("name",), "volumes": ("name",), "env": ("name",), "conditions": ("type",),
    "volumeMounts": ("mountPath",), "imagePullSecrets": ("name",), "ownerReferences": ("uid",),
}  # fmt: skip
_IGNORED = {"apiVersion", "kind"}
_SYSTEM = {
    "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
    "deletionGracePeriodSeconds", "managedFields", "selfLink",
}  # fmt: skip
_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Manager:
    """Who writes, and how: `Apply`, or `Update` for everything else."""

    name: str
    operation: str
    subresource: str = ""


Owners = dict[Manager, set[Path]]


def leaves(value: Any, path: Path = (), name: str = "") -> Iterator[tuple[Path, Any]]:
    """Give the fields of an object that can be owned, with their values."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            if not path and key in _IGNORED:
                continue
            if path == ("f:metadata",) and key in _SYSTEM:
                continue
            yield from leaves(part, (*path, f"f:{key}"), key)
    elif isinstance(value, list) and value and _keyed(name, value):
        for part in value:
            step = _step(name, part)
            yield (*path, step), _ABSENT
            yield from leaves(part, (*path, step), "")
    elif path and path != ("f:metadata",):
        yield path, value


def changed(before: Object, after: Object) -> tuple[set[Path], set[Path]]:
    """Give the fields that an update set, and those that it removed."""
    old, new = dict(leaves(before)), dict(leaves(after))
    return {path for path, value in new.items() if old.get(path, _ABSENT) != value or path not in old}, (
        old.keys() - new.keys()
    )


def update(owners: Owners, manager: Manager, before: Object, after: Object) -> None:
    """Note an update: what it changed is its manager's now."""
    set_, removed = changed(before, after)
    for paths in owners.values():
        paths.difference_update(set_, removed)
    if set_:
        owners.setdefault(manager, set()).update(set_)
    _drop_empty(owners)


def apply(owners: Owners, manager: Manager, live: Object, wanted: Object, *, force: bool) -> Object:
    """Merge what a manager wants into an object.

    Raises:
        Refused: 409, another manager owns a field that has another value, and `force` is not set.
    """
    now, mine = dict(leaves(live)), dict(leaves(wanted))
    conflicts: dict[Manager, list[Path]] = {}
    for other, paths in owners.items():
        if other == manager:
            continue
        for path in paths:
            if path in mine and mine[path] is not _ABSENT and now.get(path, _ABSENT) != mine[path]:
                conflicts.setdefault(other, []).append(path)
    if conflicts and not force:
        said = [
            f'conflict with "{other.name}": {dotted(path)}'
            for other, paths in conflicts.items()
            for path in paths
        ]
        raise Refused(
            409,
            "Conflict",
            f"Apply failed with {len(said)} conflict{'s' if len(said) > 1 else ''}: {'; '.join(said)}",
            {"causes": [{"reason": "FieldManagerConflict", "message": text} for text in said]},
        )
    for other, lost in conflicts.items():
        owners[other].difference_update(lost)
    given_up = owners.get(manager, set()) - mine.keys()
    kept: set[Path] = set().union(*(paths for other, paths in owners.items() if other != manager))
    result = copy.deepcopy(live)
    for path in sorted(given_up - kept, key=len):  # an item of a list before its fields
        if not any(each[: len(path)] == path for each in kept | mine.keys()):
            _remove(result, path)
    _merge(result, wanted)
    owners[manager] = set(mine)
    _drop_empty(owners)
    return result


def rendered(owners: Owners, api_version: str) -> list[Object]:
    """Give `metadata.managedFields`."""
    entries = []
    for manager, paths in owners.items():
        tree: Object = {}
        for path in sorted(paths):
            node = tree
            for step in path:
                node = node.setdefault(step, {})
        entry = {
            "manager": manager.name, "operation": manager.operation, "apiVersion": api_version,
            "fieldsType": "FieldsV1", "fieldsV1": tree,
        }  # fmt: skip
        if manager.subresource:
            entry["subresource"] = manager.subresource
        entries.append(entry)
    return entries


def dotted(path: Path) -> str:
    return "".join(f".{step[2:]}" if step.startswith("f:") else f"[{step[2:]}]" for step in path)


def _drop_empty(owners: Owners) -> None:
    for manager in [each for each, paths in owners.items() if not paths]:
        del owners[manager]


def _keyed(name: str, items: list[Any]) -> bool:
    keys = _KEYS.get(name)
    return keys is not None and all(
        isinstance(item, dict) and all(key in item for key in keys) for item in items
    )


def _step(name: str, item: Object) -> str:
    return "k:" + json.dumps({key: item[key] for key in _KEYS[name]}, sort_keys=True, separators=(",", ":"))


def _merge(live: Object, wanted: Object) -> None:
    for name, value in wanted.items():
        there = live.get(name)
        if isinstance(value, dict) and isinstance(there, dict):
            _merge(there, value)
        elif isinstance(value, list) and isinstance(there, list) and value and there:
            if _keyed(name, value) and _keyed(name, there):
                by_key = {_step(name, item): item for item in there}
                for item in value:
                    step = _step(name, item)
                    if step in by_key:
                        _merge(by_key[step], item)
                    else:
                        there.append(copy.deepcopy(item))
            else:
                live[name] = copy.deepcopy(value)
        else:
            live[name] = copy.deepcopy(value)


def _remove(live: Object, path: Path) -> None:
    """Remove a field, and the maps that are empty without it."""
    node: Any = live
    trail: list[tuple[Any, Any]] = []
    for step in path:
        if step.startswith("f:"):
            if not isinstance(node, dict) or step[2:] not in node:
                return
            trail.append((node, step[2:]))
            node = node[step[2:]]
        else:
            key = json.loads(step[2:])
            if not isinstance(node, list):
                return
            index = next((i for i, item in enumerate(node) if key.items() <= item.items()), None)
            if index is None:
                return
            trail.append((node, index))
            node = node[index]
    for holder, key in reversed(trail):
        del holder[key]
        if holder or holder is live:
            return
