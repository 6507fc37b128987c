"""Limits of the jump engine: batch configurations it cannot step, and requests that can never run."""

from penstock.core.errors import Overloaded, RequestError
from penstock.engine.scheduling.config import SchedulerConfig


def check_bounds(config: SchedulerConfig) -> None:
    """Check that a step can hold one token of every running request.

    Raises:
        ValueError: max_running_requests > max_batch_tokens.
    """
    if config.max_running_requests > config.max_batch_tokens:
        raise ValueError(
            f"max_running_requests: must be <= max_batch_tokens, got {config.max_running_requests} and {config.max_batch_tokens}"
        )


def check_fits(known: int, num_waiting: int, context_length: int, config: SchedulerConfig) -> None:
    """Check that a request of `known` tokens can run, and that the queue has room.

    Raises:
        RequestError: the request can never run.
        Overloaded: the queue is full.
    """
    if known >= context_length:
        raise RequestError(
            f"prompt of {known} tokens: must be < {context_length}, the context and all KV blocks",
            param="prompt",
        )
    if num_waiting >= config.max_waiting_requests:
        raise Overloaded(
            f"{num_waiting} requests wait already, max_waiting_requests; try again later", retry_after_s=1.0
        )
