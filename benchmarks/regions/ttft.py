"""What TTFT a request to another region adds, 80 ms away: over connections that are kept, and over a new one for each request."""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from penstock.bench.report import Report
from tests.support.cable import bad_cable
from tests.support.certificates import make_authority, make_certificate
from tests.support.host import Host

_ROUND_TRIP_S = 0.08
_COUNT, _QUICK_COUNT = 12, 2
_LENGTHS = (32, 4000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"of each way and length (default {_COUNT})"
    )


def run(options: argparse.Namespace) -> Report:
    count = options.requests or (_QUICK_COUNT if options.quick else _COUNT)
    samples: dict[str, list[float]] = {}
    for scheme in ("http", "https"):
        samples |= {f"{scheme}_{name}_s": taken for name, taken in _measure(scheme, count).items()}
    return Report(
        name="regions_ttft",
        config={"round_trip_s": _ROUND_TRIP_S, "requests": count, "prompt_tokens": list(_LENGTHS)},
        figures=added_s(samples),
        samples=samples,
        limits={"round_trip_s": _ROUND_TRIP_S},
    )


def added_s(samples: dict[str, list[float]]) -> dict[str, float]:
    """Give what the way adds: the least TTFT from afar over the least beside the frontend. Other work on the machine moves medians by more."""
    return {
        f"{scheme}_{tokens}_{way}_added_s": round(
            min(samples[f"{scheme}_far_{tokens}_{way}_s"]) - min(samples[f"{scheme}_near_{tokens}_kept_s"]), 5
        )
        for scheme in ("http", "https")
        for tokens in _LENGTHS
        for way in ("kept", "fresh")
    }


def _measure(scheme: str, count: int) -> dict[str, list[float]]:
    """Ask a region of one mock worker from its own host (`near`), and from another 80 ms away (`far`)."""
    with tempfile.TemporaryDirectory() as name, bad_cable() as laid, ExitStack() as stack:
        folder, address = Path(name), laid.addresses[1]
        (folder / "graph.yaml").write_text("model: demo\n")
        settings = ["frontend.host=0.0.0.0", "roles.aggregated.engine=mock"]
        authority = ""
        if scheme == "https":
            authority = str(make_authority(folder, "authority"))
            pair = make_certificate(folder, "host", Path(authority), address=address)
            settings.append(f"frontend.tls={{certificate: {pair.certificate}, key: {pair.key}}}")
        host = Host(laid.names[1], folder / "host", stack)
        host.up(str(folder / "graph.yaml"), *(word for each in settings for word in ("--set", each)))
        host.wait(r"^penstock +ready")
        laid.carry(delay_s=_ROUND_TRIP_S / 2)
        found: dict[str, list[float]] = {}
        for place, namespace in (("near", laid.names[1]), ("far", laid.names[0])):
            words = ("ip", "netns", "exec", namespace, sys.executable, "-m", "benchmarks.regions.asker")
            told = (f"{scheme}://{address}:8000", authority, str(count), *map(str, _LENGTHS))
            done = subprocess.run([*words, *told], check=True, capture_output=True, text=True)
            found |= {f"{place}_{name}": taken for name, taken in json.loads(done.stdout).items()}
        return found
