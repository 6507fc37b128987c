"""`penstock completion`: scripts that complete commands and flags in a shell."""

import argparse
from collections.abc import Iterator

import shtab

from penstock.cli.parser import Parser

_SHELLS = ("bash", "zsh", "fish")
_ZSH = "(( $+functions[compdef] )) || { autoload -U +X compinit && compinit -i; }\n"
"""Defines compdef where no other setting has."""
_NAMES = {
    "--engine": ("paged", "mock", "vllm", "sglang", "trtllm", "openai"),
    "--policy": ("kv", "session", "least-loaded", "power-of-two", "round-robin", "random"),
}
"""Built-in names for flags that take others as well."""


def add_completion(parser: Parser) -> None:
    """Add the arguments of `penstock completion`."""
    parser.description = (
        "Print a completion script. bash: `source <(penstock completion bash)`, in ~/.bashrc to keep it; zsh likewise;"
        " fish: `penstock completion fish > ~/.config/fish/completions/penstock.fish`."
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.cli import make_parser  # noqa: PLC0415 - it has this command

    parser = make_parser()
    for _ in loaded(parser):
        pass
    script = shtab.complete(parser, options.shell)
    if options.shell == "zsh":  # to be sourced, where shtab's end is for a file in fpath
        script = _ZSH + script.partition("if [[ $zsh_eval_context")[0] + "compdef _shtab_penstock penstock\n"
    print(script)  # noqa: T201 - command output
    return 0


def loaded(parser: Parser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Parser]]:
    """Load a parser and those of its subcommands, for completion alone: built-in names become the choices of their flags.

    Yields:
        (the words of the command without `penstock`, its parser).
    """
    parser.load()
    yield path, parser
    for action in parser._actions:
        for flag in action.option_strings:
            action.choices = action.choices or _NAMES.get(flag)
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield from loaded(each, (*path, name))
