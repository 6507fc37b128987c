"""A worker's window of steps and load."""

import asyncio

from penstock.core.types.instances import Role
from penstock.core.types.load import WorkerLoad
from penstock.runtime.observations.digest_recorder import DigestRecorder
from penstock.runtime.observations.windows import WorkerWindow


class WorkerRecorder:
    """Counts a worker's steps. One event loop owns it, and is its clock."""

    def __init__(self) -> None:
        """Make a recorder; `begin` starts it."""
        self._role = Role.AGGREGATED
        self._ready_s = self._since_s = 0.0
        self._step_s = DigestRecorder()
        self._last_step_s: float | None = None
        self._steps = 0
        """Steps of the engine so far."""
        self._before = WorkerLoad()

    def begin(self, role: Role) -> None:
        """Begin a window: the worker is ready in this role, its first one or another."""
        self._role = role
        self._ready_s = self._since_s = asyncio.get_running_loop().time()
        self._step_s.take()
        self._last_step_s = None

    def stepped(self, load: WorkerLoad) -> None:
        """Count what the engine has finished; `load` is its load after that.

        An engine may report several steps at once: `load.steps` tells how many, and each counts with their mean time.
        """
        now_s = asyncio.get_running_loop().time()
        before, self._steps = self._steps, max((rank.steps for rank in load.ranks), default=load.steps)
        if self._last_step_s is not None:
            steps = max(1, self._steps - before)
            self._step_s.add((now_s - self._last_step_s) / steps, steps)
        self._last_step_s = now_s if self._is_busy(load) else None

    def _is_busy(self, load: WorkerLoad) -> bool:
        """Tell whether the next step follows at once. Requests that wait at a decode worker wait for their KV, not for a step."""
        waiting = 0 if self._role is Role.DECODE else load.waiting_requests
        return load.running_requests + waiting > 0

    def take(self, load: WorkerLoad, *, oldest_wait_s: float = 0.0) -> WorkerWindow:
        """Return the window until now, and begin the next one.

        Args:
            load: the engine's load now.
            oldest_wait_s: longest time that a request has waited for its first token so far.
        """
        now_s = asyncio.get_running_loop().time()
        before, self._before = self._before, load
        window = WorkerWindow(
            seconds=now_s - self._since_s,
            role=self._role,
            ready_s=now_s - self._ready_s,
            step_s=self._step_s.take(),
            prefilled_tokens=max(0, load.prefilled_tokens - before.prefilled_tokens),
            generated_tokens=max(0, load.generated_tokens - before.generated_tokens),
            preemptions=max(0, load.preemptions - before.preemptions),
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            queued_prefill_tokens=load.queued_prefill_tokens,
            context_tokens=load.context_tokens,
            active_blocks=load.active_blocks,
            total_blocks=load.total_blocks,
            oldest_wait_s=oldest_wait_s,
        )
        self._since_s = now_s
        return window
