"""What README shows of Penstock's measurements, each beside the peer that was measured with it."""

from collections.abc import Iterator

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


def _times(ours: _Value, theirs: _Value, better: str, worse: str) -> str:
    """Write the first over the second, in words; below 1 the other way round, as `worse`."""
    found = ratio(ours, theirs)
    return (
        f"{text(found)} x {better}"
        if found is None or found >= 1
        else f"{text(ratio(theirs, ours))} x {worse}"
    )


def _faster(ours: _Value, theirs: _Value) -> str:
    return _times(ours, theirs, "faster", "slower")


def _shorter(ours: _Value, theirs: _Value) -> str:
    return _times(theirs, ours, "shorter", "longer")


def _router() -> Iterator[list[str]]:
    ours, theirs = (figure("router", f"{who}_lookups_per_s_w64") for who in ("router", "peer"))
    yield [
        "prefix index, 1,000,000 (worker, block) pairs on 64 workers: lookups/s", text(ours, ",.0f"),
        f"{text(theirs, ',.0f')}, the tree of Dynamo 1.6.1", _faster(ours, theirs), _link("router"),
    ]  # fmt: skip
    ours = mean("policies", _ROUTED, "kv", "ttft_mean_s")
    for policy, said in _POLICIES.items():
        theirs = mean("policies", _ROUTED, policy, "ttft_mean_s")
        yield [
            "routing, 70B on 16 H100 at 80 % load, simulated: mean TTFT", f"{text(ours and 1e3 * ours)} ms",
            f"{text(theirs and 1e3 * theirs)} ms, the formula of {said}", _shorter(ours, theirs), _link("policies"),
        ]  # fmt: skip


def _transfer() -> Iterator[list[str]]:
    for said, ours, theirs in (("shared memory", "shm", "nixl"), ("TCP", "tcp", "nixl_tcp")):
        rate_ours, rate_theirs = (
            figure("transfer", f"{who}_read_{_BLOCKS}_gb_per_s") for who in (ours, theirs)
        )
        us_ours, us_theirs = (figure("transfer", f"{who}_4KiB_us") for who in (ours, theirs))
        yield [
            f"KV transfer between two processes, {said}: 512 blocks of 256 KiB", f"{text(rate_ours)} GB/s",
            f"{text(rate_theirs)} GB/s, NIXL 1.5.1", _faster(rate_ours, rate_theirs), _link("transfer"),
        ]  # fmt: skip
        yield [
            f"the same, {said}: one range of 4 KiB", f"{text(us_ours)} us", f"{text(us_theirs)} us, NIXL 1.5.1",
            _faster(us_theirs, us_ours), _link("transfer"),
        ]  # fmt: skip


def _serving() -> Iterator[list[str]]:
    run = side(RUNS[0], "strict")
    for said, at, unit in (
        ("streams beside long prompts, 1 prefill and 1 decode worker on CPU: ITL p99", 0, "ms"),
        ("the same: TTFT p99 of the long prompts", 3, "s"),
    ):
        ours, theirs = run.disaggregated[at], run.aggregated[at]
        yield [
            said, f"{text(ours)} {unit}", f"{text(theirs)} {unit}, 2 aggregated workers of Penstock", _shorter(ours, theirs),
            _link("disagg"),
        ]  # fmt: skip
    ours, theirs = (figure("engine", key) for key in ("engine_tokens_per_s_c32", "generate_tokens_per_s"))
    yield [
        "paged engine, 5 M parameters on one CPU thread, 32 requests at once: tokens/s", text(ours, ",.0f"),
        f"{text(theirs, ',.0f')}, `generate` of transformers", _faster(ours, theirs), _link("engine"),
    ]  # fmt: skip
    yield [
        "`penstock simulate`, 100,000 requests on 1,000 workers", f"{of('simulate', 'simulate_scale_s', ',.0f')} s",
        "not measured", "", _link("simulate"),
    ]  # fmt: skip
    yield [
        "`penstock plan`, four models on 8 to 32 H100, two idle cores", several("plan", [f"plan_s_{name}" for name in _PLANS], ".0f") + " s",
        "not measured", "", _link("plan"),
    ]  # fmt: skip


def why() -> Iterator[str]:
    rows = (row for part in (_router, _transfer, _serving) for row in part())
    return table(["measured", "Penstock", "peer", "Penstock is", "file"], rows)


TABLES = {"why": why}
