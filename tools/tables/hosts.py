"""A deployment over etcd and NATS on several hosts."""

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


TABLES = {"results-hosts": rows(_hosts)}
