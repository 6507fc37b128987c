"""What pods get beside what Penstock gives them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pydantic

from penstock.core.config import Config, nearest, wrong
from penstock.core.document import check_plain
from penstock.graph.kubernetes.fields import (
    CONTAINER,
    LIST,
    MAPPING,
    MERGE_KEYS,
    NEEDED,
    NOT_OF_CONTAINER,
    NOT_OF_POD,
    POD,
    kind_of,
)


class KubernetesSpec(Config):
    """Fields of pods, merged over those that Penstock renders. Only `penstock render --target kubernetes` and the operator read them."""

    labels: dict[str, str | None] = pydantic.Field(default_factory=dict)
    """Further labels of the pods; null removes one that is set for all pods."""
    annotations: dict[str, str | None] = pydantic.Field(default_factory=dict)
    """Further annotations of the pods; null likewise."""
    pod: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Fields of PodSpec, such as `tolerations`, `nodeSelector` and `imagePullSecrets`."""
    container: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Fields of Penstock's container in these pods, such as `resources`, `env` and `volumeMounts`."""

    @pydantic.field_validator("pod")
    @classmethod
    def _check_pod(cls, pod: dict[str, Any]) -> dict[str, Any]:
        return _checked(pod, POD, _elsewhere("container", CONTAINER) | NOT_OF_CONTAINER | NOT_OF_POD)

    @pydantic.field_validator("container")
    @classmethod
    def _check_container(cls, container: dict[str, Any]) -> dict[str, Any]:
        return _checked(container, CONTAINER, _elsewhere("pod", POD) | NOT_OF_POD | NOT_OF_CONTAINER)


def _elsewhere(place: str, fields: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(fields, f"is a field of the {place}; set it in {place}")


def _checked(data: dict[str, Any], known: Mapping[str, str], not_here: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields if they have the names and shapes of Kubernetes; the API server checks what is inside."""
    check_plain(data, use="which go to Kubernetes as JSON")
    for problem in _problems(data, known, not_here):
        raise wrong(problem)
    return data


def _problems(data: dict[str, Any], known: Mapping[str, str], not_here: Mapping[str, str]) -> Iterator[str]:
    for field, value in data.items():
        if field not in known:
            yield f"{field}: {not_here.get(field) or f'unknown field of Kubernetes{nearest(field, list(known))}'}"
        elif value is None:
            if field in NEEDED:
                yield f"{field}: null would remove what Penstock needs in it; leave it out, or give a list of further entries"
        elif kind_of(value) != known[field]:
            yield f"{field}: must be {known[field]}, got {value!r}"
        elif known[field] == LIST:
            yield from _of_entries(field, value)
        elif field == "resources":
            for part, inner in value.items():
                if inner is not None and kind_of(inner) != (LIST if part == "claims" else MAPPING):
                    yield f"resources.{part}: must be {LIST if part == 'claims' else MAPPING}, got {inner!r}"


def _of_entries(field: str, entries: list[Any]) -> Iterator[str]:
    key = MERGE_KEYS.get(field)
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            yield f"{field}.{number}: must be a mapping, got {entry!r}"
        elif key is not None and key not in entry:
            yield f"{field}.{number}.{key}: missing; entries are merged by it"
        elif key is not None and type(entry[key]) is not (kind := int if field == "ports" else str):
            yield f"{field}.{number}.{key}: must be {'an integer' if kind is int else 'text'}, got {entry[key]!r}"
