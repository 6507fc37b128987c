"""Writes examples/profiles from the reference tables in tests/data: `python tools/reference_profiles.py`."""

import json
from pathlib import Path
from typing import Any

from penstock.perf.profile import DecodePoint, PrefillPoint, Profile

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "tests" / "data" / "latency_tables.json"
PROFILES = ROOT / "examples" / "profiles"
SOURCE = "not measured here: estimates of aiconfigurator 0.12.0, a database of measured kernels, 2026-11-20"


def name_of(table: dict[str, Any]) -> str:
    size = "8b" if "8B" in table["model"] else "70b"
    return f"{size}-{table['system'].removesuffix('_sxm')}-{table['weights']}-tp{table['tp']}.json"


def profile_of(table: dict[str, Any]) -> Profile:
    """Turn a table in milliseconds into a profile."""
    decode = [(*map(int, cell.split("x")), ms / 1e3) for cell, ms in table["decode_ms"].items()]
    return Profile(
        engine=f"{table['model']}, {table['backend']}, weights {table['weights']}, tensor parallel {table['tp']}",
        prefill=tuple(
            PrefillPoint(new_tokens=int(n), seconds=ms / 1e3) for n, ms in table["prefill_ms"].items()
        ),
        decode=tuple(DecodePoint(batch=batch, context=context, seconds=s) for context, batch, s in decode),
        machine=f"{table['system']}; {SOURCE}",
        model=f"llama-3.1-{'8b' if '8B' in table['model'] else '70b'}",
        hardware=table["system"].removesuffix("_sxm"),
        tensor_parallel=table["tp"],
    )


def main() -> None:
    for table in json.loads(TABLES.read_text(encoding="utf-8")):
        profile_of(table).save(PROFILES / name_of(table))


if __name__ == "__main__":
    main()
