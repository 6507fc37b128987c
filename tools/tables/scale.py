"""Many routers over many workers, and one router before more and more of them."""

from collections.abc import Iterator

from tables.read import link, of, report, table
from tables.results import rows


def _routers() -> Iterator[list[str]]:
    config, name = report("scale")["config"], "scale"
    yield [
        f"`in_flight`, {config.get('routers')} routers, {config.get('workers', 0):,} workers, simulated",
        of(name, "in_flight", ",.0f") + " streams at once",
        "", "", "100,000", link(name),
    ]  # fmt: skip
    yield [
        "`event_messages_per_s`, `load_reports_per_s`, `bytes_per_s`: what reaches each router, without tokens",
        f"{of(name, 'event_messages_per_s', ',.0f')}, {of(name, 'load_reports_per_s', ',.0f')}, {of(name, 'bytes_per_s', '.1f', 1e-6)} MB",
        f"{of(name, 'decisions_per_s', ',.0f')} decisions/s of each router", "", "", link(name),
    ]  # fmt: skip
    yield [
        "`same_worker_share`, decisions for a worker to which another router sent a request within 1 ms",
        of(name, "same_worker_share", ".1f", 100) + " %",
        of(name, "resent_share", ".1f", 100) + " % were sent back by the worker", "", "", link(name),
    ]  # fmt: skip
    yield [
        "`unevenness`, streams of the worker with most over the mean",
        of(name, "unevenness", ".2f"), "", "", "", link(name),
    ]  # fmt: skip
    yield [
        "`restart_ready_s`, a router started anew, until it can choose; virtual time, without its own computing",
        of(name, "restart_ready_s", ".0f", 1e3) + " ms",
        f"{of(name, 'restart_whole_s', '.0f', 1e3)} ms, until its index is whole; {of(name, 'restart_alike_s', '.0f', 1e3)} ms, until it chooses like the others",
        "", "", link(name),
    ]  # fmt: skip


def _alone() -> Iterator[str]:
    name = "scale_router"
    numbers = report(name)["config"].get("numbers", [])

    def cell(key: str, form: str, scale: float = 1.0) -> list[str]:
        return [of(name, f"{key}_w{number}", form, scale) for number in numbers]

    def body() -> Iterator[list[str]]:
        yield ["pairs of a worker and a block, million", *cell("pairs", ".1f", 1e-6)]
        yield ["memory of the router, MB", *cell("rss_bytes", ",.0f", 1e-6)]
        yield ["of these the index, MB", *cell("index_bytes", ",.0f", 1e-6)]
        yield ["CPU time of snapshots until the index is whole, s", *cell("whole_cpu_s", ".1f")]
        yield ["of an event message, us", *cell("event_us", ".1f")]
        yield ["of a load report, us", *cell("load_us", ".1f")]
        yield ["of a decision, us", *cell("decision_us", ",.0f")]
        yield ["cores for what arrives", *cell("input_cores", ".2f")]
        yield ["cores for the decisions of one of 8 routers", *cell("decision_cores", ".2f")]

    return table(["workers", *(f"{number:,}" for number in numbers)], body())


TABLES = {"results-scale": rows(_routers), "scale-router": _alone}
