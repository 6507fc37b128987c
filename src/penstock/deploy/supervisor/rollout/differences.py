"""What differs between the graph of a deployment that runs and a changed one, and which of it can be changed in place."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.core.types.instances import Role
from penstock.deploy.card import served_name
from penstock.deploy.control.messages import Difference
from penstock.graph import Graph, RoleSpec

ALL = "all"
_REPLACING = {"model", "context_length", "chat_template", "worker"}
"""Parts of a graph, besides roles, that only workers read."""
_AT_START = {
    "frontend": "frontends read it at their start",
    "router": "frontends read it at their start",
    "request_plane": "frontends and workers agree on it at their start",
    "runtime": "processes find each other by it from their start on",
    "tracing": "frontends read it at their start",
    "planner": "the planner reads it at its start",
    "slo": "the planner reads it at its start",
    "supervision": "the supervisor reads it at its start",
    "block_size": "the KV of all workers is in blocks of this size",
}
_OF_PODS = ("kubernetes", "frontend.kubernetes")
_NOT_HERE = "nothing here: pods of Kubernetes have it"
_TEXT_MAX = 48
_ABSENT = "-"
Roles = Mapping[Role, RoleSpec]


def differences(old: Graph, new: Graph, *, old_here: Roles, new_here: Roles) -> Iterator[Difference]:
    """Yield each field that differs, the graph's before the roles'.

    Args:
        old: the graph of the deployment that runs.
        new: the changed one.
        old_here: roles of `old` that this host runs, with their numbers of workers here.
        new_here: the same of `new`.
    """
    yield from _of_graph(old, new)
    yield from _of_regions(old, new)
    for role in Role:
        before, after = old_here.get(role), new_here.get(role)
        if before is None and after is None:
            if old.roles.present().get(role) != new.roles.present().get(role):
                yield _row(role, "", "", "", "nothing here: other hosts run this role")
        elif before is None or after is None:
            yield _whole_role(role, before, after, has_planner=old.planner is not None)
        else:
            yield from _of_role(role, before, after)


def _of_graph(old: Graph, new: Graph) -> Iterator[Difference]:
    before, after = (
        _flat(graph.model_dump(mode="json", exclude={"roles", "regions"})) for graph in (old, new)
    )
    if served_name(old) != served_name(new):
        yield _refused(
            ALL,
            "served_name",
            served_name(old),
            served_name(new),
            f"clients ask for {served_name(old)}; set served_name to that",
        )
    for path in _changed(before, after):
        top = path.partition(".")[0]
        values = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if top == "served_name" or (top == "model" and _is_same_place(old.model, new.model)):
            continue
        if path.startswith(_OF_PODS):
            yield _row(ALL, path, *values, _NOT_HERE)
        elif top in _REPLACING and path != "worker.own_cores":
            yield _row(ALL, path, *values, "replace workers")
        else:
            yield _refused(ALL, path, *values, _AT_START.get(top, "it is read at the start"))


def _of_regions(old: Graph, new: Graph) -> Iterator[Difference]:
    """Yield the links that start, end or are replaced."""
    before, after = ({each.name: each for each in graph.regions} for graph in (old, new))
    for name in sorted({*before, *after}):
        was, is_now = before.get(name), after.get(name)
        if was == is_now:
            continue
        action = (
            "start its link" if was is None else "drain its link" if is_now is None else "replace its link"
        )
        old_urls, new_urls = (_ABSENT if each is None else ", ".join(each.urls) for each in (was, is_now))
        yield _row(ALL, f"regions.{name}", old_urls, new_urls, action)


def _of_role(role: Role, before: RoleSpec, after: RoleSpec) -> Iterator[Difference]:
    old, new = (_flat(spec.model_dump(mode="json")) for spec in (before, after))
    for path in _changed(old, new):
        values = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if path == "replicas":
            count = after.replicas - before.replicas
            yield _row(role, path, *values, f"start {count}" if count > 0 else f"drain {-count}")
        elif path.startswith("kv.host") or (path == "replicas_max" and after.kv.host):
            yield _refused(role, path, *values, "memory of the host is laid out at the start")
        elif path == "replicas_max":
            yield _row(role, path, *values, "another bound of scaling")
        elif path.startswith("kubernetes"):
            yield _row(role, path, *values, _NOT_HERE)
        else:
            yield _row(role, path, *values, "replace workers")
    if after.kv.host and after.replicas > before.replicas_most:
        yield _refused(
            role,
            "replicas",
            before.replicas,
            after.replicas,
            f"memory of the host is laid out for {before.replicas_most} workers",
        )


def _whole_role(
    role: Role, before: RoleSpec | None, after: RoleSpec | None, *, has_planner: bool
) -> Difference:
    if has_planner:
        old, new = (_ABSENT if spec is None else spec.engine for spec in (before, after))
        return _refused(role, "", old, new, "the planner knows the roles of its start")
    if after is None:
        assert before is not None, "one of them is there"
        return _row(role, "", before.engine, _ABSENT, "drain all its workers")
    if after.kv.host:
        return _refused(
            role, "kv.host", _ABSENT, after.kv.host, "memory of the host is laid out at the start"
        )
    return _row(role, "", _ABSENT, after.engine, f"start {after.replicas}")


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(path for path in {*before, *after} if before.get(path, _ABSENT) != after.get(path, _ABSENT))


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Give the values of nested mappings by dotted path; a list is one value."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _is_same_place(one: str, other: str) -> bool:
    paths = [Path(name).expanduser() for name in (one, other)]
    return all(path.is_dir() for path in paths) and paths[0].resolve() == paths[1].resolve()


def _row(role: str, field: str, old: object, new: object, action: str) -> Difference:
    return Difference(role=role, field=field, old=_text(old), new=_text(new), action=action)


def _refused(role: str, field: str, old: object, new: object, why: str) -> Difference:
    return Difference(role=role, field=field, old=_text(old), new=_text(new), refusal=why)


def _text(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_MAX else f"{text[: _TEXT_MAX - 3]}..."
