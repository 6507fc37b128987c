"""The largest rate that is sustained, by bracketing and halving."""

from collections.abc import Awaitable, Callable

from penstock.core.errors import ConfigError

SUSTAINED = 0.98
"""A rate is sustained by a policy that serves so large a part of what is sent, `game.served_share`."""
_STEP = 1.3
_STEPS_MAX = 40


async def find_saturation(
    is_sustained: Callable[[float], Awaitable[bool]], guess_per_s: float, *, tolerance: float
) -> float:
    """Search the largest rate that is sustained, where all lower ones are.

    Args:
        is_sustained: tries a rate.
        guess_per_s: where to begin.
        tolerance: how far below the next rate that is not sustained the result may lie, relative to it.

    Raises:
        ConfigError: no rate near the guess is sustained.
    """
    low = high = guess_per_s
    tried = 0
    if await is_sustained(guess_per_s):
        while await is_sustained(high := low * _STEP):
            low, tried = high, tried + 1
            if tried > _STEPS_MAX:
                raise ConfigError(
                    f"every rate up to {high:g} requests/s is sustained; the workload is too short"
                )
    else:
        while not await is_sustained(low := high / _STEP):
            high, tried = low, tried + 1
            if tried > _STEPS_MAX:
                raise ConfigError(
                    f"no rate down to {low:g} requests/s is sustained; the workload is too short"
                )
    while high > low * (1 + tolerance):
        middle = (low * high) ** 0.5
        if await is_sustained(middle):
            low = middle
        else:
            high = middle
    return low
