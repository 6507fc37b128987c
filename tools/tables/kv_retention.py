"""What requests say of their KV, and tenants' shares: prefill seconds saved."""

from collections.abc import Iterator

from tables.read import of, report, table

_REPORT = "kv_retention"
_GROUPS = ("all", "agents", "chats", "one-shot", "scans")
_CASES = {
    "lru": "`lru`, nothing said",
    "seconds": "`seconds`, nothing said",
    "systems": "`seconds` told which blocks are system prompts",
    "names": "`seconds`, sessions named",
    "tools": "`seconds`, results of tools seen",
    "names-and-tools": "`seconds`, both",
    "priority-60s": "both, agents' priority 1 for 60 s",
}
_NEIGHBOURS = {"prompts": "one-shot prompts", "agents": "agents"}
_SHARES = ("1", "0.5", "0.25")


def _saved(kind: str, case: str, group: str, blocks: int) -> str:
    return of(_REPORT, f"{kind}_{case}_{group}_saved_percent_{blocks}_blocks", ".1f")


def _sizes() -> list[int]:
    return list(report(_REPORT)["config"].get("blocks", ()))


def _kinds() -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for case, said in _CASES.items():
            for blocks in _sizes()[:2]:
                yield [
                    said,
                    f"{blocks:,}",
                    *(_saved("mixture", case, group, blocks) for group in _GROUPS),
                ]

    return table(["prefill seconds saved, %", "blocks", *_GROUPS], rows())


def _tenants() -> Iterator[str]:
    """Chats beside each neighbour, and the neighbour in brackets."""

    def rows() -> Iterator[list[str]]:
        for blocks in _sizes():
            for policy in ("lru", "seconds"):
                alone = [_saved(kind, f"{policy}-1", "chats", blocks) for kind in ("alone", "alone-on-half")]
                for name, said in _NEIGHBOURS.items():
                    shared = [
                        f"{_saved(f'beside-{name}', f'{policy}-{share}', 'chats', blocks)}"
                        f" ({_saved(f'beside-{name}', f'{policy}-{share}', name, blocks)})"
                        for share in _SHARES
                    ]
                    yield [f"{blocks:,}", f"`{policy}`", said, ", ".join(alone), *shared]

    return table(
        [
            "blocks",
            "policy",
            "neighbour",
            "chats alone, and on half of the blocks",
            "no share",
            "`tenant_share` 0.5",
            "0.25",
        ],
        rows(),
    )


TABLES = {"kv-kinds": _kinds, "kv-tenants": _tenants}
