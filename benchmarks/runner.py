"""Simulated runs for every experiment: `Run` describes one, `Runner` runs many in processes and keeps their figures."""

import argparse
import json
import math
import os
import random
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from time import process_time
from types import TracebackType
from typing import Protocol, Self, TypeVar

import numpy as np

from penstock.core.errors import ConfigError, PenstockError
from penstock.graph import Overrides, load
from penstock.plan.trial import Processes
from penstock.sim.deployment import SimDeployment, plan_deployment
from penstock.sim.network import NetworkConfig
from penstock.sim.report import latencies_s
from penstock.sim.simulate import Recording, simulate
from penstock.sim.trace import read_trace
from penstock.sim.workload import SimPrompt, SimSession, Turn, named, named_units, rescaled, trace_sessions

Figures = dict[str, float]


class Cache:
    """Figures by key. One process owns the file; without a file nothing survives the process. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        """Read the file, and drop its last line if that was cut off.

        Raises:
            ConfigError: the file cannot be read and written, or has other content.
        """
        self._lock = threading.Lock()
        self._path = path
        self._known: dict[str, Figures] = {}
        if path is None:
            return
        try:
            with path.open("a+b") as file:  # a file that cannot be written fails here, before any job runs
                file.seek(0)
                content = file.read()
            whole, _, rest = content.rpartition(b"\n")
            if rest:
                os.truncate(path, len(content) - len(rest))
            lines = whole.splitlines()
            for line in lines:
                row = json.loads(line)
                self._known[row["key"]] = {name: float(value) for name, value in row["figures"].items()}
        except OSError as error:
            raise ConfigError(f"--state: {path}: cannot be used: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--state: {path}, line {lines.index(line) + 1}: not a result of this bench: {error}; name another file"
            ) from error

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Figures | None:
        return self._known.get(key)

    def put(self, key: str, figures: Figures) -> None:
        """Keep figures; once this returns, they are on the disk."""
        self._known[key] = figures
        if self._path is not None:
            with self._lock, self._path.open("ab") as file:
                file.write(json.dumps({"key": key, "figures": figures}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def forget(self, is_stale: Callable[[str], bool]) -> Self:
        """Drop figures by key, also from the file, which is replaced atomically."""
        kept = {key: figures for key, figures in self._known.items() if not is_stale(key)}
        if self._path is not None and len(kept) < len(self._known):
            beside = self._path.with_name(self._path.name + ".new")
            rows = (json.dumps({"key": key, "figures": figures}) + "\n" for key, figures in kept.items())
            beside.write_text("".join(rows), encoding="utf-8")
            beside.replace(self._path)
        self._known = kept
        return self


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


class Job(Protocol):
    """A computation that can be pickled. Jobs with equal keys have equal figures."""

    @property
    def key(self) -> str: ...

    def __call__(self) -> Figures: ...


J = TypeVar("J", bound=Job)


class Runner:
    """Enter it from the main thread; leaving it ends its processes. `run_many` may be called from several threads."""

    def __init__(self, jobs: int, cache: Cache | None = None) -> None:
        self._processes = Processes(jobs)
        self._cache = Cache(None) if cache is None else cache

    def __enter__(self) -> Self:
        self._processes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.__exit__(kind, error, trace)

    def knows(self, job: Job) -> bool:
        """Whether the cache has the figures."""
        return self._cache.get(job.key) is not None

    def run(self, job: Job) -> Figures:
        """Run one job, as `run_many` does."""
        return dict(self.run_many([job]))[job]

    def run_many(self, jobs: Iterable[J]) -> Iterator[tuple[J, Figures]]:
        """Yield each job with its figures: first what the cache has, then each job as it ends.

        Raises:
            PenstockError: a job failed, or its process was killed.
        """
        known: list[tuple[J, Figures]] = []
        running: dict[Future[Figures], J] = {}
        for job in jobs:
            figures = self._cache.get(job.key)
            if figures is None:
                running[self._processes.submit(job)] = job
            else:
                known.append((job, figures))
        yield from known
        for future in as_completed(running):
            job = running[future]
            try:
                figures = future.result()
            except BrokenProcessPool as error:
                raise PenstockError(
                    "a process of the bench was killed, perhaps because memory ran out; try fewer --jobs, and the"
                    " same --state to go on"
                ) from error
            self._cache.put(job.key, figures)
            yield job, figures


def default_jobs() -> int:
    """Give the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def add_simulations(parser: argparse.ArgumentParser) -> None:
    """Add the options of an experiment that simulates deployments in processes."""
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), metavar="N", help="processes (default: all cores)"
    )
    parser.add_argument(
        "--examples",
        type=Path,
        default=Path("examples"),
        metavar="DIR",
        help="graphs and profiles (default %(default)s)",
    )


def expect_at_least(options: argparse.Namespace, **least: int) -> None:
    """Check options by name, each number of those with several; one that was not given is right.

    Raises:
        ConfigError: one is smaller, or no number.
    """
    for name, bound in least.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not value >= bound:
                raise ConfigError(f"--{name.replace('_', '-')}: must be >= {bound}, got {value}")


SYNTHETIC, RECORDED = "S", "M"

