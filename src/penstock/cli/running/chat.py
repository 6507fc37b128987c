"""`penstock chat`."""

import argparse
from typing import Any

from penstock.cli.arguments.flags import add_frontend, frontend_of
from penstock.core.errors import ConfigError


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "chat",
        help="chat with a served model in the terminal",
        description="Chat with a model of a running server. Answers are streamed, with the worker that gave them and what was cached."
        " See docs/operations.md.",
    )
    parser.add_argument(
        "question", nargs="?", metavar="QUESTION", help="ask this alone, and end; without it, chat"
    )
    add_frontend(parser)
    parser.add_argument("--model", metavar="NAME", help="the model (default: the server's first)")
    parser.add_argument("--system", default="", metavar="TEXT", help="begin the conversation with this text")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer at most")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError(f"--max-tokens: must be >= 1, got {options.max_tokens}")
    from penstock.deploy.commands.watching.chat import run_chat  # noqa: PLC0415

    run_chat(frontend_of(options), options.model, options.system, options.max_tokens, options.question)
    return 0
