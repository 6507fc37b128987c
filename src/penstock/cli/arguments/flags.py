"""Flags shared by several commands."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.deploy.control.frontend_address import FrontendAddress


def add_set(parser: Any, text: str) -> None:
    """Add the repeatable flag `--set K=V`.

    Args:
        parser: the command's parser.
        text: help text.
    """
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help=text)


def add_frontend(parser: Any, server: str = "") -> None:
    """Add `--url`, `--name` and `--part`, which choose the frontend that the command talks to; `frontend_of` finds it.

    Args:
        parser: the command's parser.
        server: what else than a deployment it can talk to.
    """
    parser.add_argument(
        "--url",
        metavar="URL",
        help=f"URL of a frontend{server} (default: of your deployment that runs on this host; where none does,"
        " http://127.0.0.1:8000)",
    )
    add_deployment(parser)


def frontend_of(options: argparse.Namespace) -> "FrontendAddress":
    """Find the frontend that the flags of `add_frontend` name.

    Raises:
        ConfigError: several deployments fit, or `--url` is no URL.
        Unavailable: none fits.
    """
    from penstock.deploy.control.deployments import find_frontend  # noqa: PLC0415

    return find_frontend(options.url, name=options.name, part=options.part)


def add_deployment(parser: Any, *, has_url: bool = False) -> None:
    """Add what chooses one of several deployments of this host: `--name`, `--part`, and `--url` where the command takes it."""
    parser.add_argument("--name", metavar="NAME", help="the deployment's name, where several run")
    parser.add_argument(
        "--part",
        metavar="PART",
        help="where parts of one deployment run: what --run of penstock up said, all without it, or the pid of penstock ps",
    )
    if has_url:
        parser.add_argument("--url", metavar="URL", help="the deployment's URL, where several run")


def add_log_level(parser: Any) -> None:
    """Add `--log-level`."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="log on stderr (default warning); debug has each routing decision, for `penstock explain --replay`",
    )


URL_FLAGS = {
    "--url": (
        "aggregated",
        "a running server, such as http://host:8000, as a worker; may be repeated (--engine openai)",
    ),
    "--prefill-url": ("prefill", "a running vLLM or SGLang as a prefill worker; may be repeated"),
    "--decode-url": ("decode", "a running vLLM or SGLang as a decode worker; may be repeated"),
}
"""Flag: (role, help)."""
EVENT_FLAGS = {
    "--kv-events": (
        "kv_events",
        "where each --url publishes KV events, such as tcp://host:5557, or without --url each --prefill-url; without, they are guessed",
    ),
    "--kv-events-replay": ("kv_events_replay", "where the same servers send KV events again"),
}
"""Flag: (argument of the engine `openai`, help)."""


def add_urls(parser: argparse.ArgumentParser) -> None:
    """Register the flags."""
    for flag, (name, text) in EVENT_FLAGS.items():
        parser.add_argument(flag, dest=name, action="append", default=[], metavar="ADDRESS", help=text)
    for flag, (role, text) in URL_FLAGS.items():
        parser.add_argument(flag, dest=f"{role}_urls", action="append", default=[], metavar="URL", help=text)


def url_settings(options: argparse.Namespace) -> Iterator[tuple[str, str, Any, str]]:
    """Yield (role, argument of the engine `openai`, value, flag) of each flag that was given."""
    for flag, (role, _) in URL_FLAGS.items():
        if urls := getattr(options, f"{role}_urls"):
            yield role, "url", urls, flag
    followed = "prefill" if options.prefill_urls and not options.aggregated_urls else "aggregated"
    for flag, (name, _) in EVENT_FLAGS.items():
        if endpoints := getattr(options, name):
            yield followed, name, endpoints, flag
