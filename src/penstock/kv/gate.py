"""A gate in front of a caller's memory: once closed, no thread copies into or out of that memory."""

import threading
from dataclasses import dataclass, field

from penstock.kv.buffers import Bytes


@dataclass(slots=True, eq=False)
class Gate:
    """Open until the caller, who owns the memory, closes it. Thread-safe."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _inside: int = 0
    _is_closed: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether threads may no longer use the memory."""
        return self._is_closed

    def copy(self, target: Bytes, source: Bytes) -> bool:
        """Copy unless the gate is closed; returns whether it was open."""
        with self._changed:
            if self._is_closed:
                return False
            self._inside += 1
        target[:] = source
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
        return True

    def close(self) -> None:
        """Refuse further copies, and wait for those under way, which takes microseconds."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._inside)
