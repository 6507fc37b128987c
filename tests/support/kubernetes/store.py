"""The objects of the API server: one revision for each change, and a history that watches read, until it is compacted."""

import asyncio
import copy
import datetime as dt
import itertools
import json
import re
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.kubernetes import fields, immutable, schema
from tests.support.kubernetes.fields import Manager, Owners
from tests.support.kubernetes.problems import Refused, exists, expired, invalid, not_found, stale
from tests.support.kubernetes.resources import Kind, Kinds, Object

Name = tuple[str, str]
"""Namespace, empty for kinds without one, and name."""
_DEFINITIONS = ("apiextensions.k8s.io", "customresourcedefinitions")
_NAME_CHARACTERS_MAX = 253
_HISTORY_MAX = 10_000
_ANNOTATION_BYTES_MAX = 256 << 10
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")


@dataclass(slots=True)
class Stored:
    """An object, and who owns its fields."""

    body: Object
    owners: Owners = field(default_factory=dict)

    @property
    def uid(self) -> str:
        uid: str = self.body["metadata"]["uid"]
        return uid

    def shown(self) -> Object:
        body = copy.deepcopy(self.body)
        body["metadata"]["managedFields"] = fields.rendered(self.owners, body["apiVersion"])
        return body


@dataclass(frozen=True, slots=True)
class Event:
    revision: int
    kind: tuple[str, str]
    type: str
    body: Object
    before: Object | None = None


