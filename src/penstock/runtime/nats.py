"""A connection to NATS that is given up at every failure and made again.

The client's own reconnects are off: they would keep old subscriptions and unsent messages alive beside the new ones.
"""

import asyncio
import importlib.util
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

import nats.errors
from nats.aio.client import Client, RawCredentials

from penstock.core.errors import ConfigError, PenstockError, Unavailable
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.credentials import Account, Credentials, Nkey, Password, Token
from penstock.runtime.tls import PlaneTlsConfig, registry_contexts

ERRORS = (nats.errors.Error, OSError, TimeoutError, ValueError)
"""What calls of the client raise where NATS does not do as asked."""
_REFUSALS = (
    "authorization violation",
    "authentication expired",
    "authentication revoked",
    "permissions violation",
)
"""What a server says to an account that it does not take, or that may not do what it asks."""
T = TypeVar("T")


async def uncancelled(call: Awaitable[T]) -> T:
    """Await a call of the client. Where it has swallowed a cancellation of this task, raise that.

    The client turns a cancellation that comes with a call's answer, or while it flushes, into a normal return.
    """
    task = asyncio.current_task()
    assert task is not None, "it awaits"
    earlier = task.cancelling()  # a TaskGroup may leave its own count behind
    result = await call
    if task.cancelling() > earlier:
        raise asyncio.CancelledError
    return result


class NatsConnection(Generic[T]):
    """Connects to NATS again and again, and runs what uses each connection. One event loop owns it."""

    def __init__(
        self,
        urls: Sequence[str],
        opening: Callable[[Client], Awaitable[T]],
        *,
        needs: str,
        rng: random.Random,
        tls: PlaneTlsConfig | None,
        credentials: Credentials | None = None,
        config: DiscoveryConfig,
    ) -> None:
        """Connect to nothing yet.

        Args:
            urls: servers, `nats://HOST:4222` or tls.
            opening: opens on a new connection what is used, such as a bucket.
            needs: what the server must be started as, for the text of errors.
            rng: for jitter.
            tls: certificates for `tls://`.
            credentials: of the account, where NATS asks for one.
            config: bounds and times.

        Raises:
            ConfigError: a certificate cannot be read, or the account needs a package that is not there.
        """
        self.last_error = "it does not answer"
        self.on_error: Callable[[Exception], None] = lambda _error: None
        """Called with what the client notices by itself, such as messages that nobody reads."""
        self._is_closed = False
        self._urls = list(urls)
        self._opening = opening
        self._needs = needs
        self._rng = rng
        self._contexts = registry_contexts(tls) if any(url.startswith("tls:") for url in urls) else None
        self._credentials = credentials
        self._config = config
        self._account()

    @property
    def place(self) -> str:
        """The servers."""
        return ", ".join(url.removeprefix("nats://") for url in self._urls)

    def close(self) -> None:
        """Make no connection any more; whoever runs `keep` cancels it then."""
        self._is_closed = True

    async def keep(
        self, parts: Callable[[T], Sequence[Coroutine[Any, Any, None]]], *, on_lost: Callable[[bool], None]
    ) -> None:
        """Keep a connection until this is cancelled, after `close`: the end of a connection may swallow the cancellation.

        Args:
            parts: run on each connection, together; the end of one by an error is the end of the connection.
            on_lost: called when there is no connection, with whether this is the first failure since the last one.
        """
        tries = 0
        while True:
            try:
                async with self.connected() as (closed, opened):
                    tries = 0
                    async with asyncio.TaskGroup() as group:
                        group.create_task(_until_closed(closed))
                        for part in parts(opened):
                            group.create_task(part)
            except* (*ERRORS, PenstockError) as errors:
                error = errors.exceptions[0]
                self.last_error = str(error) or type(error).__name__
            if self._is_closed:
                return
            on_lost(tries == 0)
            await asyncio.sleep(self._config.retry_delay_s(tries, self._rng))
            tries += 1

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.Future[None], T]]:
        """Connect; gives a future that ends with the connection, and what was opened on it.

        Raises:
            Unavailable: not in time, or what was to be opened is not there.
            ConfigError: the server does not take the account, or does not let it do what it asks.
        """
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def on_closed() -> None:
            if not closed.done():
                closed.set_result(None)

        noticed = ""

        async def on_error(error: Exception) -> None:
            nonlocal noticed
            self.last_error = noticed = str(error) or type(error).__name__
            self.on_error(error)

        client = Client()
        timeout_s = self._config.connect_timeout_s
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await uncancelled(
                        client.connect(
                            self._urls,
                            allow_reconnect=False,
                            connect_timeout=max(1, int(timeout_s)),
                            error_cb=on_error,
                            closed_cb=on_closed,
                            ping_interval=max(1, int(self._config.lease_ttl_s / 3)),
                            max_outstanding_pings=2,
                            tls=None if self._contexts is None else self._contexts(),
                            **_options(self._account()),
                        )
                    )
                    opened = await uncancelled(self._opening(client))
            except ERRORS as error:
                self._raise_refusal(error, noticed)
                raise Unavailable(
                    f"NATS at {self.place}: {str(error) or self.last_error}; waited up to {timeout_s:g} s:"
                    f" is nats-server running{self._needs}?"
                ) from error
            yield closed, opened
        finally:
            with suppress(*ERRORS):
                async with asyncio.timeout(timeout_s):
                    await uncancelled(client.close())

    def _account(self) -> Account | None:
        account = None if self._credentials is None else self._credentials.read()
        if isinstance(account, Nkey) and importlib.util.find_spec("nkeys") is None:
            raise ConfigError(
                f"{self._account_place}: an nkey needs the package nkeys: pip install 'penstock-llm[nats]'"
            )
        return account

    @property
    def _account_place(self) -> str:
        return "its credentials" if self._credentials is None else self._credentials.place

    def _raise_refusal(self, error: Exception, noticed: str) -> None:
        """Say it in another way where the server did not take the account: to wait does not help.

        Raises:
            ConfigError: that is so, by a call's error or by what the client noticed meanwhile.
        """
        said = next(
            (text for text in (str(error), noticed) if any(each in text.lower() for each in _REFUSALS)),
            None,
        )
        if said is not None:
            raise ConfigError(
                f"NATS at {self.place}: {said}; expected an account that it takes in {self._account_place}: USER:PASSWORD, a token,"
                " an nkey's seed or the text of a .creds file, with the right to use JetStream and subjects penstock.>"
            ) from error


def _options(account: Account | None) -> dict[str, Any]:
    """Give what the client is told of an account."""
    match account:
        case None:
            return {}
        case Password(user, password):
            return {"user": user, "password": password}
        case Token(token):
            return {"token": token}
        case Nkey(seed, None):
            return {"nkeys_seed_str": seed}
        case Nkey(seed, jwt):
            return {"user_credentials": RawCredentials(_CREDS.format(jwt=jwt, seed=seed))}


_CREDS = """\
-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


async def _until_closed(closed: asyncio.Future[None]) -> None:
    """Wait for the end of the connection.

    Raises:
        Unavailable: it has ended.
    """
    await closed
    raise Unavailable("NATS: the connection ended")
