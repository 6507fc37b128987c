"""Arguments of `penstock profile`, in a module with few imports, so that `penstock --help` is fast."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="ENGINE_OR_URL", help="paged or mock, or a URL such as http://127.0.0.1:8000")
    add("--out", type=Path, required=True, metavar="FILE", help="write the profile to this file (JSON)")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write the page of charts here (default beside --out, .html)",
    )
    add(
        "--model",
        metavar="M",
        help="of an engine: a checkpoint's directory or hub name (default: the demo model); of a URL: the name"
        " as listed there (default: the only one)",
    )
    add("--hardware", metavar="NAME", help="device type, such as h100 (default cpu for an engine)")
    add("--api-key", metavar="KEY", help="sent to a URL as a bearer token")
    add("--prompt-tokens", metavar="N,N", help="prompt lengths to measure")
    add("--contexts", metavar="N,N", help="context lengths of decode cells and of cached prefixes")
    add("--batches", metavar="N,N", help="sequences to decode at once")
    add("--repeats", type=int, metavar="N", help="measurements of each cell (default 7; 3 with --quick)")
    add(
        "--held-out",
        type=int,
        metavar="N",
        help="held-out points of each kind (default 12; 6 with --quick)",
    )
    add(
        "--max-seconds",
        type=float,
        metavar="S",
        help="longest time of the measurement (default 900; 40 with --quick)",
    )
    add(
        "--request-timeout",
        type=float,
        metavar="S",
        help="of a URL: it has stopped answering when one request takes longer (default 60)",
    )
    add("--quick", action="store_true", help="few cells, in less than a minute")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of prompts, order and held-out points (default 0)",
    )
