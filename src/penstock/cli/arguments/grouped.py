"""The parser of `penstock` itself, whose help lists commands in groups."""

import argparse
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.cli.arguments.parser import Parser

_INDENT, _WIDTH = 15, 96


class GroupedParser(Parser):
    """A parser of commands; each is added within a `group`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.commands: Any = self.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
        self._groups: dict[str, list[str]] = {}

    @contextmanager
    def group(self, title: str) -> Iterator[Any]:
        """Give what commands are added to; those that are added within the block are listed under the title."""
        before = set(self.commands.choices)
        yield self.commands
        self._groups[title] = [name for name in self.commands.choices if name not in before]

    def format_help(self) -> str:
        """Format usage, description, and the commands by group with one line each."""
        said = {action.dest: action.help or "" for action in self.commands._choices_actions}
        lines = [f"usage: {self.prog} COMMAND ...\n", f"{self.description}"]
        for title, names in self._groups.items():
            lines.append(f"\n{title}:")
            lines += [_entry(name, said[name]) for name in names]
        lines.append("\nOptions:")
        options = (action for action in self._actions if action.option_strings)
        lines += [_entry(", ".join(action.option_strings), action.help or "") for action in options]
        lines.append(
            f"\n{self.prog} COMMAND --help says what a command takes; docs/README.md is the documentation."
        )
        return "\n".join(lines) + "\n"


def _entry(name: str, text: str) -> str:
    text = text.replace(argparse.SUPPRESS, "")
    head = f"  {name}".ljust(_INDENT)
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * _INDENT)