GROUPS = 64
"""Groups of sessions whose prompts begin alike; the k-th is drawn in proportion to k^-1.1."""
ZIPF = 1.1
GROUP_TOKENS = (2_000, 16_000)
"""Shortest and longest prefix of a group, log-uniform over the groups."""
GROUPED_SHARE = 0.1
"""Share of sessions that belong to a group; others share no prefix."""
TURNS = (0.3, 0.3, 0.2, 0.1, 0.1)
"""Shares of sessions with one turn, two and so on; 2.4 on average."""
NEW_TOKENS, OUTPUT_TOKENS = 1_210, 800
"""Means of each turn; with the above, 4,000 prompt tokens on average, of which 68 % could be reused."""
LENGTH_SIGMA = 0.7
"""Standard deviation of the lengths' logarithm."""
THINK_S = 20.0
"""Mean time between an answer and the next turn, exponential."""
_UNIT_TOKENS = 16
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests of `SYNTHETIC` or `RECORDED`. `trace` is the file of `RECORDED`, of which `skip` requests are left out first."""

    name: str
    requests: int
    trace: Path | None = None
    skip: int = 0

    def sessions(self, rate_per_s: float, seed: int = 1) -> Sequence[SimSession]:
        """Draw the sessions of one run, in order of time.

        Args:
            rate_per_s: requests on average.
            seed: of the draw.

        Raises:
            ConfigError: the trace cannot be read, or ends before the first request.
        """
        return _sessions(self, rate_per_s, seed)


@lru_cache(maxsize=1)
def _sessions(workload: Workload, rate_per_s: float, seed: int) -> Sequence[SimSession]:
    """Draw the sessions once for all policies that run them one after the other."""
    if workload.name == SYNTHETIC:
        return list(_synthetic(workload.requests, rate_per_s, seed))
    if workload.trace is None:
        raise ConfigError(f"workload {workload.name}: it is read from a trace; give one with --trace")
    rows = read_trace(workload.trace)[workload.skip :][: workload.requests]
    if not rows:
        raise ConfigError(
            f"{workload.trace}: has no more than {workload.skip} requests; take fewer or shorter parts"
        )
    rows = [replace(row, at_s=row.at_s - rows[0].at_s) for row in rows]
    return list(trace_sessions(rescaled(rows, rate_per_s=rate_per_s), seed=seed))


def _synthetic(requests: int, rate_per_s: float, seed: int) -> Iterator[SimSession]:
    rng = random.Random(seed)
    run = rng.getrandbits(62)
    shortest, longest = GROUP_TOKENS
    # Golden steps spread the lengths evenly whatever the popularity, so that seeds differ little in their means.
    lengths = [shortest * (longest / shortest) ** ((k * _GOLDEN) % 1.0) for k in range(1, GROUPS + 1)]
    groups = [named_units(named(run, 1, k), round(tokens / _UNIT_TOKENS)) for k, tokens in enumerate(lengths)]
    weights = list(accumulate((k + 1) ** -ZIPF for k in range(GROUPS)))
    turns_mean = sum(share * (n + 1) for n, share in enumerate(TURNS))
    at_s, number, left = 0.0, 0, requests
    while left > 0:
        (turns,) = rng.choices(range(1, len(TURNS) + 1), TURNS)
        shared = groups[0][:0]
        if rng.random() < GROUPED_SHARE:
            (shared,) = rng.choices(groups, cum_weights=weights)
        prompt = SimPrompt(named(run, 2, number), shared, _UNIT_TOKENS)
        yield SimSession(at_s, tuple(_turns(len(shared) * _UNIT_TOKENS, min(turns, left), rng)), prompt)
        number, left = number + 1, left - turns
        at_s += rng.expovariate(rate_per_s / turns_mean)


def _turns(prefix_tokens: int, count: int, rng: random.Random) -> Iterator[Turn]:
    so_far = prefix_tokens
    for number in range(count):
        think_s = rng.expovariate(1.0 / THINK_S) if number else 0.0
        so_far += _length(NEW_TOKENS, rng)
        output_tokens = _length(OUTPUT_TOKENS, rng)
        yield Turn(so_far, output_tokens, think_s)
        so_far += output_tokens


def _length(mean: int, rng: random.Random) -> int:
    """Draw a log-normal length of this mean."""
    return max(1, round(mean * math.exp(rng.gauss(-LENGTH_SIGMA * LENGTH_SIGMA / 2, LENGTH_SIGMA))))


def reusable_share(sessions: Sequence[SimSession], block_size: int) -> float:
    """Give the share of prompt tokens that an unbounded cache would hold, with sessions one after the other."""
    seen: set[int] = set()
    found = total = 0
    for session in sessions:
        for turn in session.turns:
            ends = turn.input_tokens // block_size, (turn.input_tokens + turn.output_tokens) // block_size
            names = session.prompt.block_hashes(block_size, 0, ends[1])[:, 0].tolist()
            # One token is computed in any case: the last block of a prompt is not taken from the cache whole.
            most = (turn.input_tokens - 1) // block_size
            depth = next((n for n in range(most) if names[n] not in seen), most)
            found += depth * block_size
            total += turn.input_tokens
            seen.update(names)
    return found / total if total else 0.0


def mean_tokens(sessions: Sequence[SimSession]) -> tuple[float, float]:
    """Give the mean prompt and the mean answer."""
    turns = [turn for session in sessions for turn in session.turns]
    return (
        float(np.mean([turn.input_tokens for turn in turns])),
        float(np.mean([turn.output_tokens for turn in turns])),
    )


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

    def deployment(self, policy: str = "kv", trouble: Trouble | None = None) -> SimDeployment:
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


def _guess_rps(
    deployment: SimDeployment, prompt_tokens: float, output_tokens: float, reusable: float
) -> float:
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
