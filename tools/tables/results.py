"""The figures that claims are made of, each beside what it was held against."""

from collections.abc import Callable, Iterator

from tables.disagg import RUNS
from tables.policies import geomean, mean
from tables.read import figure, link, of, ratio, several, table, text

_SHAPES = ("1x128MiB", "2048x32KiB", "512x256KiB", "128x1MiB")
_MAIN = "ttft1000ms_itl30ms"
_HEADLINE = "S/70b-fp8/80"
_THREE = RUNS[:3]


def _engines() -> Iterator[list[str]]:
    yield [
        "`hash_tokens_per_s`, 8,192 tokens, block size 16, one core",
        of("hashing", "hash_tokens_per_s", ",.0f", 1e-6) + " million",
        of("hashing", "hash_reference_tokens_per_s", ".2f", 1e-6) + " million, its Python reference",
        of("hashing", "hash_speedup_over_reference", ",.0f"), "300 million", link("hashing"),
    ]  # fmt: skip
    for blocks, aim in ((190, "30 us"), (760, "")):
        yield [
            f"`pool_request_us_{blocks}_blocks`, CPU time, blocks evicted included",
            of("pool", f"pool_request_us_{blocks}_blocks", ",.0f") + " us",
            of("pool", f"pool_reference_request_us_{blocks}_blocks", ",.0f") + " us, its Python reference",
            of("pool", f"pool_speedup_over_reference_{blocks}_blocks", ".1f"), aim, link("pool"),
        ]  # fmt: skip
    speed = of("engine", "engine_tokens_per_s_c32", ",.0f")
    yield [
        "`engine_tokens_per_s_c32`, 5 M parameters, fp32, one thread", speed,
        of("engine", "generate_tokens_per_s", ",.0f") + ", a plain `generate` loop",
        of("engine", "engine_speedup_c32", ".1f"), "5 times", link("engine"),
    ]  # fmt: skip
    http, own = (figure("engine", key) for key in ("paged_http_tokens_per_s_c32", "engine_tokens_per_s_c32"))
    yield [
        "`paged_http_tokens_per_s_c32`, the same through HTTP", text(http, ",.0f"), f"{speed}, the engine in process",
        text(ratio(http, own), ".2f"), "1,700", link("engine"),
    ]  # fmt: skip
    yield [
        "`decode_step_ms_idle_blocks`, with many idle blocks", of("engine", "decode_step_ms_idle_blocks", ".2f"),
        of("engine", "decode_step_ms_free_blocks", ".2f") + ", with free ones",
        of("engine", "decode_step_idle_blocks_ratio", ".2f"), "no growth", link("engine"),
    ]  # fmt: skip
    for said, name in (
        ("`mock_requests_per_s`, 2 workers, 64 at once, 64 tokens each", "mock"),
        ("the same with the workers at the modelled GPU's speed", "mock_modelled_speed"),
    ):
        duration = of(name, "mock_duration_s", ".1f")
        yield [
            said, f"{of(name, 'mock_requests_per_s', ',.0f')}, so 10,000 in {duration} s",
            of(name, "canned_requests_per_s", ",.0f") + ", a server with one canned answer",
            of(name, "fraction_of_limit", ".2f"), "10,000 in 60 s", link(name),
        ]  # fmt: skip
    yield from _frontend()
    yield [
        "`memory_mb_after_all`, 200,000 requests",
        f"{of('frontend_steady', 'ours_memory_mb_after_all', ',.0f')} MB ({of('frontend_steady', 'ours_anonymous_mb_after_all', ',.1f')} without pages of files)",
        f"{of('frontend_steady', 'ours_memory_mb_after_half', ',.0f')} MB ({of('frontend_steady', 'ours_anonymous_mb_after_half', ',.1f')}) after 100,000, "
        + of("frontend_steady", "ours_memory_mb_after_a_tenth", ",.0f") + " MB after 20,000", "", "flat", link("frontend_steady"),
    ]  # fmt: skip
    for name, said, aim in (
        ("mock", "`penstock serve --engine mock`", "2 s"),
        ("demo", "`--demo`, 2 workers that import torch", "5 s"),
    ):
        yield [
            f"`{name}_ready_s`, {said}", of("start", f"{name}_ready_s", ".2f") + " s",
            of("start", "import_torch_s", ".2f") + " s, one process that imports torch and transformers" if name == "demo" else "",
            "", aim, link("start"),
        ]  # fmt: skip
    yield [
        "`cancel_to_free_ms_p99`, 200 clients that hang up", of("cancel", "cancel_to_free_ms_p99", ",.0f") + " ms",
        of("cancel", "ask_ms_p99", ".1f") + " ms, asking the worker", "", "100 ms", link("cancel"),
    ]  # fmt: skip
    for file, model in (("eval", "demo model"), ("eval_vllm", "the same with engine vLLM")):
        for name, moved in (
            ("disaggregated", "eval_remote_prefills"),
            ("migrated", "eval_migrations"),
            ("offloaded", "eval_onboarded_tokens"),
        ):
            count, tokens = of(file, moved, ",.0f"), of(file, "eval_tokens", ",.0f")
            questions = of(file, "eval_questions", ",.0f")
            what = (
                f"{count} prompt tokens loaded"
                if name == "offloaded"
                else f"{count} of {questions} answers moved"
            )
            equal = of(file, f"eval_equal_tokens_{name}_share", ".0f", 100)
            yield [
                f"`eval_equal_tokens_{name}_share`, {model}, {what}",
                f"{equal} % of {tokens} tokens, score {of(file, f'eval_score_{name}', '.2f')}",
                f"score {of(file, 'eval_score_aggregated', '.2f')}, aggregated", "", "100 %, equal scores", link(file),
            ]  # fmt: skip
    host, alone, device = (
        of("kv_offload", f"ttft_mean_ms_{name}", ".1f") + " ms"
        for name in ("host", "device", "all_on_device")
    )
    file = link("kv_offload")
    lower = of("kv_offload", "ttft_less_with_host", ".0f", 100)
    yield [
        "`ttft_mean_ms_host`, demo model, 80 users x 10 turns, a quarter of their KV on the device", host,
        f"{alone}, without the host tier", f"{lower} % lower", "50 % lower", file,
    ]  # fmt: skip
    yield [
        "the same", host, f"{device}, all KV on the device",
        of("kv_offload", "ttft_host_over_all_on_device", ".2f"), "1.1", file,
    ]  # fmt: skip
    yield [
        "`itl_p99_ms_host`, the same", of("kv_offload", "itl_p99_ms_host", ".1f") + " ms",
        of("kv_offload", "itl_p99_ms_device", ".1f") + " ms, without the host tier",
        of("kv_offload", "itl_p99_ratio_with_host", ".2f"), "1.1", file,
    ]  # fmt: skip
    yield [
        "`equal_answers_share`, the same, float32", of("kv_offload", "equal_answers_share", ".1f", 100) + " %",
        "answers without the host tier", "", "all", file,
    ]  # fmt: skip
    yield [
        "`moved_ttft_mean_ms_host`, two workers of a host, turns whose history the other one computed",
        of("kv_offload", "moved_ttft_mean_ms_host", ".1f") + " ms",
        of("kv_offload", "moved_ttft_mean_ms_device", ".1f") + " ms, without the host tier",
        of("kv_offload", "moved_ttft_with_host", ".2f"), "0.7", file,
    ]  # fmt: skip
    yield [
        "`restart_cached_share_second_half`, after a SIGKILL of everything, with a disk",
        of("kv_offload", "restart_cached_share_second_half", ".0f", 100) + " %",
        of("kv_offload", "restart_cached_share_without", ".0f", 100) + " %, without the restart",
        of("kv_offload", "restart_cached_share_ratio", ".2f"), "at least 0.9", file,
    ]  # fmt: skip
    yield [
        "`ttft_mean_ms_host`, vLLM, 24 users x 6 turns, a fifth of their KV on the device",
        of("kv_offload_vllm", "ttft_mean_ms_host", ".0f") + " ms",
        of("kv_offload_vllm", "ttft_mean_ms_device", ".0f") + " ms, without the host tier",
        of("kv_offload_vllm", "ttft_less_with_host", ".0f", 100) + " % lower", "50 % lower", link("kv_offload_vllm"),
    ]  # fmt: skip
    for latency in ("ttft", "itl"):
        yield [
            f"`profile_{latency}_median_error`, 12 held-out points, demo model",
            of("profile", f"profile_{latency}_median_error", ".1f", 100) + " %", "", "", "15 %", link("profile"),
        ]  # fmt: skip


