"""Notifies listeners of a change, once per turn of the event loop however many changes there were."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ChangeNotifier:
    """The listeners of one kind of change. One event loop owns it."""

    def __init__(self) -> None:
        """Begin without listeners."""
        self._listeners: dict[Callable[[], None], None] = {}
        self._is_due = False

    @contextmanager
    def telling(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` in the loop's turn after a change, while the context is open."""
        assert listener not in self._listeners, "each listens once"
        self._listeners[listener] = None
        try:
            yield
        finally:
            del self._listeners[listener]

    def tell_soon(self) -> None:
        """Call all listeners in the loop's next turn."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        for listener in tuple(self._listeners):
            listener()
