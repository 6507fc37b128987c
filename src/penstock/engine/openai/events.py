"""Sources of the KV events that servers publish: over ZeroMQ (vLLM, SGLang) or over HTTP (TensorRT-LLM)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from penstock.core.hashing import DEFAULT_KEY
from penstock.core.types.instances import ModelCard, request_salt
from penstock.engine.kv_events.polled import PolledKvEvents
from penstock.engine.kv_events.subscriber import KvEventSubscriber, Publish, PublisherAddress
from penstock.engine.kv_events.translator import SaltOf
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.connection import ServerConnection

POLLED_PATH = "/kv_cache_events"
"""Path at which TensorRT-LLM gives the events since the last request, to one reader."""
_POLL_TIMEOUT_S = 30.0
"""Longest seconds of one answer: the server waits 2 s for further events."""


class KvEventSource(Protocol):
    """Gives the KV events of one server, or of one of its data-parallel ranks, to a function."""

    async def run(self) -> None:
        """Follow the server until cancelled. It may start later, end and come again."""
        ...


Follow = Callable[[Publish], KvEventSource]
"""Makes the source of one server's KV events."""


def followed(
    config: ServerConfig,
    index: int,
    *,
    card: ModelCard,
    adapters: Sequence[str] = (),
    hash_key: bytes = DEFAULT_KEY,
    rank: int = 0,
) -> Follow | None:
    """Return a function that makes the source of a server's KV events; None if the server publishes none.

    Args:
        config: where the servers publish.
        index: of the server in `url`.
        card: of the model, with its block size and salt.
        adapters: LoRA adapters whose blocks count.
        hash_key: the deployment's.
        rank: the server's data-parallel rank.

    Raises:
        ConfigError: the address is wrong, or pyzmq is missing; when the source is made.
    """
    if not config.kv_events:
        return None
    endpoint = config.kv_events[index]
    salt_of, size = salts_of(card, adapters), card.block_size

    def subscriber(publish: Publish) -> KvEventSource:
        replay = config.kv_events_replay[index] if config.kv_events_replay else None
        address = PublisherAddress(endpoint=endpoint, replay_endpoint=replay)
        if rank:
            address = address.of_rank(rank)
        return KvEventSubscriber(
            address, block_size=size, salt_of=salt_of, publish=publish, hash_key=hash_key
        )

    def polled(publish: Publish) -> KvEventSource:
        connection = ServerConnection(endpoint.removesuffix(POLLED_PATH), config.limits, config.api_key())
        ask = partial(connection.post, POLLED_PATH, {}, timeout_s=_POLL_TIMEOUT_S)
        return PolledKvEvents(
            ask, block_size=size, salt_of=salt_of, publish=publish, close=connection.close, hash_key=hash_key
        )

    return polled if endpoint.startswith(("http://", "https://")) else subscriber


def salts_of(card: ModelCard, adapters: Sequence[str]) -> SaltOf:
    """Return the function that finds a prompt's salt: the model card's or adapter's salt, then the client's `cache_salt`."""
    of_adapters = {name: card.adapted(name).salt for name in adapters}

    def salt_of(cache_salt: str | None, lora_name: str | None) -> bytes | None:
        salt = card.salt if lora_name is None else of_adapters.get(lora_name)
        return None if salt is None else request_salt(salt, cache_salt)

    return salt_of
