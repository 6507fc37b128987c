"""The JSON report of a simulation, with stable keys."""

import resource
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import Tier
from penstock.graph import Slo
from penstock.sim.deployment import Deployment
from penstock.sim.report.percentiles import percentiles, ratio
from penstock.sim.report.role_report import report_kv_transfer, report_roles
from penstock.sim.report.scaling_report import report_scaling
from penstock.sim.simulate import Recording

_HOUR_S = 3600.0


def make_report(
    recording: Recording, deployment: Deployment, slo: Slo | None, *, wall_s: float
) -> dict[str, Any]:
    """Make the report of a recording.

    Keys have their unit in the name; a value without data is None:
    `requests`, `completed`, `failed`; `duration_s` from the first request to the last one's end;
    `ttft_s`, `itl_s` (mean time between a request's tokens) and `e2e_s`, each with `mean`, `p50`, `p90`, `p99`;
    `output_tokens_per_s`; `goodput_rps`, requests per second that meet both targets, and `slo_attainment`, their share of all
    requests, failed ones included;
    `kv_hit_ratio`, cached prompt tokens / prompt tokens; `kv_hit_ratio_by_tier`, the same by tier of the hit;
    `tenants`, by name if requests have one, each with `requests`, `failed`, `ttft_s`, `prompt_token_share` and
    `output_token_share` (fractions of the completed tokens);
    `roles`, by name: counters of its workers, and queue and KV use over time if sampled;
    `kv_transfer`: requests with remote (`remote`) and local (`local`) prefill, bytes moved, time from first to second token
    of remote ones, and failures; None without prefill workers;
    `scaling`: workers over time, changes and decisions; None where nothing scaled them;
    `gpu_hours`; `tokens_per_joule` and `usd_per_million_tokens`, per output token at the hardware's power and price;
    `wall`, real time of this run, not reproducible.

    Args:
        recording: recording of one run.
        deployment: the simulated deployment.
        slo: targets of goodput; None for no goodput.
        wall_s: real seconds of the run.
    """
    tokens = np.asarray(recording.output_tokens)
    ttft_s, itl_s, e2e_s = latencies_s(recording)
    duration_s = recording.end_s
    prompt_tokens = int(np.asarray(recording.prompt_tokens).sum())
    output_tokens = int(tokens.sum())
    worker_s = {group.role: group.spec.replicas * duration_s for group in deployment.role_groups}
    if recording.scaling is not None:
        worker_s = {role: recording.scaling.worker_s.get(role, 0.0) for role in worker_s}
    device_s = [
        (group.spec.devices * worker_s[group.role], group.hardware) for group in deployment.role_groups
    ]
    joules = sum(seconds * hardware.watts for seconds, hardware in device_s)
    usd = sum(seconds * hardware.usd_per_hour for seconds, hardware in device_s) / _HOUR_S
    good = None if slo is None else int(is_good(recording, slo).sum())
    return {
        "requests": recording.requests,
        "completed": len(tokens),
        "failed": recording.failed,
        "duration_s": duration_s,
        "ttft_s": percentiles(ttft_s),
        "itl_s": percentiles(itl_s[tokens > 1]),
        "e2e_s": percentiles(e2e_s),
        "output_tokens_per_s": ratio(output_tokens, duration_s),
        "goodput_rps": None if good is None else ratio(good, duration_s),
        "slo_attainment": None if good is None else ratio(good, recording.requests),
        "kv_hit_ratio": ratio(int(np.asarray(recording.cached_tokens).sum()), prompt_tokens),
        "kv_hit_ratio_by_tier": _hit_ratios(recording, deployment, prompt_tokens),
        "tenants": _by_tenant(recording, ttft_s),
        "roles": report_roles(recording, deployment),
        "kv_transfer": report_kv_transfer(recording, deployment),
        "scaling": report_scaling(recording, deployment),
        "gpu_hours": sum(seconds for seconds, _ in device_s) / _HOUR_S,
        "tokens_per_joule": ratio(output_tokens, joules),
        "usd_per_million_tokens": ratio(1e6 * usd, output_tokens),
        "wall": {
            "seconds": wall_s,
            "requests_per_s": ratio(recording.requests, wall_s),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    }


def _hit_ratios(recording: Recording, deployment: Deployment, prompt_tokens: int) -> dict[str, float | None]:
    """Split the hit ratio by tier; None for tiers that no worker has."""
    device, *lower = Tier
    there = {device, *(kind.tier for role_group in deployment.role_groups for kind in role_group.lower_tiers)}
    found = dict(zip(lower, recording.onboarded_tokens, strict=False))
    found[device] = int(np.asarray(recording.cached_tokens).sum()) - sum(found.values())
    return {tier: ratio(found[tier], prompt_tokens) if tier in there else None for tier in Tier}


def _by_tenant(recording: Recording, ttft_s: NDArray[np.float64]) -> dict[str, Any]:
    asked = np.asarray(recording.tenants, dtype=np.str_)
    prompt_tokens, output_tokens = np.asarray(recording.prompt_tokens), np.asarray(recording.output_tokens)
    tenants = {}
    for name in sorted({*recording.tenants, *recording.failed_of} - {""}):
        mine, failed = asked == name, recording.failed_of.get(name, 0)
        tenants[name] = {
            "requests": int(mine.sum()) + failed,
            "failed": failed,
            "ttft_s": percentiles(ttft_s[mine]),
            "prompt_token_share": ratio(int(prompt_tokens[mine].sum()), int(prompt_tokens.sum())),
            "output_token_share": ratio(int(output_tokens[mine].sum()), int(output_tokens.sum())),
        }
    return tenants


def latencies_s(
    recording: Recording,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Give (TTFT, mean ITL, end-to-end time) of every completed request; ITL is 0 for one token."""
    times = (recording.sent_s, recording.first_token_s, recording.last_token_s)
    sent, first, last = (np.asarray(a) for a in times)
    gaps = np.asarray(recording.output_tokens) - 1
    return first - sent, np.where(gaps > 0, (last - first) / np.maximum(gaps, 1), 0.0), last - sent


def is_good(recording: Recording, slo: Slo) -> NDArray[np.bool_]:
    """Give (completed,) bool: whether each request met both targets."""
    ttft_s, itl_s, _ = latencies_s(recording)
    met: NDArray[np.bool_] = (ttft_s <= slo.ttft_s) & (itl_s <= slo.itl_s)
    return met