def _frontend() -> Iterator[list[str]]:
    again, whole = "frontend_again", "frontend"
    for file, name, said, form, unit, aim in (
        (
            again,
            "stream_cpu_s_per_1000",
            "CPU of the frontend, 64 streams at once, ours in fewer events",
            ".2f",
            "s",
            "0.5",
        ),
        (again, "unary_cpu_s_per_1000", "the same, whole answers", ".2f", "s", "0.5"),
        (again, "ttfb_ms_p50_c1", "one stream at a time", ".1f", "ms", "1.5 ms"),
        (again, "ttfb_ms_p99_c1", "the same", ".1f", "ms", "4 ms"),
        (again, "ttfb_ms_p99_c256", "256 streams at once", ",.0f", "ms", "1"),
        (whole, "ttfb_ms_p99_c256", "the same in a run beside other work", ",.0f", "ms", "1"),
        (
            again,
            "ttfb_ms_p99_burst",
            "500 streams at once over new connections, none failed",
            ",.0f",
            "ms",
            "1",
        ),
        (whole, "ttfb_ms_p99_burst", "the same in a run beside other work", ",.0f", "ms", "1"),
        (whole, "paced_cpu_s_per_million_tokens", "64 streams, one token at a time", ".1f", "s", "0.3"),
        (again, "idle_rss_mb", "150 MB at most is wanted", ",.0f", "MB", ""),
        (again, "rss_mb", "after 11,000 requests", ",.0f", "MB", ""),
    ):
        yield [
            f"`{name}`, {said}", of(file, f"ours_{name}", form) + f" {unit}",
            of(file, f"peer_{name}", form) + f" {unit}, Dynamo 1.6.1",
            of(file, f"ratio_{name}", ".2f"), aim, link(file),
        ]  # fmt: skip
    yield [
        "`idle_cpu_share`, of a core, without requests", of(again, "ours_idle_cpu_share", ".1f", 100) + " %",
        of(again, "peer_idle_cpu_share", ".1f", 100) + " %, Dynamo 1.6.1", of(again, "ratio_idle_cpu_share", ".2f"), "0.5 %", link(again),
    ]  # fmt: skip
    yield [
        "`two_frontends_speedup`, requests/s on two cores, which client and workers share", of(whole, "two_frontends_speedup", ".2f"),
        "1, one frontend", "", "1.8", link(whole),
    ]  # fmt: skip
    for kind, said in (("long", "of 6,000 words"), ("unseen", "of 6,000 words that no prompt had before")):
        yield [
            f"`gap_ms_p99_added_by_{kind}_prompts`, 16 streams beside prompts {said}",
            of("frontend", f"ours_gap_ms_p99_added_by_{kind}_prompts", ".1f") + " ms",
            of("frontend", f"ours_gap_ms_p99_beside_no_{kind}_prompts", ".1f") + " ms, the gap without", "", "5 ms", link("frontend"),
        ]  # fmt: skip


