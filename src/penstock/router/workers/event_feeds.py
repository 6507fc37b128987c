"""The KV events of one connection: its worker's own, and those of what the worker shares with others."""

from penstock.core.types.events import EventMessage, Holder
from penstock.runtime.events.subscriber import EventSubscriber
from penstock.seams import Connection


class EventFeeds:
    """The subscribers of one connection, by holder; passes each message to the subscriber that asked for it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._subscribers: dict[Holder, EventSubscriber] = {}

    def add(self, subscriber: EventSubscriber) -> None:
        """Subscribe."""
        self._subscribers[subscriber.holder] = subscriber
        subscriber.start()

    def remove(self, holder: Holder) -> None:
        """Unsubscribe; what still arrives is ignored."""
        subscriber = self._subscribers.pop(holder, None)
        if subscriber is not None:
            subscriber.close()
            self.connection.unsubscribe(holder)

    def push(self, message: EventMessage) -> None:
        subscriber = self._subscribers.get(message.holder)
        if subscriber is not None:
            subscriber.push(message)

    def close(self) -> None:
        """End with the connection."""
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._subscribers.clear()
