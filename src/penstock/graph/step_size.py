"""Default `max_batch_tokens` of prefill workers."""

from collections.abc import Callable

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Prices, Role
from penstock.graph.role import RoleSpec
from penstock.perf.step_size import saturating_tokens


def with_step_size(role: Role, spec: RoleSpec, prices: Callable[[], Prices]) -> RoleSpec:
    """Set the smallest step size at full utilization for prefill workers; other roles stay as they are.

    Args:
        role: the role of `spec`.
        spec: the graph's settings.
        prices: gives the workers' latency coefficients; on its ConfigError the engine's default stays.
    """
    if role is not Role.PREFILL or spec.max_batch_tokens is not None:
        return spec
    try:
        tokens = saturating_tokens(prices())
    except ConfigError:
        return spec
    return spec.model_copy(update={"max_batch_tokens": max(tokens, spec.max_running_requests or 0)})