def _vllm() -> Iterator[list[str]]:
    file, overhead = link("vllm"), link("vllm_overhead")
    for load, what, aim in (
        ("larger", "54 conversations, of which two vLLM workers hold all and one 0.6", "1.5 times"),
        ("fitting", "36 conversations with shared system prompts, of which each holds 0.9", ""),
    ):
        yield [
            f"`kv_{load}_hit_tokens`, {what}", of("vllm", f"kv_{load}_hit_tokens", ",.0f"),
            of("vllm", f"round_robin_{load}_hit_tokens", ",.0f") + ", `round-robin`",
            of("vllm", f"{load}_hit_tokens_kv_over_round_robin", ".2f"), aim, file,
        ]  # fmt: skip
    name = "vllm_overhead"
    yield [
        "`penstock_tokens_per_s_c32`, one vLLM worker, 32 at once", of(name, "penstock_tokens_per_s_c32", ",.0f"),
        of(name, "vllm_tokens_per_s_c32", ",.0f") + ", vLLM's own server",
        of(name, "tokens_per_s_over_vllm", ".2f"), "0.95", overhead,
    ]  # fmt: skip
    yield [
        "`penstock_api_cpu_us_per_token`, the same: CPU time of worker and frontend",
        of(name, "penstock_api_cpu_us_per_token", ".0f") + " us",
        of(name, "vllm_api_cpu_us_per_token", ".0f") + " us, vLLM's API server", "", "", overhead,
    ]  # fmt: skip
    yield [
        "`penstock_ttft_ms_c1`, the same, one at a time", of(name, "penstock_ttft_ms_c1", ".1f") + " ms",
        of(name, "vllm_ttft_ms_c1", ".1f") + " ms, vLLM's own server", "", "at most 3 ms more", overhead,
    ]  # fmt: skip
    exact, streams = (of("vllm", figure, ".0f") for figure in ("killed_streams_exact", "killed_streams"))
    gap = of("vllm", "killed_longest_gap_ms", ",.0f")
    yield [
        "`killed_streams_exact`, greedy, one of two vLLM workers killed",
        f"{exact} of {streams}, longest gap {gap} ms", "", "", "all", file,
    ]  # fmt: skip


