"""The argument parser of all commands."""

import argparse
from typing import Any, NoReturn

from penstock.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting, and suggests the nearest flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def load(self) -> None:
        """Add the arguments that come with a late import, if there are such."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
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
