"""`penstock completion`: scripts that complete commands and flags in a shell, made from the parser."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.cli.arguments.parser import Parser

_SHELLS = ("bash", "zsh", "fish")
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U +X compinit && compinit -i; }
autoload -U +X bashcompinit && bashcompinit
"""


_NAMES = {
    "--engine": ("paged", "mock", "vllm", "sglang", "trtllm", "openai"),
    "--policy": ("kv", "session", "least-loaded", "power-of-two", "round-robin", "random"),
}
"""Built-in names for flags that take others as well."""


@dataclass(slots=True)
class Node:
    """What may follow a command.

    path:     its words, without `penstock`
    commands: subcommands with their help
    flags:    flags with their help
    values:   of flags that take one of a few values, or have built-in ones
    """

    path: tuple[str, ...]
    commands: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)


def adder(make_parser: Callable[[], Parser]) -> Callable[[Any], None]:
    """Give what registers the subcommand; `make_parser` makes the parser of all commands."""

    def run(options: argparse.Namespace) -> int:
        nodes = list(nodes_of(make_parser()))
        made = _fish(nodes) if options.shell == "fish" else _bash(nodes)
        print((_ZSH if options.shell == "zsh" else "") + made, end="")  # noqa: T201 - command output
        return 0

    def add(commands: Any) -> None:
        parser = commands.add_parser(
            "completion",
            help="print a script that completes commands and flags in a shell",
            description="Print a completion script. bash: `source <(penstock completion bash)`, in ~/.bashrc to keep it; zsh likewise;"
            " fish: `penstock completion fish > ~/.config/fish/completions/penstock.fish`.",
        )
        parser.add_argument("shell", choices=_SHELLS, help="the shell")
        parser.set_defaults(run=run)

    return add


def nodes_of(parser: Parser, path: tuple[str, ...] = ()) -> Iterator[Node]:
    """Walk a parser and those of its subcommands."""
    node = Node(path)
    parser.load()
    inner: dict[str, Parser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = dict(action.choices)
            node.commands = {each.dest: each.help or "" for each in action._choices_actions}
            continue
        for flag in action.option_strings:
            if flag.startswith("--"):
                node.flags[flag] = action.help or ""
                if values := action.choices or _NAMES.get(flag):
                    node.values[flag] = tuple(map(str, values))
    yield node
    for name, each in inner.items():
        yield from nodes_of(each, (*path, name))


def _bash(nodes: list[Node]) -> str:
    parents = [f'"{" ".join(node.path[:-1])}:{node.path[-1]}"' for node in nodes if node.path]
    words = [
        f'    "{" ".join(node.path)}") words="{" ".join([*node.commands, *node.flags])}" ;;' for node in nodes
    ]
    values = [
        f'    "{" ".join(node.path)}:{flag}") words="{" ".join(choices)}" ;;'
        for node in nodes
        for flag, choices in node.values.items()
    ]
    return "\n".join(
        [
            "_penstock() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" path="" words="" word',
            '  for word in "${COMP_WORDS[@]:1:$((COMP_CWORD-1))}"; do',
            '    case "$path:$word" in',
            f'      {"|".join(parents)}) path="${{path:+$path }}$word" ;;',
            "    esac",
            "  done",
            '  case "$path" in',
            *words,
            "  esac",
            '  case "$path:$prev" in',
            *values,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "}",
            "complete -o default -F _penstock penstock\n",
        ]
    )


def _fish(nodes: list[Node]) -> str:
    lines = []
    for node in nodes:
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in node.path)
        if not node.path:
            seen = "__fish_use_subcommand"
        elif node.commands:
            seen += f"; and not __fish_seen_subcommand_from {' '.join(node.commands)}"
        start = f"complete -c penstock -n {_quoted(seen)}"
        lines += [f"{start} -f -a {name} -d {_quoted(text)}" for name, text in node.commands.items()]
        for flag, text in node.flags.items():
            values = f" -x -a {_quoted(' '.join(node.values[flag]))}" if flag in node.values else ""
            lines.append(f"{start} -l {flag[2:]}{values} -d {_quoted(text)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