def _index() -> Iterator[list[str]]:
    workers = ("w8", "w64", "w512")
    yield [
        "`router_lookups_per_s_w8`, `w64`, `w512`: 64 blocks each, 1,000,000 pairs",
        several("router", [f"router_lookups_per_s_{w}" for w in workers], ",.0f"),
        several("router", [f"peer_lookups_per_s_{w}" for w in workers], ",.0f") + ", Dynamo 1.6.1's tree on one core",
        several("router", [f"router_lookups_vs_peer_{w}" for w in workers], ".1f"),
        "400,000, 400,000, 300,000; 4 times the peer", link("router"),
    ]  # fmt: skip


def _simulator() -> Iterator[list[str]]:
    rate = "simulate_requests_per_wall_s"
    others = f"16: {of('simulate', f'{rate}_b16', ',.0f')}; 512: {of('simulate', f'{rate}_b512', ',.0f')}"
    yield [
        f"`{rate}_b64`, Mooncake trace, 8 workers", f"{of('simulate', f'{rate}_b64', ',.0f')} ({others})", "", "",
        "3,000 with the native index", link("simulate"),
    ]  # fmt: skip
    yield [
        f"`{rate}_disaggregated`, every prompt disaggregated", of("simulate", f"{rate}_disaggregated", ",.0f"), "", "", "", link("simulate"),
    ]  # fmt: skip
    yield [
        "`simulate_scale_s`, 100,000 requests on 1,000 workers (8 workers)",
        f"{of('simulate', 'simulate_scale_s', ',.0f')} s ({of('simulate', 'simulate_scale_s_w8', ',.0f')} s)", "", "",
        "180 s (60 s)", link("simulate"),
    ]  # fmt: skip


def _deployments() -> Iterator[list[str]]:
    key = "interactive_disaggregated_tokens_per_s_per_gpu"
    rack, host = (figure(f"deployments_671b-{name}", f"671b-{name}_{key}") for name in ("gb200", "h100"))
    yield [
        f"`671b-gb200_{key}`, DeepSeek-R1's shape on 32, 20 tokens/s a user, both pools simulated", text(rack, ",.0f"),
        f"{text(host, ',.0f')}, on {link('H100', 'deployments_671b-h100')}", text(ratio(rack, host), ".1f"),
        "30 as published, found at more tokens/s a user: [deployments compared](#deployments-compared)",
        link("671b-gb200", "deployments_671b-gb200"),
    ]  # fmt: skip
    for devices, aim in (
        (8, "1.3 as published: [why](disaggregation.md#what-it-is-worth)"),
        (16, "2, as published"),
    ):
        aggregated, disaggregated = (
            figure("placements", f"{kind}_rps_per_gpu_x{devices}_{_MAIN}")
            for kind in ("aggregated", "disaggregated")
        )
        yield [
            f"`disaggregated_rps_per_gpu_x{devices}_{_MAIN}`, 70B fp8 on {devices} H100, 3,000 in and 150 out, simulated",
            text(disaggregated, ".2f"), f"{text(aggregated, '.2f')}, aggregated", text(ratio(disaggregated, aggregated), ".2f"), aim,
            link("placements"),
        ]  # fmt: skip
    plan = "llama-3.1-70b_h100_x16"
    yield [
        f"`plan_s_{plan}`, the command with all its files", of("plan", f"plan_s_{plan}", ".1f") + " s",
        of("plan", f"search_s_{plan}", ".2f") + " s, the latency model's search alone", "", "30 s", link("plan"),
    ]  # fmt: skip


