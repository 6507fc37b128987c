"""One simulated run, and a description of its workload on its deployment."""

import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import process_time

from benchmarks.runner.cache import Figures
from benchmarks.runner.figures import figures
from benchmarks.runner.workload import Workload, mean_tokens, reusable_share
from penstock.core.errors import ConfigError
from penstock.graph import Overrides, load
from penstock.sim.deployment import Deployment, plan_deployment
from penstock.sim.simulate import simulate
from penstock.sim.world.network import NetworkConfig

DEPLOYMENTS = {
    "70b-fp8": ("70b-h100-fp8-tp2-x8", "70b-h100-fp8-tp2"),
    "8b-bf16": ("8b-h100-x8", "8b-h100-bf16-tp1"),
    "70b-fp8-host": ("70b-h100-fp8-tp2-x8-host", "70b-h100-fp8-tp2"),
    "8b-bf16-host": ("8b-h100-x8-host", "8b-h100-bf16-tp1"),
}
"""By short name: the graph, and the profile of its engines."""
_UNBOUNDED = 1 << 24
_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the router does not know: the first worker takes `slowness` times as long; load reports come late."""

    slowness: float = 1.0
    load_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GraphFiles:
    """A graph, the profile of its engines, and settings (`PLACE=VALUE`) that override the graph's."""

    graph: Path
    profile: Path
    settings: tuple[str, ...] = ()

    def deployment(self, policy: str = "kv", trouble: Trouble | None = None) -> Deployment:
        """Plan the deployment. Its router bounds neither open nor queued requests, for runs beyond saturation.

        Raises:
            ConfigError: a file cannot be read, or describes an impossible deployment.
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


def find_graph(examples: Path, deployment: str, settings: tuple[str, ...] = ()) -> GraphFiles:
    """Give the files of one of `DEPLOYMENTS` under the folder `examples`."""
    graph, profile = DEPLOYMENTS[deployment]
    return GraphFiles(
        examples / "graphs" / f"{graph}.yaml", examples / "profiles" / f"{profile}.json", settings
    )


@dataclass(frozen=True, slots=True)
class Run:
    """All inputs of one simulation. `policy` is a value of `router.policy`."""

    graph: GraphFiles
    workload: Workload
    rate_per_s: float
    policy: str = "kv"
    seed: int = 1
    trouble: Trouble = Trouble()

    @property
    def key(self) -> str:
        return (
            f"policy={self.policy} {_name(self.graph, self.workload, self.seed)} rate={self.rate_per_s:.6g}"
            f" slowness={self.trouble.slowness:g} load_delay={self.trouble.load_delay_s:g}"
        )

    def __call__(self) -> Figures:
        """Simulate.

        Raises:
            ConfigError: a file cannot be read, or the workload does not fit.
        """
        began_s = process_time()
        deployment = self.graph.deployment(self.policy, self.trouble)
        sessions = self.workload.sessions(self.rate_per_s, self.seed)
        deployment.check(sessions)
        span_s = sessions[-1].at_s
        recording = simulate(
            deployment, sessions, seed=self.seed, sample_interval_s=max(span_s / _SAMPLES, 0.1)
        )
        return figures(recording, span_s) | {"cpu_s": process_time() - began_s}


@dataclass(frozen=True, slots=True)
class Description:
    """A workload's mean lengths and reusable share, and a guess of the deployment's saturation by it."""

    graph: GraphFiles
    workload: Workload
    seed: int = 1

    @property
    def key(self) -> str:
        return f"about {self.name}"

    @property
    def name(self) -> str:
        return _name(self.graph, self.workload, self.seed)

    def __call__(self) -> Figures:
        """Compute.

        Raises:
            ConfigError: a file cannot be read.
        """
        deployment = self.graph.deployment()
        sessions = self.workload.sessions(1.0, self.seed)
        reusable = reusable_share(sessions, deployment.graph.block_size)
        prompt_tokens, output_tokens = mean_tokens(sessions)
        return {
            "reusable_share": reusable,
            "prompt_tokens_mean": prompt_tokens,
            "output_tokens_mean": output_tokens,
            "guess_rps": _guess_rps(deployment, prompt_tokens, output_tokens, reusable),
        }


def _guess_rps(deployment: Deployment, prompt_tokens: float, output_tokens: float, reusable: float) -> float:
    """Guess saturation in requests per second: half of the reusable tokens are cached, and decode batches are full."""
    (role_group,) = deployment.role_groups
    latency = role_group.latency
    context = prompt_tokens + output_tokens / 2
    batch = max(1, min(256, int(role_group.num_blocks * role_group.block_size / context)))
    decode_s = latency.decode_step_s(batch, round(batch * context)) / batch * output_tokens
    prefill_s = latency.prefill_s(max(1, round(prompt_tokens * (1 - reusable / 2))))
    return role_group.spec.replicas / (decode_s + prefill_s)


def _name(files: GraphFiles, workload: Workload, seed: int) -> str:
    """Name what runs on what, with fingerprints of the files' contents."""
    trace = "" if workload.trace is None else f"-{fingerprint(workload.trace)}"
    skipped = f" skip={workload.skip}" if workload.skip else ""
    contents = " ".join((f"{fingerprint(files.graph)}-{fingerprint(files.profile)}", *files.settings))
    return (
        f"{workload.name}{trace} n={workload.requests}{skipped} seed={seed} on {files.graph.stem} {contents}"
    )


@lru_cache
def fingerprint(path: Path) -> str:
    """Give eight digits that change with the file's content.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return f"{zlib.crc32(path.read_bytes()):08x}"
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
