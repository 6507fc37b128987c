"""The compared deployments: two workers of the same model, one thread each, on one machine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processes.served import Served, served

CHUNKS = (64, 128, 256, 512, 1024, 2048)
_SHORT_TOKENS = 64
"""Decode workers compute prompts up to this length."""
PROMPT_TOKENS_MIN = _SHORT_TOKENS + 1
"""Shorter prompts would not be disaggregated."""
PROMPT_TOKENS_MAX = 8000
"""Prompts and their answers fit the model's context."""
WHOLE = 8192
"""A step takes a whole prompt, so that streams wait for a prompt at most once."""


def aggregated_flags(chunk: int) -> list[str]:
    return ["--workers", "2", "--set", f"roles.aggregated.max_batch_tokens={chunk}"]


def disaggregated_flags() -> list[str]:
    """Give flags for one prefill and one decode worker; the prefill worker computes one whole prompt a step, first come first served.

    Two prompts in one step would delay the first. Prompts are about equally long, so shortest first would only delay others.
    """
    return [
        *("--prefill", "1", "--set", f"roles.prefill.max_batch_tokens={WHOLE}"),
        *("--set", "roles.prefill.max_running_requests=1"),
        *("--set", "roles.prefill.prompt_order=fcfs"),
        *("--decode", "1", "--set", f"roles.decode.max_batch_tokens={WHOLE}"),
        *("--set", f"router.disagg.local_tokens_max={_SHORT_TOKENS}"),
    ]


@contextmanager
def deployed(model_dir: Path, flags: Sequence[str], steps: Path) -> Iterator[Served]:
    """Serve the model with one core a worker. The workers' step logs in `steps` are complete once the context has ended."""
    both = ("--set", "worker.own_cores=true", "--set", f"worker.step_log={steps}")
    with served(str(model_dir), *flags, *both) as deployment:
        yield deployment