class Store:
    """All objects. One event loop owns it."""

    def __init__(self) -> None:
        self.kinds = Kinds()
        self.revision = 100
        self.oldest = 100
        """Watches may begin at this revision or later."""
        self.history: deque[Event] = deque()
        self.changed = asyncio.Event()
        """Set, and replaced, with each change."""
        self._objects: dict[tuple[str, str], dict[Name, Stored]] = {}

    def get(self, kind: Kind, name: Name) -> Stored:
        stored = self._objects.get(kind.key, {}).get(name)
        if stored is None:
            raise not_found(_plural(kind), name[1])
        return stored

    def all(self, kind: Kind, namespace: str | None = None) -> list[Stored]:
        """Give the objects of a kind in the order of their names."""
        objects = self._objects.get(kind.key, {})
        return [objects[name] for name in sorted(objects) if namespace is None or name[0] == namespace]

    def create(self, kind: Kind, namespace: str, body: Object, manager: Manager) -> Stored:
        body = copy.deepcopy(body)
        metadata = body.setdefault("metadata", {})
        if metadata.get("namespace", namespace) != namespace:
            raise Refused(400, "BadRequest", "the namespace of the object does not match that of the request")
        name = metadata.get("name")
        if not name or len(name) > _NAME_CHARACTERS_MAX:
            raise invalid(kind.name, str(name), ["metadata.name: Required value"])
        objects = self._objects.setdefault(kind.key, {})
        if (namespace, name) in objects:
            raise exists(_plural(kind), name)
        if metadata.get("resourceVersion"):
            raise Refused(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if kind.has_status:
            body.pop("status", None)
        body["apiVersion"], body["kind"] = kind.api_version, kind.name
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
        metadata.pop("managedFields", None)
        if kind.is_namespaced:
            metadata["namespace"] = namespace
        body = self._checked(kind, body)
        stored = Stored(body)
        fields.update(stored.owners, manager, {}, body)
        objects[namespace, name] = stored
        self._note("ADDED", kind, stored, None)
        if kind.key == _DEFINITIONS:
            self._establish(kind, stored)
        return stored

    def change(
        self,
        kind: Kind,
        name: Name,
        edit: Callable[[Object], Object],
        manager: Manager | None,
        *,
        subresource: str = "",
        owners: Owners | None = None,
    ) -> Stored:
        """Replace an object by what `edit` makes of it; what its resource does not own stays as it was.

        Args:
            manager: to whom changed fields belong then; None where `owners` says it.
            subresource: `status` or empty.
            owners: of its fields afterwards.
        """
        stored = self.get(kind, name)
        before = stored.body
        given = edit(copy.deepcopy(before))
        wanted_revision = given.get("metadata", {}).get("resourceVersion")
        if wanted_revision and wanted_revision != before["metadata"]["resourceVersion"]:
            raise stale(_plural(kind), name[1])
        wanted_uid = given.get("metadata", {}).get("uid", stored.uid)
        if wanted_uid != stored.uid:
            raise stale(_plural(kind), name[1])
        after = _merged(kind, before, given, subresource)
        after = self._checked(kind, after)
        if not subresource and (forbidden := immutable.causes(kind, before, after)):
            raise invalid(kind.name, name[1], forbidden)
        new_owners = copy.deepcopy(stored.owners if owners is None else owners)
        if manager is not None:
            fields.update(new_owners, manager, before, after)
        is_same = _without_revision(after) == _without_revision(before)
        if is_same and new_owners.keys() == stored.owners.keys():
            stored.owners = new_owners
            return stored
        if _spec_of(after) != _spec_of(before):
            after["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        stored.body, stored.owners = after, new_owners
        if "deletionTimestamp" in after["metadata"] and not after["metadata"].get("finalizers"):
            self._remove(kind, name)
        else:
            self._note("MODIFIED", kind, stored, before)
            if kind.key == _DEFINITIONS and not subresource:
                self._establish(kind, stored)
        return stored

    def delete(self, kind: Kind, name: Name, options: Object) -> Stored:
        """Delete an object: at once, or by a mark where finalizers remain."""
        stored = self.get(kind, name)
        wanted = options.get("preconditions", {})
        metadata = stored.body["metadata"]
        if wanted.get("uid", stored.uid) != stored.uid:
            raise stale(_plural(kind), name[1])
        if wanted.get("resourceVersion", metadata["resourceVersion"]) != metadata["resourceVersion"]:
            raise stale(_plural(kind), name[1])
        grace_s = options.get("gracePeriodSeconds")
        if grace_s is None and kind.key == ("", "pods"):
            grace_s = stored.body.get("spec", {}).get("terminationGracePeriodSeconds", 0)
        if metadata.get("finalizers") or grace_s:
            if "deletionTimestamp" not in metadata:
                before = copy.deepcopy(stored.body)
                metadata["deletionTimestamp"] = now()
                metadata["deletionGracePeriodSeconds"] = grace_s or 0
                self._note("MODIFIED", kind, stored, before)
        else:
            self._remove(kind, name)
        return stored

    def compact(self) -> None:
        """Forget the history: watches from before now are answered 410."""
        self.history.clear()
        self.oldest = self.revision

    def forget(self) -> None:
        """Lose all objects but definitions, as a restored etcd does; revisions go on."""
        kept = self._objects.get(_DEFINITIONS, {})
        self._objects = {_DEFINITIONS: kept}
        self.revision += 1000
        self.compact()
        self._wake()

    def since(self, revision: int) -> list[Event]:
        """Give all changes after a revision; raises Refused (410) where they are compacted or of another history."""
        if revision < self.oldest:
            raise expired(revision, self.oldest)
        if revision > self.revision:
            raise Refused(504, "Timeout", f"Too large resource version: {revision}, current: {self.revision}")
        later = itertools.takewhile(lambda event: event.revision > revision, reversed(self.history))
        return list(later)[::-1]

    def _checked(self, kind: Kind, body: Object) -> Object:
        annotations = body["metadata"].get("annotations") or {}
        if sum(len(key) + len(text) for key, text in annotations.items()) > _ANNOTATION_BYTES_MAX:
            raise invalid(
                kind.name, body["metadata"]["name"], ["metadata.annotations: Too long: 262144 bytes"]
            )
        labels = body["metadata"].get("labels") or {}
        if wrong := [text for text in labels.values() if not _LABEL.fullmatch(text)]:
            raise invalid(
                kind.name,
                body["metadata"]["name"],
                [
                    f"metadata.labels: Invalid value: {each!r}: must be no more than 63 characters"
                    for each in wrong
                ],
            )
        if kind.key == _DEFINITIONS:
            schema.check_definition(body)
        if kind.schema is not None:
            body = schema.prune(kind.schema, body)
            schema.check(kind.schema, body)
        return body

    def _establish(self, kind: Kind, stored: Stored) -> None:
        self.kinds.add(stored.body)
        if stored.body.get("status", {}).get("conditions"):
            return
        before = copy.deepcopy(stored.body)
        established = {"type": "Established", "status": "True", "lastTransitionTime": now()}
        stored.body["status"] = {"conditions": [established], "acceptedNames": stored.body["spec"]["names"]}
        self._note("MODIFIED", kind, stored, before)

    def _remove(self, kind: Kind, name: Name) -> None:
        stored = self._objects[kind.key].pop(name)
        self._note("DELETED", kind, stored, stored.body)
        if kind.key == _DEFINITIONS:
            self.kinds.remove(stored.body)
        self._collect()

    def _collect(self) -> None:
        """Delete objects that have owners, none of which exists."""
        uids: set[str] | None = None
        for (group, plural), objects in list(self._objects.items()):
            for name, stored in list(objects.items()):
                owners = stored.body["metadata"].get("ownerReferences") or ()
                if not owners or name not in objects:
                    continue
                if uids is None:
                    uids = {each.uid for others in self._objects.values() for each in others.values()}
                if any(owner["uid"] in uids for owner in owners):
                    continue
                kind = self.kinds.find(group, stored.body["apiVersion"].rpartition("/")[2], plural)
                if kind is not None and "deletionTimestamp" not in stored.body["metadata"]:
                    self.delete(kind, name, {})

    def _note(self, type_: str, kind: Kind, stored: Stored, before: Object | None) -> None:
        self.revision += 1
        stored.body["metadata"]["resourceVersion"] = str(self.revision)
        self.history.append(Event(self.revision, kind.key, type_, stored.shown(), before))
        if len(self.history) > _HISTORY_MAX:
            self.oldest = self.history.popleft().revision
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _merged(kind: Kind, before: Object, given: Object, subresource: str) -> Object:
    after = copy.deepcopy(before)
    if subresource == "status":
        after["status"] = given.get("status", {})
        return after
    system = {
        "uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion",
    }  # fmt: skip
    given_metadata = given.get("metadata", {}).items()
    metadata = {key: value for key, value in given_metadata if key not in {*system, "managedFields"}}
    metadata |= {key: before["metadata"][key] for key in system if key in before["metadata"]}
    metadata |= {key: before["metadata"][key] for key in ("name", "namespace") if key in before["metadata"]}
    after = {key: value for key, value in given.items() if key not in {"metadata", "apiVersion", "kind"}}
    if kind.has_status:
        after.pop("status", None)
        if "status" in before:
            after["status"] = before["status"]
    return {
        "apiVersion": before["apiVersion"],
        "kind": before["kind"],
        "metadata": metadata,
        **copy.deepcopy(after),
    }


def _spec_of(body: Object) -> str:
    return json.dumps(
        {key: value for key, value in body.items() if key not in {"metadata", "status"}}, sort_keys=True
    )


def _without_revision(body: Object) -> Any:
    metadata = {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}
    return {**body, "metadata": metadata}


def _plural(kind: Kind) -> str:
    return f"{kind.plural}.{kind.group}" if kind.group else kind.plural
