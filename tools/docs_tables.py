"""Writes every table and picture of figures in README.md and docs from benchmarks/results: `python tools/docs_tables.py`.

A table stands between `<!-- table NAME: made by tools/docs_tables.py -->` and `<!-- end of table -->`; the modules of `tools/tables` say
what is in it, and `tools/tables/pictures.py` what draws `docs/*.svg`. `--check` writes nothing, and ends with 1 where a page or a
picture differs from its JSON.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tables import (
    deployments,
    disagg,
    eviction,
    hosts,
    kv_prefetch,
    kv_retention,
    kv_stores,
    placements,
    planner,
    policies,
    readme,
    regions,
    results,
    scale,
    tenants,
)

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for `benchmarks`

from tables import recipes  # noqa: E402 - it asks `benchmarks`
from tables.pictures import PICTURES  # noqa: E402 - it draws with `benchmarks`

END = "<!-- end of table -->"
_TABLE = re.compile(rf"<!-- table ([\w-]+): made by tools/docs_tables.py -->\n.*?{END}", re.DOTALL)

TABLES: dict[str, Callable[[], Iterator[str]]] = (
    readme.TABLES
    | results.TABLES
    | disagg.TABLES
    | kv_prefetch.TABLES
    | kv_retention.TABLES
    | kv_stores.TABLES
    | placements.TABLES
    | planner.TABLES
    | policies.TABLES
    | deployments.TABLES
    | eviction.TABLES
    | hosts.TABLES
    | recipes.TABLES
    | regions.TABLES
    | scale.TABLES
    | tenants.TABLES
)
"""What makes each table, line by line, by its name."""


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def names_in(text: str) -> list[str]:
    return [match[1] for match in _TABLE.finditer(text)]


def render(text: str) -> str:
    """Give a page with its tables as the JSON has them now."""
    return _TABLE.sub(lambda match: make(match[1]), text)


def make(name: str) -> str:
    """Make one table, its markers included.

    Raises:
        KeyError: nothing makes a table of that name.
    """
    lines = "\n".join(TABLES[name]())
    return f"<!-- table {name}: made by tools/docs_tables.py -->\n{lines}\n{END}"


def main() -> int:
    stale = []
    files = [(page, render) for page in pages()]
    files += [(ROOT / "docs" / name, lambda _, draw=draw: draw()) for name, draw in PICTURES.items()]
    for page, make_again in files:
        text = page.read_text(encoding="utf-8")
        made = make_again(text)
        if made != text:
            stale.append(page.relative_to(ROOT))
            if "--check" not in sys.argv:
                page.write_text(made, encoding="utf-8")
    for page in stale:
        print(f"{page}: {'differs from benchmarks/results' if '--check' in sys.argv else 'written'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
