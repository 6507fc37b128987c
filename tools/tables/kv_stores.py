"""How quickly KV blocks go to the host tier and the slot file and back, beside LMCache, memcpy and fio."""

from collections.abc import Callable, Iterator

from tables.read import figure, of, table, text

_SIZES = ("256_kib", "1024_kib")
_ROWS = (
    ("host tier, verified", "host", ()),
    ("one thread's memcpy", "memcpy", ("host",)),
    ("LMCache's CPU backend", "lmcache_host", ("host",)),
    ("slot file, verified", "disk", ()),
    ("fio, O_DIRECT", "fio", ("disk",)),
    ("LMCache's disk backend, O_DIRECT", "lmcache_disk_direct", ("disk",)),
    ("LMCache's disk backend, page cache", "lmcache_disk_buffered", ("disk",)),
)


def _lines() -> Iterator[list[str]]:
    for said, name, ours in _ROWS:
        cells = []
        for size in _SIZES:
            for way in ("store", "load"):
                speed = of("kv_stores", f"{name}_{way}_gb_per_s_{size}", ".2f")
                ratio = figure("kv_stores", f"{ours[0]}_{way}_over_{name}_{size}") if ours else None
                cells.append(speed if ratio is None else f"{speed} ({text(ratio, '.2f')})")
        yield [said, *cells]


def _table() -> Iterator[str]:
    head = ["GB/s", "store 256 KiB", "load 256 KiB", "store 1 MiB", "load 1 MiB"]
    return table(head, _lines())


TABLES: dict[str, Callable[[], Iterator[str]]] = {"kv-stores": _table}
