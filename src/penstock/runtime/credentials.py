"""The account of a registry of another maker: in a file or a variable, so that no graph and no manifest has it."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.errors import ConfigError

REGISTRY_VARIABLE = "PENSTOCK_REGISTRY_CREDENTIALS"
EVENTS_VARIABLE = "PENSTOCK_EVENT_CREDENTIALS"
_EXPECTED = (
    "expected one line USER:PASSWORD or, for NATS, a token, an nkey's seed or the text of a .creds file"
)
_SEED = r"SUA[A-P][A-Z2-7]{54}"
_CREDS = re.compile(
    rf"-+BEGIN NATS USER JWT-+\s+(\S+)\s+-+END NATS USER JWT-+.*?-+BEGIN USER NKEY SEED-+\s+({_SEED})\s+-+END USER NKEY SEED-+",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Password:
    """A user and its password."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Token:
    """A token of NATS."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Nkey:
    """The private key of a user of NATS, and the JWT of its account, if it has one."""

    seed: str = field(repr=False)
    jwt: str | None = field(default=None, repr=False)


Account = Password | Token | Nkey


class Credentials:
    """Where an account is given. It is read for each connection, so that a changed file needs no restart."""

    def __init__(self, path: str | None, *, field: str, variable: str) -> None:
        """Read it once, so that a mistake is said at the start.

        Args:
            path: of the file; None for the variable.
            field: of the graph, which names the file, for texts.
            variable: of the environment, which counts without a file.

        Raises:
            ConfigError: the file cannot be read, or has no account.
        """
        self._path = path
        self._field = field
        self._variable = variable
        self.read()

    @property
    def place(self) -> str:
        """Where it can be given, for texts."""
        return f"{self._field} or {self._variable}"

    def read(self) -> Account | None:
        """Give the account as it is now; None where none is given.

        Raises:
            ConfigError: the file cannot be read, or has no account; its content is not shown.
        """
        given = given_text(self._path, field=self._field, variable=self._variable, expected=_EXPECTED)
        return None if given is None else _parse(*given)


def given_text(path: str | None, *, field: str, variable: str, expected: str) -> tuple[str, str] | None:
    """Read what is kept out of a graph, from its file or, without one, from a variable.

    Args:
        path: of the file.
        field: of the graph, which names the file.
        variable: of the environment.
        expected: for the text of an error.

    Returns:
        where it was found, and the text; None without a file and a variable.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        text = os.environ.get(variable, "")
        return (variable, text) if text.strip() else None
    source = f"{field}: {path}"
    try:
        return source, Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 text; {expected}") from error


def _parse(source: str, text: str) -> Account:
    if "BEGIN " in text:
        if (found := _CREDS.search(text)) is None:
            raise ConfigError(
                f"{source}: begins as a .creds file, and lacks a user's JWT or its seed; expected both, as `nsc generate creds` writes them"
            )
        return Nkey(seed=found[2], jwt=found[1])
    line = text.strip("\r\n")
    if not line.strip() or "\n" in line:
        raise ConfigError(f"{source}: has {len(text.splitlines())} lines; {_EXPECTED}")
    if re.fullmatch(_SEED, line):
        return Nkey(line)
    if ":" not in line:
        return Token(line)
    user, _, password = line.partition(":")
    if not user or not password:
        raise ConfigError(f"{source}: has no {'password' if user else 'user'}; {_EXPECTED}")
    return Password(user, password)
