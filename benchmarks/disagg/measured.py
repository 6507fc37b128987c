"""One side's latencies and throughput, from the times of its workers' engine steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.disagg.traffic import Asked, Traffic
from penstock.worker.step_log import LoggedStep

Times = NDArray[np.float64]
"""Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`itl_s` is of the streams, `ttft_s` of the long prompts from their due time, `prompt_itl_s` of the prompts' answers.

    `waiting`: prompts without a token at the end of the measured time; more than a few mean that the load was too high.
    """

    itl_s: Times
    ttft_s: Times
    prompt_itl_s: Times
    kv_transfer_s: Times
    output_tokens_per_s: float
    waiting: int


def measure(traffic: Traffic, logs: Mapping[str, Sequence[LoggedStep]]) -> Measured:
    """Join the step logs of one deployment's workers with its traffic."""
    times = token_times(step for log in logs.values() for step in log)
    begin_s, end_s = traffic.begin_s, traffic.end_s
    prompts = _present(traffic.prompts, times)
    long_ids = {asked.request_id for asked in prompts}
    streams = [of_stream for request_id, of_stream in times.items() if request_id not in long_ids]
    within = sum(int(((at_s >= begin_s) & (at_s < end_s)).sum()) for at_s in times.values())
    firsts = np.array([times[asked.request_id][0] for asked in prompts])
    return Measured(
        itl_s=_gaps(streams, begin_s, end_s),
        ttft_s=firsts - np.array([asked.due_s for asked in prompts]),
        prompt_itl_s=_gaps((times[asked.request_id] for asked in prompts), begin_s, end_s),
        kv_transfer_s=_second_token_s(prompts, times),
        output_tokens_per_s=within / (end_s - begin_s),
        waiting=int((firsts >= end_s).sum()),
    )


def measure_quiet(
    traffic: Traffic, logs: Mapping[str, Sequence[LoggedStep]]
) -> tuple[list[float], list[float]]:
    """Give the TTFT of prompts that came one after the other, and how much later their second tokens came than further tokens."""
    times = token_times(step for log in logs.values() for step in log)
    quiet = _present(traffic.quiet, times)
    ttft_s = [float(times[asked.request_id][0]) - asked.due_s for asked in quiet]
    return ttft_s, _second_token_s(quiet, times).tolist()


def token_times(steps: Iterable[LoggedStep]) -> dict[str, Times]:
    """Give when each request's tokens came, in order: those of the prefill worker, then those of the decode worker."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for request_id, count in step.tokens:
            found.setdefault(request_id, []).extend([step.at_s] * count)
    return {request_id: np.sort(np.array(at_s)) for request_id, at_s in found.items() if at_s}


def _present(asked: Iterable[Asked], times: Mapping[str, Times]) -> list[Asked]:
    return [one for one in asked if one.request_id in times]


def _gaps(streams: Iterable[Times], begin_s: float, end_s: float) -> Times:
    """Give the times between tokens of each stream, for tokens that came between two moments."""
    gaps = [np.diff(at_s)[(at_s[1:] >= begin_s) & (at_s[1:] < end_s)] for at_s in streams]
    return np.concatenate(gaps) if gaps else np.array([])


def _second_token_s(prompts: Iterable[Asked], times: Mapping[str, Times]) -> Times:
    """Give the gap before each prompt's second token less its median later gap."""
    found = [np.diff(times[asked.request_id]) for asked in prompts]
    return np.array([gaps[0] - np.median(gaps[1:]) for gaps in found if len(gaps) > 1])
