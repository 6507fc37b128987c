"""The parser of all commands, and the flags that several of them have."""

import argparse
import importlib
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.deploy.control.local_connector import FrontendAddress


_INDENT, _WIDTH = 15, 96


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting, and suggests the nearest flag."""

    def __init__(self, *, loader: "Callable[[Parser], None] | None" = None, **kwargs: Any) -> None:
        """Make a parser.

        Args:
            loader: adds the arguments when they are needed first, so that `penstock --help` imports no command.
            kwargs: of ArgumentParser.
        """
        super().__init__(allow_abbrev=False, **kwargs)
        self._loader = loader

    def load(self) -> None:
        """Add the arguments, unless that is done."""
        if (loader := self._loader) is not None:
            self._loader = None
            loader(self)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self.load()
        options, unknown = super().parse_known_args(args, namespace)
        if not unknown:
            return options, unknown
        from penstock.core.config import closest  # noqa: PLC0415

        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        close = closest(word.lstrip("-"), flags)
        hint = f"; did you mean '--{close}'?" if close else f"; see {self.prog} --help"
        raise ConfigError(f"{self.prog}: unknown flag {word}{hint}")


class GroupedParser(Parser):
    """The parser of `penstock` itself, whose help lists the commands in groups."""

    def __init__(self, groups: Mapping[str, Mapping[str, tuple[str, str]]], **kwargs: Any) -> None:
        """Make the parsers of all commands.

        Args:
            groups: title, then command, then (the function that adds its arguments, as module:function; help text).
            kwargs: of Parser.
        """
        super().__init__(**kwargs)
        self._groups = groups
        commands = self.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
        for group in groups.values():
            for name, (place, text) in group.items():
                commands.add_parser(name, help=text, loader=partial(_load, place))

    def format_help(self) -> str:
        """Format usage, description, and the commands by group with one line each."""
        lines = [f"usage: {self.prog} COMMAND ...\n", f"{self.description}"]
        for title, group in self._groups.items():
            lines.append(f"\n{title}:")
            lines += [_entry(name, text) for name, (_, text) in group.items()]
        lines.append("\nOptions:")
        options = (action for action in self._actions if action.option_strings)
        lines += [_entry(", ".join(action.option_strings), action.help or "") for action in options]
        lines.append(
            f"\n{self.prog} COMMAND --help says what a command takes; docs/README.md is the documentation."
        )
        return "\n".join(lines) + "\n"


def _load(place: str, parser: Parser) -> None:
    module, _, function = place.partition(":")
    getattr(importlib.import_module(module), function)(parser)


def _entry(name: str, text: str) -> str:
    head = f"  {name}".ljust(_INDENT)
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * _INDENT)


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
    from penstock.deploy.control.local_connector import find_frontend  # noqa: PLC0415

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
