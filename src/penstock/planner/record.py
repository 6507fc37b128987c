"""One round of the planner: what it saw, expected, decided and did."""

import msgspec

from penstock.core.types.instances import Role
from penstock.core.wire import Wire
from penstock.planner.decider import ScalingDecision


class SeenRole(Wire, frozen=True):
    """The workers of one role that sent a window lately.

    Attributes:
        workers: how many; `cold` of them are ready for too short a time to judge by.
        running: requests in their batches, `waiting` for a batch.
        queued_prefill_tokens: prompt tokens not computed yet.
        kv_usage: mean share of KV blocks that requests hold, 0 to 1.
        step_s: mean time of a step; None without steps.
        factor: measured step time over the latency model's; the decision takes it into account.
        gpu_watts: what the GPUs of all of them draw; None where NVML tells of none, as for `gpu_utilization`.
        gpu_utilization: mean share of the time in which their GPUs computed, 0 to 1.
    """

    role: Role
    workers: int
    cold: int = 0
    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    kv_usage: float = 0.0
    step_s: float | None = None
    factor: float = 1.0
    gpu_watts: float | None = None
    gpu_utilization: float | None = None


class SeenDeployment(Wire, frozen=True):
    """The observation of the last `seconds`.

    Attributes:
        ttft_s: TTFT at the SLO's percentile; None without a first token.
        itl_s: ITL likewise.
        queued: requests that wait in routers; the oldest since `oldest_queued_s`.
        frontends: how many sent a window lately.
        silent: names of processes that sent none for some seconds, though they did before.
        decode_ttft_s: TTFT likewise of requests that waited for decode workers; None without one.
    """

    seconds: float
    arrivals_per_s: float = 0.0
    finished_per_s: float = 0.0
    failed_per_s: float = 0.0
    ttft_s: float | None = None
    itl_s: float | None = None
    queued: int = 0
    oldest_queued_s: float = 0.0
    frontends: int = 0
    silent: tuple[str, ...] = ()
    roles: tuple[SeenRole, ...] = ()
    decode_ttft_s: float | None = None


class Expected(Wire, frozen=True):
    """The forecast of one series, such as `requests_per_s`.

    Attributes:
        mean: the largest value up to the horizon; between `low` and `high` in most cases.
        method: the method that predicted best so far.
        is_cold: too few values to judge methods; the band is a guess, on the safe side.
        mean_error: the method's mean absolute error of late; None before the first comparison.
    """

    series: str
    mean: float
    low: float
    high: float
    method: str = ""
    is_cold: bool = False
    mean_error: float | None = None


class DecisionRecord(Wire, frozen=True):
    """One round of the planner.

    Attributes:
        number: counts the rounds from 1.
        at_s: seconds on the event loop's clock.
        seen: what was observed.
        expected: forecasts of the demand's series.
        horizon_s: how far ahead they look.
        is_floor: whether this round forecast demand anew; others provide for the last forecast, the queue and the SLO error.
        now: workers of each role that serve or start in time.
        decision: what demand and SLO ask for; None if nothing was observed.
        target: workers of each role that the planner aims at, after damping and bounds.
        damped: why `target` is not what was decided.
        flips: (worker, role) of the workers that change roles.
        adds: workers to start by role.
        retires: workers that end; `late` ones end, or change roles, once others are ready.
        overdue: workers that did not become ready in time, or sent nothing for as long.
        refused: the deployment's reasons against single changes.
        held: why nothing was changed; empty if changes were free.
        is_dry: the changes were planned and not made.
        room: workers of each role that could be added; None is no known limit.
        rigid: (from, to) roles that workers failed to change between lately.
        waits: roles whose starts failed in a row, and when workers of them are started again.
    """

    number: int
    at_s: float
    seen: SeenDeployment
    expected: tuple[Expected, ...] = ()
    horizon_s: float = 0.0
    is_floor: bool = False
    now: dict[Role, int] = msgspec.field(default_factory=dict)
    decision: ScalingDecision | None = None
    target: dict[Role, int] = msgspec.field(default_factory=dict)
    damped: tuple[str, ...] = ()
    flips: tuple[tuple[str, Role], ...] = ()
    adds: dict[Role, int] = msgspec.field(default_factory=dict)
    retires: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    overdue: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    held: str = ""
    is_dry: bool = False
    room: dict[Role, int | None] = msgspec.field(default_factory=dict)
    rigid: tuple[tuple[Role, Role], ...] = ()
    waits: tuple[str, ...] = ()

    @property
    def late_starts(self) -> list[str]:
        """Say of each overdue worker what it lacks."""
        silent = set(self.seen.silent)
        return [
            f"{name} {'has been silent for too long' if name in silent else 'was not ready in time'}"
            for name in self.overdue
        ]

    @property
    def is_change(self) -> bool:
        """Whether workers were started, ended or flipped, or would have been."""
        return bool(self.flips or self.adds or self.retires)

    @property
    def outcome(self) -> str:
        """What came of it: blind, held, refused, dry_run, changed or kept."""
        if self.decision is None:
            return "blind"
        if self.held:
            return "held"
        if self.refused:
            return "refused"
        if self.is_change:
            return "dry_run" if self.is_dry else "changed"
        return "kept"

    def explain(self) -> str:
        """Say the round in one line: the change, then the reason."""
        changes = [f"{name} becomes {role}" for name, role in self.flips]
        changes += [f"{count} {role} more" for role, count in self.adds.items()]
        changes += [f"{name} retires" for name in self.retires]
        done = ", ".join(changes) or "no change"
        why = "; ".join(
            filter(None, (self.held, *self.late_starts, *self.waits, *self.damped, *self.refused))
        )
        decided = self.decision.explain() if self.decision else ""
        return ": ".join(filter(None, (f"{'would: ' if self.is_dry else ''}{done}", why, decided)))
