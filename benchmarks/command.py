"""The experiments by name, and the command that runs them."""

from collections.abc import Sequence

from penstock.bench.registry import Benches
from penstock.cli import run
from penstock.cli.parser import Parser

EXPERIMENTS = Benches(
    "benchmarks",
    {
        "cancel": (
            "benchmarks.processes.cancel",
            "from a client's disconnect to its KV blocks being free",
        ),
        "chaos": (
            "benchmarks.chaos",
            "a deployment over etcd and NATS on four hosts of network namespaces: requests under faults, CPU beside local planes",
        ),
        "deployments": (
            "benchmarks.simulated.deployments",
            "models on H100, GB200 and GB300, simulated: tokens per second, joule and dollar at latency targets",
        ),
        "disagg": (
            "benchmarks.disagg",
            "streams beside long prompts: a prefill and a decode worker against two aggregated ones, real processes",
        ),
        "engine": (
            "benchmarks.processes.engine",
            "the paged engine beside a plain generate loop, in process and over HTTP",
        ),
        "eval": (
            "benchmarks.processes.evaluation",
            "whether answers stay the same: questions asked of aggregated and disaggregated workers, and of workers that are killed",
        ),
        "eviction": (
            "benchmarks.eviction",
            "eviction policies of the block pool: prefill seconds saved on a trace and other workloads, beside an offline bound",
        ),
        "frontend": (
            "benchmarks.frontend",
            "the frontend's CPU time and latencies before workers that take no time, beside a peer's",
        ),
        "hashing": (
            "benchmarks.micro.hashing",
            "token ids into block hashes, against the Python reference",
        ),
        "kv-offload": (
            "benchmarks.kv.offload",
            "conversations of more KV than the device holds: without a host tier, with one, and with its bytes on the device",
        ),
        "kv-prefetch": (
            "benchmarks.kv.prefetch",
            "TTFT where prefixes are loaded while their requests wait for the batch, and where they are not, simulated",
        ),
        "kv-retention": (
            "benchmarks.kv.retention",
            "prefill seconds saved by what requests say of their KV: kinds, priorities, pins with a TTL; and tenants' shares",
        ),
        "kv-stores": (
            "benchmarks.kv_stores",
            "KV blocks into host memory and a file and back, beside LMCache, memcpy and fio",
        ),
        "mock": (
            "benchmarks.processes.mock",
            "everything but the model: requests per second through frontend, router and workers",
        ),
        "placements": (
            "benchmarks.simulated.placements",
            "aggregated against disaggregated workers on H100, simulated: the best layouts of each by latency targets",
        ),
        "plan": (
            "benchmarks.simulated.plan",
            "how long `penstock plan` takes, for four models",
        ),
        "planner": (
            "benchmarks.planner",
            "the planner against static workers, an autoscaler, interpolation and an oracle, simulated: SLO and GPU-hours",
        ),
        "policies": (
            "benchmarks.policies",
            "routing policies side by side, on the simulator: kv and the baselines under benchmarks/baselines",
        ),
        "pool": (
            "benchmarks.micro.pool",
            "a request's work in the block pool, against the Python reference",
        ),
        "profile": (
            "benchmarks.processes.profile",
            "how well `penstock profile` predicts the paged engine at points it was not fitted to",
        ),
        "recipes": (
            "benchmarks.simulated.recipes",
            "the recipes in examples/recipes, simulated under one load: TTFT, TPOT and goodput",
        ),
        "regions": (
            "benchmarks.regions",
            "3 regions of 1,000 workers, simulated, one lost for a while: alone, asked in turn, linked by load, and by summaries of prefixes",
        ),
        "request": (
            "benchmarks.micro.request",
            "a request's CPU time in the frontend, from the bytes of its HTTP request to those of its answer, without sockets",
        ),
        "reshard": (
            "benchmarks.micro.reshard",
            "planning KV transfers between workers of different tensor parallelism and layout",
        ),
        "router": (
            "benchmarks.micro.router",
            "the prefix index: lookups, stored and removed blocks per second, bytes, beside a peer's",
        ),
        "routers": (
            "benchmarks.simulated.routers",
            "several frontends against one on the same requests, simulated: how much TTFT grows",
        ),
        "scale": (
            "benchmarks.scale.routers",
            "8 routers over 1,000 workers with 100,000 streams at once, simulated: what reaches each, a restart, how alike they choose",
        ),
        "scale-router": (
            "benchmarks.scale.alone",
            "one router before 1,000 to 10,000 workers: memory, CPU time of events and decisions, and what breaks first",
        ),
        "simulate": (
            "benchmarks.simulated.simulate",
            "the simulator: requests per wall second, and where the time goes",
        ),
        "start": (
            "benchmarks.processes.start",
            "from the `penstock serve` command to its first answer, with the mock engine and with the demo model",
        ),
        "tenants": (
            "benchmarks.tenants",
            "a tenant's TTFT beside another one that floods, over its TTFT alone: real processes, one frontend and two",
        ),
        "transfer": (
            "benchmarks.transfer",
            "bytes moved by every transport between two processes, beside NIXL, memcpy and fio",
        ),
        "vllm": (
            "benchmarks.vllm.routed",
            "two vLLM workers behind the router: prefix hits by policy, a killed worker",
        ),
        "vllm-overhead": (
            "benchmarks.vllm.overhead",
            "one vLLM worker behind Penstock beside vLLM's own server: tokens per second, TTFT, CPU time",
        ),
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an experiment and return its exit code."""
    return run(make_parser, arguments)


def make_parser() -> Parser:
    """Make the parser of all experiments."""
    parser = Parser(prog="python -m benchmarks", description="Run an experiment, and write one JSON.")
    EXPERIMENTS.add_names(parser)
    return parser
