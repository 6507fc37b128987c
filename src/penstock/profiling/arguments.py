"""What `penstock profile` takes; apart from what it does, so that `penstock --help` answers at once."""

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
    add("--hardware", metavar="NAME", help="what it runs on, such as h100 (default cpu for an engine)")
    add("--api-key", metavar="KEY", help="sent to a URL as a bearer token")
    add("--prompt-tokens", metavar="N,N", help="lengths of prompts to measure")
    add("--contexts", metavar="N,N", help="tokens of context to decode at, and of cached prefixes")
    add("--batches", metavar="N,N", help="sequences to decode at once")
    add("--repeats", type=int, metavar="N", help="measurements of each cell (default 7; 3 with --quick)")
    add(
        "--held-out",
        type=int,
        metavar="N",
        help="points kept back, of each kind (default 12; 6 with --quick)",
    )
    add("--max-seconds", type=float, metavar="S", help="measure no longer (default 900; 40 with --quick)")
    add(
        "--request-timeout",
        type=float,
        metavar="S",
        help="of a URL: it has stopped answering when one request takes longer (default 60)",
    )
    add("--quick", action="store_true", help="few cells, in less than a minute")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, order and points kept back (default 0)")
