"""Settings of the router and the dispatcher: how a worker is chosen, and the bounds of everything kept."""

from typing import Self

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError
from penstock.router.policies import DEFAULT_LOAD_WEIGHT, make_policy


class RetryConfig(Config):
    """What happens to a request whose worker is lost or refuses it."""

    migrations_max: int = pydantic.Field(default=2, ge=0)
    """Times one request may go on elsewhere because its worker was lost."""
    refusals_max: int = pydantic.Field(default=3, ge=0)
    """Times one request may be tried elsewhere because a worker refused it."""
    burst: int = pydantic.Field(default=1024, ge=1)
    """Retries of all requests together that may happen at once: what one worker's loss may cost."""
    per_s: float = pydantic.Field(default=10.0, ge=0)
    """Retries earned back each second."""
    per_request: float = pydantic.Field(default=0.2, ge=0)
    """Retries earned back with each request opened."""
    wait_s_max: float = pydantic.Field(default=5.0, ge=0)
    """The longest a retry is put off until it is earned; beyond that the request fails."""
    jitter_s: float = pydantic.Field(default=0.02, ge=0)
    """A request whose worker is lost goes on after a random part of this."""
    deaths_max: int = pydantic.Field(default=3, ge=1)
    """Losses of workers that one request may have caused until its content is quarantined; at most `migrations_max` + 1."""
    quarantine_s: float = pydantic.Field(default=60.0, gt=0)
    """How long a content suspected of so many losses is refused."""
    quarantined_max: int = pydantic.Field(default=4096, ge=1)
    """Contents in quarantine at once; the oldest is let out first."""

    @pydantic.model_validator(mode="after")
    def _check_deaths(self) -> Self:
        if self.deaths_max > self.migrations_max + 1:
            raise wrong(
                f"deaths_max is {self.deaths_max}, but a request loses at most migrations_max + 1 ="
                f" {self.migrations_max + 1} workers; lower deaths_max or raise migrations_max"
            )
        return self


class RouterConfig(Config):
    """One frontend process's view of the workers, and its requests."""

    policy: str = "kv"
    """`kv` (longest prefix, then load), `least-loaded`, `power-of-two`, `round-robin` or `random`; or your own: an
    entry point's name of the group `penstock.policies`, or `package.module:Class`."""
    load_weight: float = pydantic.Field(default=DEFAULT_LOAD_WEIGHT, ge=0)
    """For `kv`: what a block that a worker's running requests hold costs, in blocks of prefill."""
    workers_max: int = pydantic.Field(default=1024, ge=1)
    """Workers known at once; further ones are left out."""
    indexed_blocks_max: int = pydantic.Field(default=1_000_000, ge=1)
    """(worker, block) pairs in the prefix index; then the leaf unused for longest is forgotten."""
    predicted_s: float = pydantic.Field(default=120.0, gt=0)
    """How long a worker that sends no KV events is taken to hold what was sent to it last."""
    open_requests_max: int = pydantic.Field(default=16_384, ge=1)
    """Requests (choices) under way at once; the next one is refused with 503."""
    no_worker_wait_s: float = pydantic.Field(default=60.0, ge=0)
    """How long a request waits for a worker where its model has none."""
    connect_timeout_s: float = pydantic.Field(default=5.0, gt=0)
    """How long a worker may take to answer a new connection."""
    reconnect_s_max: float = pydantic.Field(default=5.0, gt=0)
    """The longest pause between two tries to reach a worker; it begins at a hundredth of this and doubles."""
    retries: RetryConfig = RetryConfig()
    """What happens to a request whose worker is lost or refuses it."""

    @pydantic.field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        try:
            make_policy(policy)
        except ConfigError as error:
            raise wrong(error.message.removeprefix("policy ")) from error
        return policy
