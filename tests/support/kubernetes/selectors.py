"""Label selectors: those that clients use, by equality and by existence."""

from tests.support.kubernetes.resources import Object
from tests.support.kubernetes.store import Event


class Selector:
    """Which objects a list or watch is about."""

    def __init__(self, labels: str) -> None:
        """Read `a=b,c=d,e`."""
        self._parts = [part.partition("=") for part in labels.split(",") if part]

    def matches(self, body: Object) -> bool:
        labels = body["metadata"].get("labels") or {}
        return all(
            labels.get(key) == value if equals else key in labels for key, equals, value in self._parts
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
