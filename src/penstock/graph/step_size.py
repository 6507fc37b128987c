"""How many tokens a step of a prefill worker computes, where its graph does not say."""

from collections.abc import Callable

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Prices, Role
from penstock.graph.role import RoleSpec
from penstock.perf.step_size import saturating_tokens


def with_step_size(role: Role, spec: RoleSpec, prices: Callable[[], Prices]) -> RoleSpec:
    """Give prefill workers the smallest steps that keep their engine busy; other roles as they are.

    Args:
        role: whose.
        spec: what the graph says of it.
        prices: what such workers take for their work; a ConfigError where nobody can tell leaves the engine's own choice.
    """
    if role is not Role.PREFILL or spec.max_batch_tokens is not None:
        return spec
    try:
        tokens = saturating_tokens(prices())
    except ConfigError:
        return spec
    return spec.model_copy(update={"max_batch_tokens": max(tokens, spec.max_running_requests or 0)})
