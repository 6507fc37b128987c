"""Eviction policies beside each other."""

from collections.abc import Iterator

from tables.read import of, report, table

_POLICIES = ("lru", "seconds", "offline")
_WORKLOADS = {
    "trace": "Mooncake conversation",
    "agents": "agents with tools",
    "one-shot": "one-shot prompts",
    "scans": "conversations and scans",
    "phases": "phases",
}


def eviction() -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for name, said in _WORKLOADS.items():
            for blocks in report("eviction")["config"].get("blocks", ()):
                keys = [f"{name}_{policy}_saved_percent_{blocks}_blocks" for policy in _POLICIES]
                yield [said, f"{blocks:,}", *(of("eviction", key, ".1f") for key in keys)]

    return table(
        ["prefill seconds saved, %", "blocks", *(f"`{p}`" for p in _POLICIES[:-1]), "offline"], rows()
    )


def host() -> Iterator[str]:
    """Policies of a host tier below a device that evicts by `seconds`, on the trace."""
    policies = ("no-host", *_POLICIES[:-1], "unbounded")

    def rows() -> Iterator[list[str]]:
        for pair in report("eviction_host")["config"].get("host", ()):
            device, below = map(int, pair.split(":"))
            keys = [f"trace_{policy}_saved_percent_{device}_{below}_blocks" for policy in policies]
            yield [f"{device:,}, {below:,}", *(of("eviction_host", key, ".1f") for key in keys)]

    return table(
        [
            "blocks of device, host",
            "no host tier",
            *(f"`{p}`" for p in _POLICIES[:-1]),
            "a host tier for all",
        ],
        rows(),
    )


TABLES = {"eviction": eviction, "eviction-host": host}
