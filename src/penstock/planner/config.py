"""Settings of the planner: how many workers it may run, and how fast it reacts."""

from collections.abc import Set as AbstractSet
from typing import Literal, Self

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError
from penstock.core.listening import Address
from penstock.core.types.instances import Role

_WORKERS_MAX = 4096
_KINDS = (frozenset({Role.AGGREGATED}), frozenset({Role.PREFILL, Role.DECODE}))


def kinds_of(roles: AbstractSet[Role]) -> list[frozenset[Role]]:
    """List the kinds of deployment that these roles make: aggregated, disaggregated, or either."""
    return [kind for kind in _KINDS if kind <= roles]


class PlannerBudget(Config):
    """What all workers together may cost, in one unit."""

    gpus: int | None = pydantic.Field(default=None, ge=1)
    """GPUs, or CPU cores of workers that compute on cores."""
    usd_per_hour: float | None = pydantic.Field(default=None, gt=0)
    """US dollars per hour, by the price of each role's hardware."""

    @pydantic.model_validator(mode="after")
    def _check_unit(self) -> Self:
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise wrong(f"must be in one of gpus or usd_per_hour, got {named}")
        return self

    @property
    def amount(self) -> float:
        """The budget in its unit."""
        return next(value for value in (self.gpus, self.usd_per_hour) if value is not None)


class WorkerBounds(Config):
    """How many workers one role may have; None is the planner's bound for all roles."""

    min_workers: int | None = pydantic.Field(default=None, ge=1, le=_WORKERS_MAX)
    """Fewest workers."""
    max_workers: int | None = pydantic.Field(default=None, ge=1, le=_WORKERS_MAX)
    """Most workers."""


class ActSpec(Config):
    """How the planner carries out what it has decided."""

    hold_s: float = pydantic.Field(default=600.0, ge=0, le=86_400)
    """Seconds for which workers stay as somebody else has set them, such as by `penstock scale`."""
    start_deadline_s: float = pydantic.Field(default=120.0, gt=0, le=86_400)
    """A worker that is not ready so many seconds after its start, or silent for so long, is replaced; or after three times the last start if that is longer."""
    start_wait_s_max: float = pydantic.Field(default=1800.0, ge=0, le=86_400)
    """Longest wait in seconds before workers of a role are started again, where starts in a row were not done in time; the wait doubles with each."""
    hysteresis: float = pydantic.Field(default=0.05, ge=0, le=1)
    """Workers are taken away only if the rest holds the SLO at this share more load. Where requests are few it is larger, as their number wavers by chance."""
    dry_run: bool = False
    """Decide and record, but change nothing."""


class PlannerConfig(Config):
    """When the planner changes the number and roles of workers; the latency targets are the graph's `slo`."""

    min_workers: int = pydantic.Field(default=1, ge=1, le=_WORKERS_MAX)
    """Fewest workers of each role."""
    max_workers: int = pydantic.Field(default=8, ge=1, le=_WORKERS_MAX)
    """Most workers of each role."""
    roles: dict[Role, WorkerBounds] = pydantic.Field(default_factory=dict)
    """Bounds of single roles, as `{decode: {max_workers: 12}}`."""
    budget: PlannerBudget | None = None
    """What all workers together may cost, as `{gpus: 16}`; None is no limit beside `max_workers`."""
    react_period_s: float = pydantic.Field(default=5.0, ge=0.1, le=600)
    """Seconds between two looks at queued requests and latencies, which add workers at once. Demand is forecast in intervals of two of them, of 1 to 10 s: shorter ones follow faster, and have more noise."""
    floor_period_s: float = pydantic.Field(default=10.0, ge=1, le=3600)
    """Seconds between two forecasts of demand, by which workers are also taken away."""
    season_s: float | None = pydantic.Field(default=None, ge=60, le=604_800)
    """Seconds after which demand repeats itself, such as 86400; None is no season."""
    cool_down_s: float = pydantic.Field(default=100.0, ge=0, le=86_400)
    """Workers of a role are taken away down to the most that was wanted in the last so many seconds, or in the time of a start if that is longer, and not before the planner ran so long."""
    cold_s: float = pydantic.Field(default=30.0, ge=0, le=3600)
    """Seconds after a worker became ready in which its step times do not count, and latencies are not taken for its own."""
    act: ActSpec = ActSpec()
    """How what was decided is carried out."""
    address: str | None = None
    """`tcp://HOST:PORT` where the planner of a deployment of several hosts listens; their supervisors connect to it. The same on all hosts; null where all is on one host."""

    scales: Literal["hosts", "pods"] = "hosts"
    """`hosts` starts workers on the hosts that are connected, `pods` sets the numbers of the operator's PenstockRoles, as the operator has it."""

    @pydantic.field_validator("address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is None:
            return None
        try:
            parsed = Address.parse(address)
        except ConfigError as error:
            raise wrong(error.message.removeprefix("address: ")) from error
        if parsed.path or not parsed.port:
            raise wrong(f"must be tcp://HOST:PORT with a port, so that hosts find it, got {address!r}")
        return address

    @pydantic.model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for role in (None, *self.roles):
            least, most = self.bounds(role)
            if least > most:
                place = f" of {role}" if role else ""
                raise wrong(
                    f"min_workers{place} is {least} and max_workers {most}; lower one or raise the other"
                )
        return self

    def check_roles(self, roles: AbstractSet[Role]) -> None:
        """Check that a deployment of these roles can be planned, and that bounds are of them.

        Raises:
            ConfigError: they cannot, or are not.
        """
        have = ", ".join(sorted(roles))
        if not kinds_of(roles) or roles != set().union(*kinds_of(roles)):
            raise ConfigError(
                f"planner: the roles are {have}: it scales aggregated workers, prefill with decode workers, or all three;"
                " describe the role that is missing, with replicas 0 for none at the start"
            )
        for role in self.roles:
            if role not in roles:
                raise ConfigError(f"planner.roles.{role}: there is no such role here; the roles are {have}")

    def bounds(self, role: Role | None) -> tuple[int, int]:
        """Give the fewest and most workers of a role."""
        own = self.roles.get(role, WorkerBounds()) if role else WorkerBounds()
        return own.min_workers or self.min_workers, own.max_workers or self.max_workers
