"""Label and field selectors."""

import re

from tests.support.kubernetes.problems import Refused
from tests.support.kubernetes.resources import Object
from tests.support.kubernetes.store import Event

_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")


class Selector:
    """Which objects a list or watch is about."""

    def __init__(self, labels: str, fields: str) -> None:
        """Read `a=b,c!=d,e,!f,g in (h,i)` and `metadata.name=x,status.phase!=y`."""
        self._labels = [part.strip() for part in re.split(r",(?![^(]*\))", labels) if part.strip()]
        self._fields = [part.strip() for part in fields.split(",") if part.strip()]

    def matches(self, body: Object) -> bool:
        labels = body["metadata"].get("labels") or {}
        return all(_has_label(labels, part) for part in self._labels) and all(
            _has_field(body, part) for part in self._fields
        )

    def told(self, event: Event) -> str | None:
        """Give the type under which a watch tells an event; None for not at all."""
        is_now = self.matches(event.body)
        was = event.before is not None and self.matches(event.before)
        if event.type == "DELETED":
            return "DELETED" if is_now or was else None
        if is_now:
            return "MODIFIED" if was else "ADDED"
        return "DELETED" if was else None


def _has_label(labels: dict[str, str], part: str) -> bool:
    found = _SET.match(part)
    if found is not None:
        key, relation, values = found.groups()
        is_in = labels.get(key) in {value.strip() for value in values.split(",")}
        return is_in if relation == "in" else not is_in
    if "!=" in part:
        key, _, value = part.partition("!=")
        return labels.get(key.strip()) != value.strip()
    if "=" in part:
        key, value = re.split(r"==?", part, maxsplit=1)
        return labels.get(key.strip()) == value.strip()
    return part[1:] not in labels if part.startswith("!") else part in labels


def _has_field(body: Object, part: str) -> bool:
    key, negated, value = re.split(r"(!?)==?", part, maxsplit=1)
    if key not in {"metadata.name", "metadata.namespace", "status.phase", "spec.nodeName"}:
        raise Refused(400, "BadRequest", f"field label not supported: {key}")
    found: object = body
    for step in key.split("."):
        found = found.get(step, "") if isinstance(found, dict) else ""
    return (found != value) if negated else (found == value)
