"""`penstock router`."""

import argparse
from typing import Any

from penstock.cli.arguments.flags import add_log_level, add_set, add_urls, url_settings

_FLAGS = {
    "--host": ("host", "HOST", "address to listen on (default 127.0.0.1)"),
    "--port": ("port", "P", "port to listen on; 0 takes a free one (default 8100)"),
    "--api-key-file": (
        "api_key_file",
        "FILE",
        "YAML file of tenants with hashes of API keys, as `penstock key` prints them; PENSTOCK_API_KEY adds a key",
    ),
    "--pool": ("pool", "NAME", "InferencePool of Kubernetes whose ready pods serve MODEL, instead of --url"),
    "--endpoint-picker-port": (
        "endpoint_picker.port",
        "P",
        "port where Envoy asks for endpoints over gRPC, as inference gateways of Kubernetes do (usually 9002; default: none)",
    ),
    "--policy": ("service.router.policy", "NAME", "routing policy (default kv)"),
    "--block-size": ("service.block_size", "N", "tokens in a block of the servers' caches (default 16)"),
}
_SERVERS = {"aggregated": "servers", "prefill": "prefill_servers", "decode": "decode_servers"}
"""Role: field of the settings."""


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "router",
        help="run the standalone router, for other gateways",
        description="Run the standalone router: an HTTP service that chooses a server for each request of another gateway."
        " See docs/router.md.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="of the running servers: a checkpoint's directory, or a hub name; needed with --url and --pool",
    )
    add_urls(parser)
    for flag, (place, metavar, text) in _FLAGS.items():
        parser.add_argument(flag, dest=place, metavar=metavar, help=text)
    add_set(parser, "set any other field, as service.router.predicted_s=60")
    add_log_level(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.deploy.commands.router import RouterCommandConfig, run_router  # noqa: PLC0415
    from penstock.graph import Overrides  # noqa: PLC0415

    overrides = Overrides(options.set)
    for flag, (place, _, _) in _FLAGS.items():
        if (value := getattr(options, place)) is not None:
            overrides.assign(place, value, flag=flag)
    for role, name, value, flag in url_settings(options):
        overrides.assign(f"{_SERVERS[role]}.{name}", value, flag=flag)
    if options.model is not None:
        overrides.assign("model", options.model, flag="MODEL")
    data = overrides.apply({})
    config = RouterCommandConfig.parse(data, source=lambda path: overrides.source_of(path, "router"))
    run_router(config, log_level=options.log_level)
    return 0
