"""The deployments that are compared: two workers of the same model, one thread each, on one machine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processes.served import Served, served

CHUNKS = (64, 128, 256, 512, 1024, 2048)
_SHORT_TOKENS = 64
"""Decode workers compute such prompts themselves."""
PROMPT_TOKENS_MIN = _SHORT_TOKENS + 1
"""Shorter prompts would not be disaggregated."""
PROMPT_TOKENS_MAX = 8000
"""With what is generated after them they fit the model."""
WHOLE = 8192
"""A whole prompt, of either worker: where streams have to wait, they wait once."""
LATE_TOKEN_SHARE = 0.005
"""Half of what a 99th percentile does not show."""


def aggregated_flags(chunk: int) -> list[str]:
    return ["--workers", "2", "--set", f"roles.aggregated.max_batch_tokens={chunk}"]


def disaggregated_flags(late_token_share: float = LATE_TOKEN_SHARE) -> list[str]:
    """Prompts are computed whole, one after the other, in the order in which they came.

    A step that ends one and begins the next makes the first wait for both. They are about equally long, so that taking the
    shortest first would only make the others late. One whose first token would take twice as long there is computed by the
    decode worker, as long as no larger part of the streams' tokens is late by it.
    """
    return [
        *("--prefill", "1", "--set", f"roles.prefill.max_batch_tokens={WHOLE}"),
        *("--set", "roles.prefill.max_running_requests=1"),
        *("--set", "roles.prefill.prompt_order=fcfs"),
        *("--decode", "1", "--set", f"roles.decode.max_batch_tokens={WHOLE}"),
        *("--set", f"router.disagg.local_tokens_max={_SHORT_TOKENS}"),
        *("--set", f"router.disagg.late_token_share={late_token_share:g}"),
    ]


@contextmanager
def deployed(model_dir: Path, flags: Sequence[str], steps: Path) -> Iterator[Served]:
    """Serve the model; workers have a core each and write their steps into a directory, complete once the context has ended."""
    both = ("--set", "worker.own_cores=true", "--set", f"worker.step_log={steps}")
    with served(str(model_dir), *flags, *both) as deployment:
        yield deployment
