"""The figures of one simulated run."""

import numpy as np

from penstock.sim.report.report import latencies_s
from penstock.sim.simulate import Recording

WINDOW = (0.55, 0.95)
"""The part of the arrivals' time in which first tokens are compared with arrivals: the middle of the second half."""


def figures(recording: Recording, span_s: float) -> dict[str, float]:
    """Summarise a recording; requests of new sessions arrived for `span_s` seconds."""
    ttft_s, itl_s, e2e_s = latencies_s(recording)
    several = np.asarray(recording.output_tokens) > 1
    prompts = int(np.asarray(recording.prompt_tokens).sum())
    shares = _worker_shares(recording)
    return {
        "requests": recording.requests,
        "failed": recording.failed,
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "itl_mean_s": float(itl_s[several].mean()) if several.any() else 0.0,
        "e2e_mean_s": float(e2e_s.mean()),
        "e2e_p99_s": float(np.percentile(e2e_s, 99)),
        "hit_share": int(np.asarray(recording.cached_tokens).sum()) / prompts,
        "served_share": served_share(
            np.asarray(recording.sent_s), np.asarray(recording.first_token_s), span_s
        ),
        "worker_share_min": float(shares.min()),
        "worker_share_max": float(shares.max()),
    }


def served_share(sent_s: np.ndarray, first_token_s: np.ndarray, span_s: float) -> float:
    """Divide the first tokens within `WINDOW` by the requests sent within `WINDOW`.

    If requests arrive faster than they are served, this is the ratio of the two rates, however long the run. Batches fill
    during the first half. Finished requests would be a bad measure: while batches grow, fewer requests finish than
    arrive although no request waits.
    """
    low, high = (part * span_s for part in WINDOW)
    sent = np.count_nonzero((sent_s >= low) & (sent_s < high))
    served = np.count_nonzero((first_token_s >= low) & (first_token_s < high))
    return float(served / sent) if sent else 0.0


def _worker_shares(recording: Recording) -> np.ndarray:
    """Give each worker's generated tokens over the mean of all workers, as of the last sample."""
    if recording.samples is None or not recording.samples.at_s:
        return np.ones(1)
    tokens = recording.samples.of("generated_tokens")[-1]
    return tokens / tokens.mean() if tokens.sum() else np.ones(1)
