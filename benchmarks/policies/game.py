"""One run: a policy plays a workload on a simulated deployment, in a process of its own."""

import os
import sys
import threading
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import parent_process
from pathlib import Path
from time import process_time

import numpy as np

from benchmarks.policies.cells import Trouble
from benchmarks.policies.workload import Workload, mean_tokens, reusable_share
from penstock.core import log
from penstock.core.errors import ConfigError
from penstock.graph import Overrides, load
from penstock.sim.deployment import Deployment, plan_deployment
from penstock.sim.report.report import latencies_s
from penstock.sim.simulate import Recording, simulate
from penstock.sim.world.network import NetworkConfig

WINDOW = (0.55, 0.95)
"""The part of the arrivals' time over which first tokens are held against arrivals: the middle of its second half."""
_UNBOUNDED = 1 << 24
_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Place:
    """A deployment as files: its graph, some of it set anew, and the profile that its engines run on."""

    graph: Path
    profile: Path
    settings: tuple[str, ...] = ()

    def deployment(self, policy: str = "kv", trouble: Trouble | None = None) -> Deployment:
        """Plan it; nothing of the router is bounded below what an overload needs.

        Raises:
            ConfigError: a file cannot be read, or describes what cannot be.
        """
        trouble = trouble or Trouble()
        settings = [
            *self.settings,
            f"router.policy={policy}",
            f"router.open_requests_max={_UNBOUNDED}",
            f"router.queue.requests_max={_UNBOUNDED}",
        ]
        graph = load(str(self.graph), Overrides(settings))
        planned = plan_deployment(graph, beside=self.graph.parent, engine_profile=self.profile)
        return replace(
            planned,
            network=NetworkConfig(load_delay_s=trouble.load_delay_s),
            slowness=(trouble.slowness,),
        )


@dataclass(frozen=True, slots=True)
class Game:
    """All that one run depends on. `policy` is what `router.policy` takes."""

    place: Place
    workload: Workload
    rate_per_s: float
    policy: str
    trouble: Trouble


def play(game: Game) -> dict[str, float]:
    """Run it, and say what came of it.

    Raises:
        ConfigError: a file cannot be read, or the workload does not fit.
    """
    began_s = process_time()
    deployment = game.place.deployment(game.policy, game.trouble)
    sessions = game.workload.sessions(game.rate_per_s)
    deployment.check(sessions)
    span_s = sessions[-1].at_s
    recording = simulate(
        deployment, sessions, seed=game.workload.seed, sample_interval_s=max(span_s / _SAMPLES, 0.1)
    )
    return figures(recording, span_s) | {"cpu_s": process_time() - began_s}


def figures(recording: Recording, span_s: float) -> dict[str, float]:
    """Sum a recording up; `span_s` is how long requests (of new sessions) came."""
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
    """Count the requests that get their first token in the middle of the second half, over those sent in it.

    Where requests come faster than they are served it is the ratio of the two rates, however long the run. The first
    half is for the batches to fill. Ends are no measure: while batches grow, fewer requests end than come though
    nobody waits; and to ask of each request whether it ends before the run does would let a queue grow by a tenth.
    """
    low, high = (part * span_s for part in WINDOW)
    sent = np.count_nonzero((sent_s >= low) & (sent_s < high))
    served = np.count_nonzero((first_token_s >= low) & (first_token_s < high))
    return float(served / sent) if sent else 0.0


def _worker_shares(recording: Recording) -> np.ndarray:
    """Give what each worker generated over the mean of all, as of the last sample."""
    if recording.samples is None or not recording.samples.at_s:
        return np.ones(1)
    tokens = recording.samples.of("generated_tokens")[-1]
    return tokens / tokens.mean() if tokens.sum() else np.ones(1)


def describe(place: Place, workload: Workload) -> dict[str, float]:
    """Say what a workload is like, and guess how many requests a second a deployment could serve.

    Raises:
        ConfigError: a file cannot be read.
    """
    deployment = place.deployment()
    sessions = workload.sessions(1.0)
    reusable = reusable_share(sessions, deployment.graph.block_size)
    prompt_tokens, output_tokens = mean_tokens(sessions)
    return {
        "reusable_share": reusable,
        "prompt_tokens_mean": prompt_tokens,
        "output_tokens_mean": output_tokens,
        "guess_rps": _guess_rps(deployment, prompt_tokens, output_tokens, reusable),
    }


def _guess_rps(deployment: Deployment, prompt_tokens: float, output_tokens: float, reusable: float) -> float:
    """Guess saturation: each request is computed but for half of what is reusable, and decoded in a full batch."""
    (role_group,) = deployment.role_groups
    latency = role_group.latency
    context = prompt_tokens + output_tokens / 2
    batch = max(1, min(256, int(role_group.num_blocks * role_group.block_size / context)))
    decode_s = latency.decode_step_s(batch, round(batch * context)) / batch * output_tokens
    prefill_s = latency.prefill_s(max(1, round(prompt_tokens * (1 - reusable / 2))))
    return role_group.spec.replicas / (decode_s + prefill_s)


def prepare_process(policies_beside: str) -> None:
    """Make a process of the pool ready: it ends with its parent, also where that was killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path.insert(0, policies_beside)
    log.configure("error", process="bench")


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@lru_cache
def fingerprint(path: Path) -> str:
    """Name a file's content in eight digits, so that results of another content are not taken for its own.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return f"{zlib.crc32(path.read_bytes()):08x}"
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
