"""Eviction policies beside each other."""

from collections.abc import Iterator

from tables.read import of, report, table

_POLICIES = ("lru", "lfu", "arc", "s3-fifo", "seconds", "offline")
_WORKLOADS = {
    "trace": "Mooncake conversation",
    "trace-first-half": "its first half",
    "trace-second-half": "its second half",
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


TABLES = {"eviction": eviction}