def _disagg() -> Iterator[list[str]]:
    files = ", ".join(link(run.file) for run in _THREE)
    moved = [[of(run.file, key, ".2g") for run in _THREE] for key in ("kv_transfer_ms", "kv_transfer_ms_p50_loaded", "kv_transfer_memcpy_ms")]  # fmt: skip
    yield [
        "`kv_transfer_ms`, 12 MB of KV, nothing beside it (`kv_transfer_ms_p50_loaded`: beside 12 streams), three runs",
        f"{', '.join(moved[0])} ms ({', '.join(moved[1])})", f"{', '.join(moved[2])} ms, one thread's copy",
        ", ".join(of(run.file, "kv_transfer_over_memcpy", ".0f") for run in _THREE), "", files,
    ]  # fmt: skip
    chosen = "disagg_kv_transfer"
    yield [
        "`kv_transfer_ms`, prefill and decode worker chosen together, 60 prompts",
        f"{of(chosen, 'kv_transfer_ms', '.2g')} ms ({of(chosen, 'kv_transfer_ms_p90', '.2g')} at p90)", "one thread's copy",
        of(chosen, "kv_transfer_over_memcpy", ".2g"), "2.5 ms: missed", link(chosen),
    ]  # fmt: skip
    summed = "disagg_kv_transfer_summed"
    yield [
        "the same on 2026-11-26, every block's checksum compared with its owner's, another machine",
        f"{of(summed, 'kv_transfer_ms', '.2g')} ms ({of(summed, 'kv_transfer_ms_p90', '.2g')} at p90)",
        f"{of(summed, 'kv_transfer_memcpy_ms', '.2g')} ms, one thread's copy",
        of(summed, "kv_transfer_over_memcpy", ".2g"), "2.5 ms: missed", link(summed),
    ]  # fmt: skip
    yield ["`role_change_s`", of("disagg", "role_change_s", ".2f") + " s", "", "", "1", link("disagg")]


def _policies() -> Iterator[list[str]]:
    worst, middle = (of("routers", f"routers_ttft_p99_ratio_{what}", ".2f") for what in ("worst", "geomean"))
    yield [
        "`routers_ttft_p99_ratio_worst`, 4 frontends, simulated", f"{worst} (geometric mean {middle})",
        "1, one frontend", worst, "1.15", link("routers"),
    ]  # fmt: skip
    for load, when in (
        (60, "60 %, which round-robin carries"),
        (80, "80 %, which it does not, so that the ratio grows with the run"),
    ):
        cell = f"S/70b-fp8/{load}"
        own, turn = (mean("policies", cell, name, "ttft_mean_s") for name in ("kv", "round-robin"))
        yield [
            f"mean TTFT of `kv` over round-robin's, S, 70B on 16 H100, {when}, simulated", text(own) + " s", text(turn) + " s",
            text(ratio(turn, own), ".1f"), "3" if load == 80 else "", link("policies"),
        ]  # fmt: skip
    for metric, said, aim in (
        ("e2e_mean_s", "end to end, round-robin", "2"),
        ("ttft_mean_s", "TTFT, least-loaded", "1.5"),
    ):
        other = said.rpartition(" ")[2]
        own, its = (mean("policies", _HEADLINE, name, metric) for name in ("kv", other))
        yield [f"the same at 80 %, {said}", text(own) + " s", text(its) + " s", text(ratio(its, own), ".2f"), aim, link("policies")]  # fmt: skip
    for loads, when in (((30, 60, 80), "up to 80 %"), ((95,), "95 %")):
        found = [geomean(workload, kind, "product", loads) for workload in "SM" for kind in ("", "-host")]
        yield [
            f"mean TTFT of `kv` over that of the best single baseline, `product`, {when} of saturation: S, S host tier, M, M host tier",
            "`kv`", "`product`", ", ".join(text(value, ".2f") for value in found), "0.90 over all loads", link("policies"),
        ]  # fmt: skip
    yield [
        "`cells_near_best_share`; `overload_ttft_over_best_worst`, at 110 %",
        f"{of('policies', 'cells_near_best_share', '.0f', 100)} % of the cells; {of('policies', 'overload_ttft_over_best_worst', '.2f')}",
        "the best baseline of each", "", "0.90; 1", link("policies"),
    ]  # fmt: skip
    troubles = [of("policies_troubles", f"{name}_ttft_over_calm_worst", ".2f") for name in ("slow-worker", "fast-worker", "late-loads")]  # fmt: skip
    yield [
        "mean TTFT of `kv` with the first worker 1.5 times as slow as its model, twice as fast, or load reports 200 ms late; at 80 %, simulated",
        "at most " + ", ".join(troubles) + " times", "1, as expected", ", ".join(troubles), "1.20",
        link("troubles", "policies_troubles"),
    ]  # fmt: skip


