"""The bucket of a deployment, which several clients may create at once."""

import asyncio
import random
from typing import Any

import nats.js.errors
import pytest

from penstock.runtime.discovery.nats import NatsDiscovery
from penstock.runtime.handshake import Identity

OVERLAP = "subjects overlap with an existing stream"


class Client:
    """A client of a NATS whose bucket another client creates first: the server refuses this one's."""

    def __init__(self, *, is_created: bool) -> None:
        self.is_created = is_created
        self.looked = 0

    def jetstream(self, **_: Any) -> "Client":
        return self

    async def key_value(self, bucket: str) -> str:
        self.looked += 1
        if self.looked == 1 or not self.is_created:
            raise nats.js.errors.BucketNotFoundError
        return bucket

    async def create_key_value(self, **_: Any) -> str:
        raise nats.js.errors.BadRequestError(code=400, err_code=10065, description=OVERLAP)


def open_bucket(client: Client) -> Any:
    async def main() -> Any:
        identity = Identity(process="suite", secret=b"of the suite")
        discovery = NatsDiscovery(["nats://127.0.0.1:1"], identity, namespace="n", rng=random.Random(0))
        return await discovery._open_bucket(client)  # type: ignore[arg-type]

    return asyncio.run(main())


def test_a_bucket_that_another_client_creates_meanwhile_is_used() -> None:
    assert open_bucket(Client(is_created=True)) == "penstock_n"


def test_a_refusal_is_said_where_there_is_no_bucket_afterwards() -> None:
    with pytest.raises(nats.js.errors.BadRequestError, match=OVERLAP):
        open_bucket(Client(is_created=False))
