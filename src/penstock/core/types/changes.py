"""What an operator asks of a running worker."""

from penstock.core.types.instances import Role
from penstock.core.wire import Wire


class BecomeRole(Wire, frozen=True, tag="role"):
    """Finish current requests, then register with another role."""

    role: Role


class Sleep(Wire, frozen=True, tag="sleep"):
    """Finish current requests, then give up the engine's memory. `level` is vLLM's: 1 keeps the weights in host memory, 2 drops them."""

    level: int


class WakeUp(Wire, frozen=True, tag="wake_up"):
    """Take the memory again, and requests."""


WorkerChange = BecomeRole | Sleep | WakeUp
