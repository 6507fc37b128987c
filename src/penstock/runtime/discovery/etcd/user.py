"""The user of an etcd with authentication: its token, asked for by the password, and again when etcd takes it no longer."""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.core.errors import ConfigError, Unavailable
from penstock.runtime.credentials import Credentials, Password

_REFUSED_TOKEN = ("user name is empty", "invalid auth token", "revision of auth store is old")
_UNAUTHENTICATED = 16
"""gRPC's code of a token that etcd does not take."""


class EtcdRefusal(Unavailable):
    """Etcd does not take the user, its password, or a call of it; it may, once an administrator has changed that."""


class EtcdUser:
    """The token of one client; etcd forgets it after minutes, and when it is started again. One event loop owns it."""

    def __init__(self, credentials: Credentials | None) -> None:
        """Ask for nothing yet: an etcd without authentication never wants to know.

        Raises:
            ConfigError: the account is none of etcd.
        """
        self._credentials = credentials
        self._lock = asyncio.Lock()
        self.token: str | None = None
        self._account()

    @property
    def headers(self) -> dict[str, str]:
        """Of each call."""
        return {} if self.token is None else {"Authorization": self.token}

    async def renew(
        self, refused: str | None, url: str, ask: Callable[[Password], Awaitable[str | None]]
    ) -> None:
        """Ask for another token than the one that was refused, unless another call has done so already.

        Args:
            refused: the token that etcd did not take; None where it asks for one.
            url: of the endpoint, for texts.
            ask: gives the token of a user by its password; None where etcd wants none.

        Raises:
            EtcdRefusal: no account is given, or etcd does not take it.
        """
        async with self._lock:
            if self.token != refused:
                return
            try:
                account = self._account()
            except ConfigError as error:
                raise EtcdRefusal(f"etcd at {url}: it asks for a user; {error.message}") from error
            if account is None:
                raise EtcdRefusal(
                    f"etcd at {url}: it asks for a user, and none is given; set {self.place} to USER:PASSWORD"
                )
            self.token = None  # with an expired one etcd refuses even to authenticate
            self.token = await ask(account)

    @property
    def place(self) -> str:
        """Where the account is given, for texts."""
        return "its credentials" if self._credentials is None else self._credentials.place

    def _account(self) -> Password | None:
        account = None if self._credentials is None else self._credentials.read()
        if account is not None and not isinstance(account, Password):
            raise ConfigError(
                f"{self.place}: has what only NATS takes; for etcd expected one line USER:PASSWORD"
            )
        return account


def is_token_refused(code: object, said: str) -> bool:
    """Whether etcd wants another token for a call, by gRPC's code and its text."""
    return code == _UNAUTHENTICATED or any(text in said for text in _REFUSED_TOKEN)
