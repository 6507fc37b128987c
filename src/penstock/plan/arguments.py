"""Arguments of `penstock plan`, in a module with few imports, so that `penstock --help` is fast."""

import argparse
from pathlib import Path

_FORMATS = {
    "--weight-dtype": "number format of the weights, such as fp8 (default: the checkpoint's)",
    "--expert-dtype": "number format of routed experts (default: that of the weights)",
    "--kv-dtype": "number format of the KV cache (default: that of the weights, or fp8 where they are narrower)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a known shape, such as llama-3.1-70b, or a directory with a config.json",
    )
    add("--hardware", required=True, metavar="NAME", help="device type, such as h100")
    add("--gpus", type=int, required=True, metavar="N", help="how many there are")
    add("--isl", type=int, required=True, metavar="N", help="prompt tokens of a request")
    add("--osl", type=int, required=True, metavar="N", help="tokens of its answer")
    add(
        "--slo-ttft",
        type=float,
        required=True,
        metavar="S",
        help="target for the time to the first token, in seconds",
    )
    add(
        "--slo-itl",
        type=float,
        required=True,
        metavar="S",
        help="target for the mean time between tokens, in seconds",
    )
    add(
        "--percentile",
        type=float,
        default=90.0,
        metavar="P",
        help="share of requests that must meet each target, in percent (default 90)",
    )
    for flag, text in _FORMATS.items():
        add(flag, default="auto", metavar="F", help=text)
    add("--out", type=Path, metavar="GRAPH", help="write the best deployment to this file, as a graph")
    add(
        "--plot",
        type=Path,
        metavar="OUT",
        help="write a page that charts tokens/s per user against tokens/s per GPU; it opens offline",
    )
    add("--json", type=Path, metavar="OUT", help="write all results to this file, as JSON")
