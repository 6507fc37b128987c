"""What README shows of Penstock's measurements, each beside the peer that was measured with it."""

from collections.abc import Iterator, Sequence

from tables.disagg import RUNS, side
from tables.policies import mean
from tables.read import figure, of, ratio, several, table, text

_ROUTED = "S/70b-fp8/80"
_POLICIES = {
    "product": "LMetric",
    "thresholds": "sglang-router",
    "weighted-scores": "llm-d",
    "linear-blocks": "Dynamo",
}
_BLOCKS = "512x256KiB"
_PLANS = ("llama-3.1-8b_h100_x8", "llama-3.1-70b_h100_x16", "gpt-oss-120b_h100_x8", "deepseek-r1_h100_x32")
_Value = float | None


def _link(name: str) -> str:
    return f"[{name}](benchmarks/results/{name}.json)"


def _times(pairs: Sequence[tuple[_Value, _Value]]) -> str:
    """Write the first of each pair over the second."""
    return f"{', '.join(text(ratio(*pair)) for pair in pairs)} x"


def _router() -> Iterator[list[str]]:
    ours, theirs = (figure("router", f"{who}_lookups_per_s_w64") for who in ("router", "peer"))
    yield [
        "prefix index, 1,000,000 (worker, block) pairs on 64 workers: lookups/s", text(ours, ",.0f"),
        f"{text(theirs, ',.0f')}, the tree of Dynamo 1.6.1", _times([(ours, theirs)]), _link("router"),
    ]  # fmt: skip
    ours = mean("policies", _ROUTED, "kv", "ttft_mean_s")
    peers = {said: mean("policies", _ROUTED, policy, "ttft_mean_s") for policy, said in _POLICIES.items()}
    yield [
        "routing policies, 70B on 16 H100 at 80 % load, simulated: mean TTFT", f"{text(ours and 1e3 * ours)} ms",
        f"{', '.join(text(value and 1e3 * value) for value in peers.values())} ms, the formulas of {', '.join(peers)}",
        _times([(value, ours) for value in peers.values()]), _link("policies"),
    ]  # fmt: skip


def _transfer() -> Iterator[list[str]]:
    def pairs(measure: str) -> list[tuple[_Value, _Value]]:
        return [
            (figure("transfer", f"{ours}_{measure}"), figure("transfer", f"{theirs}_{measure}"))
            for ours, theirs in (("shm", "nixl"), ("tcp", "nixl_tcp"))
        ]

    blocks, latency = pairs(f"read_{_BLOCKS}_gb_per_s"), pairs("4KiB_us")
    for said, found, unit in (
        ("KV transfer between two processes, shared memory and TCP: 512 blocks of 256 KiB", blocks, "GB/s"),
        ("the same: one range of 4 KiB", latency, "us"),
    ):
        ours, theirs = (", ".join(text(pair[i]) for pair in found) for i in (0, 1))
        better = found if unit == "GB/s" else [(theirs_us, ours_us) for ours_us, theirs_us in found]
        yield [said, f"{ours} {unit}", f"{theirs} {unit}, NIXL 1.5.1", _times(better), _link("transfer")]


def _serving() -> Iterator[list[str]]:
    run = side(RUNS[0], "strict")
    for said, at, unit in (
        ("streams beside long prompts, 1 prefill and 1 decode worker on CPU: ITL p99", 0, "ms"),
        ("the same: TTFT p99 of the long prompts", 3, "s"),
    ):
        ours, theirs = run.disaggregated[at], run.aggregated[at]
        yield [
            said, f"{text(ours)} {unit}", f"{text(theirs)} {unit}, 2 aggregated workers of Penstock", _times([(theirs, ours)]),
            _link("disagg"),
        ]  # fmt: skip
    ours, theirs = (figure("engine", key) for key in ("engine_tokens_per_s_c32", "generate_tokens_per_s"))
    yield [
        "paged engine, 5 M parameters on one CPU thread, 32 requests at once: tokens/s", text(ours, ",.0f"),
        f"{text(theirs, ',.0f')}, `generate` of transformers", _times([(ours, theirs)]), _link("engine"),
    ]  # fmt: skip
    yield [
        "`penstock simulate`, 100,000 requests on 1,000 workers", f"{of('simulate', 'simulate_scale_s', ',.0f')} s",
        "not measured", "", _link("simulate"),
    ]  # fmt: skip
    yield [
        "`penstock plan`, four models on 8 to 32 H100", several("plan", [f"plan_s_{name}" for name in _PLANS], ".0f") + " s",
        "not measured", "", _link("plan"),
    ]  # fmt: skip


def why() -> Iterator[str]:
    rows = (row for part in (_router, _transfer, _serving) for row in part())
    return table(["measured", "Penstock", "peer", "better by", "file"], rows)


TABLES = {"why": why}
