"""The changes of a `MemoryConnector`'s workers: what makes them, and how long each takes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import PenstockError
from penstock.core.types.instances import Role

Done = Callable[[PenstockError | None], None]
"""Called once a change has ended, with why it was not made; None if it was."""


class WorkerChanges(Protocol):
    """Makes the changes of workers. Every method begins a change and returns at once."""

    def start_s(self, role: Role) -> float | None:
        """Give the seconds that a start takes; None if none is known yet."""
        ...

    def start(self, name: str, role: Role, done: Done) -> None:
        """Start a worker, or one that has failed again. `done` is never called for one that does not become ready."""
        ...

    def stop(self, name: str, done: Done) -> None:
        """End a worker that is not ready."""
        ...

    def drain(self, name: str, done: Done) -> None:
        """End a worker that serves, once its requests have finished or moved."""
        ...

    def flip(self, name: str, role: Role, done: Done) -> None:
        """Change a worker's role."""
        ...


@dataclass(slots=True, frozen=True)
class TimedChanges:
    """Changes of workers that serve nothing: each takes so many seconds."""

    starts_s: float = 20.0
    drains_s: float | None = 1.0
    """None: a worker drains until `MemoryConnector.end`."""
    flips_s: float = 0.1

    def start_s(self, role: Role) -> float:
        del role
        return self.starts_s

    def start(self, name: str, role: Role, done: Done) -> None:
        del name, role
        _later(self.starts_s, done)

    def stop(self, name: str, done: Done) -> None:
        del name
        _later(0.0, done)

    def drain(self, name: str, done: Done) -> None:
        del name
        if self.drains_s is not None:
            _later(self.drains_s, done)

    def flip(self, name: str, role: Role, done: Done) -> None:
        del name, role
        _later(self.flips_s, done)


def _later(seconds: float, done: Done) -> None:
    asyncio.get_running_loop().call_later(seconds, done, None)
