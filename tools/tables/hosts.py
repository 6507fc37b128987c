"""A deployment over etcd and NATS on several hosts, and a router that starts."""

from collections.abc import Iterator

from tables.read import link, of
from tables.results import rows


def _hosts() -> Iterator[list[str]]:
    faults, excused = of("chaos", "chaos_faults", ",.0f"), of("chaos", "chaos_excused", ",.0f")
    yield [
        (f"`chaos_lost`, `chaos_wrong`, `chaos_repeated`, {of('chaos', 'chaos_completed', ',.0f')} requests in five runs of other seeds, 8 mock workers on 4 hosts, 2 frontends,"
        f" {faults} faults, one every 10 s; {excused} more were asked again, whose frontend was killed"),
        ", ".join(of("chaos", f"chaos_{kind}", ",.0f") for kind in ("lost", "wrong", "repeated")),
        "", "", "0 of 100,000", link("chaos"),
    ]  # fmt: skip
    yield [
        "`planes_cpu_ms_per_request`, the same without faults, registries not counted",
        of("chaos_cpu", "planes_cpu_ms_per_request", ".1f") + " ms",
        of("chaos_cpu", "local_cpu_ms_per_request", ".1f") + " ms, one host's own planes",
        of("chaos_cpu", "planes_cpu_over_local", ".2f"), "1.10", link("chaos_cpu"),
    ]  # fmt: skip
    yield [
        "`several_ttft_p50_s`, `p99`, requests of prefix groups to 8 mock workers by 4 frontends, real processes",
        of("routers_served", "several_ttft_p50_s", ".3f") + " s, " + of("routers_served", "several_ttft_p99_s", ".2f") + " s",
        of("routers_served", "one_ttft_p50_s", ".3f") + " s, " + of("routers_served", "one_ttft_p99_s", ".2f") + " s, one frontend before the same workers",
        of("routers_served", "ttft_p50_ratio", ".2f") + ", " + of("routers_served", "ttft_p99_ratio", ".2f"),
        "1.15", link("routers_served"),
    ]  # fmt: skip
    yield [
        "`hit_share` of the same: prompt tokens that were cached",
        of("routers_served", "several_hit_share", ".1%"), of("routers_served", "one_hit_share", ".1%"),
        "", "", link("routers_served"),
    ]  # fmt: skip
    yield [
        "`ready_s`, a new router beside four full workers, 1,000,000 pairs, until it can choose; others on the cores",
        of("new_router", "ready_s", ".2f") + " s, at most " + of("new_router", "ready_s_max", ".2f") + " s",
        of("new_router", "whole_s", ".1f") + " s, until its index is whole",
        "", "1 s", link("new_router"),
    ]  # fmt: skip


TABLES = {"results-hosts": rows(_hosts)}
