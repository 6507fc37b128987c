"""What a simulated engine that jumps refuses: batches that it could not step through, and requests that can never run."""

from penstock.core.errors import Overloaded, RequestError
from penstock.engine.scheduling.config import SchedulerConfig


def check_bounds(config: SchedulerConfig) -> None:
    """Refuse a batch whose requests could not all have a token in each step.

    Raises:
        ValueError: with both numbers.
    """
    if config.max_running_requests > config.max_batch_tokens:
        raise ValueError(
            f"max_running_requests: must be <= max_batch_tokens, got {config.max_running_requests} and {config.max_batch_tokens}"
        )


def check_fits(known: int, num_waiting: int, context_length: int, config: SchedulerConfig) -> None:
    """Refuse a request of `known` tokens that can never run, or that would have to wait behind too many.

    Raises:
        RequestError: it can never run.
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
