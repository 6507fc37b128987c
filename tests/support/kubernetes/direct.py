"""A client that calls the API server's store without a network, on any event loop, and counts what is written."""

from collections import Counter
from collections.abc import AsyncGenerator
from typing import Self

from penstock.core.errors import Unavailable
from penstock.runtime.kubernetes import (
    KubernetesAccess,
    KubernetesClient,
    KubernetesError,
    Listing,
    Object,
    Resource,
    WatchEvent,
)
from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.problems import Refused
from tests.support.kubernetes.requests import merge
from tests.support.kubernetes.resources import Kind
from tests.support.kubernetes.selectors import Selector
from tests.support.kubernetes.store import Store

_MANAGER = Manager("suite", "Update")


class DirectClient(KubernetesClient):
    """Several may share one store and its counts."""

    def __init__(self, store: Store, writes: Counter[str]) -> None:
        super().__init__(KubernetesAccess("http://direct", namespace="default"), timeout_s=10)
        self._store = store
        self._writes = writes
        self.is_cut = False
        """Whether calls are not answered, as of a process that has died."""
        self.refused: set[tuple[str, str]] = set()
        """Verbs and names that are refused; the name of a count is empty."""

    async def __aenter__(self) -> Self:
        return self

    async def get(self, resource: Resource, name: str, subresource: str = "") -> Object:
        del subresource
        self._check("get", name)
        try:
            return self._store.get(self._kind(resource), (self.namespace, name)).body
        except Refused as refused:
            raise _error(refused) from refused

    async def list(
        self, resource: Resource, labels: str = "", *, limit: int | None = None, page_objects: int = 500
    ) -> Listing:
        del page_objects
        selector = Selector(labels)
        found = [
            each.body for each in self._store.all(self._kind(resource))[:limit] if selector.matches(each.body)
        ]
        return Listing(str(self._store.revision), found)

    async def count(self, resource: Resource) -> int:
        self._check("list", "")
        return len(self._store.all(self._kind(resource)))

    async def create(self, resource: Resource, body: Object) -> Object:
        kind = self._kind(resource)
        self._check("create", body["metadata"]["name"])
        self._writes["create"] += 1
        try:
            return self._store.create(kind, self.namespace, body, _MANAGER).body
        except Refused as refused:
            raise _error(refused) from refused

    async def patch(self, resource: Resource, name: str, body: Object, subresource: str = "") -> Object:
        kind = self._kind(resource)
        self._check("patch", name)
        self._writes["patch"] += 1
        try:
            changed = self._store.change(
                kind,
                (self.namespace, name),
                lambda live: merge(live, body),
                _MANAGER,
                subresource=subresource,
            )
        except Refused as refused:
            raise _error(refused) from refused
        return changed.body

    async def delete(
        self, resource: Resource, name: str, *, uid: str | None = None, revision: str | None = None
    ) -> bool:
        kind = self._kind(resource)
        self._writes["delete"] += 1
        wanted = {key: value for key, value in (("uid", uid), ("resourceVersion", revision)) if value}
        try:
            self._store.delete(kind, (self.namespace, name), {"preconditions": wanted})
        except Refused as refused:
            if refused.code == 404:
                return False
            raise _error(refused) from refused
        return True

    async def watch(
        self, resource: Resource, labels: str, revision: str, *, seconds: int
    ) -> AsyncGenerator[WatchEvent | None]:
        del seconds
        kind, selector, at = self._kind(resource), Selector(labels), int(revision)
        yield None
        while True:
            changed = self._store.changed
            try:
                events, at = self._store.since(at), self._store.revision
            except Refused as refused:
                raise _error(refused) from refused
            for event in events:
                told = selector.told(event) if event.kind == kind.key else None
                if told is not None:
                    yield WatchEvent(told, event.body)
            await changed.wait()

    def _check(self, verb: str, name: str) -> None:
        if (verb, name) in self.refused:
            raise KubernetesError(f"{verb} {name} is refused", status=403)

    def _kind(self, resource: Resource) -> Kind:
        if self.is_cut:
            raise Unavailable("no answer")
        kind = self._store.kinds.find(resource.group, resource.version, resource.plural)
        assert kind is not None
        return kind


def _error(refused: Refused) -> KubernetesError:
    return KubernetesError(refused.message, status=refused.code, reason=refused.reason)