def _transfer() -> Iterator[list[str]]:
    def speeds(backend: str, way: str) -> str:
        return several("transfer", [f"{backend}_{way}_{shape}_gb_per_s" for shape in _SHAPES], ".2g")

    def over(backend: str, way: str, peer: str) -> str:
        return several("transfer", [f"{backend}_{way}_{shape}_over_{peer}" for shape in _SHAPES], ".2g")

    shapes = "1 x 128 MiB, 2,048 x 32 KiB, 512 x 256 KiB, 128 x 1 MiB"
    for backend, peer, said, aims in (
        ("shm", "nixl", "NIXL over UCX", ("1", "1")),
        ("tcp", "nixl_tcp", "NIXL over TCP", ("0.8", "2.5")),
    ):
        for way, aim in zip(("write", "read"), aims, strict=True):
            yield [
                f"`{backend}_{way}_..._gb_per_s`: {shapes}", speeds(backend, way), f"{speeds(peer, way)}, {said}",
                over(backend, way, peer), aim, link("transfer"),
            ]  # fmt: skip
    yield [
        "`shm_write_..._over_memcpy`; `shm_read_...`, one thread", "", "",
        f"{over('shm', 'write', 'memcpy')}; {over('shm', 'read', 'memcpy')}", "0.9; 0.8 for 32 KiB", link("transfer"),
    ]  # fmt: skip
    keys = [f"file_{way}_{shape}" for shape in ("128x1MiB", "512x256KiB") for way in ("write", "read")]
    yield [
        "`file_write_128x1MiB_over_fio`, `file_read_...`; the same with 256 KiB",
        several("transfer", [f"{key}_gb_per_s" for key in keys], ".2g") + " GB/s", "fio with O_DIRECT",
        several("transfer", [f"{key}_over_fio" for key in keys], ".2g"), "0.85; 0.8", link("transfer"),
    ]  # fmt: skip
    yield [
        "`shm_4KiB_us`; `post_prepared_2048_us`; `register_prepare_8192_ms`; `metadata_one_slab_bytes`",
        "; ".join(
            of("transfer", key, ".3g") + unit
            for key, unit in (("shm_4KiB_us", " us"), ("post_prepared_2048_us", " us"), ("register_prepare_8192_ms", " ms"), ("metadata_one_slab_bytes", ""))
        ),
        "", "", "20; 60; 2; 512", link("transfer"),
    ]  # fmt: skip


_Part = Callable[[], Iterator[list[str]]]


def rows(*parts: _Part) -> Callable[[], Iterator[str]]:
    head = ["figure", "result", "compared with", "ratio", "aim", "file"]
    return lambda: table(head, (row for part in parts for row in part()))


TABLES = {
    "results-engines": rows(_engines),
    "results-vllm": rows(_vllm),
    "results-routing": rows(_index, _policies),
    "results-disaggregation": rows(_disagg),
    "results-transfer": rows(_transfer),
    "results-simulation": rows(_simulator, _deployments),
}
