"""Subscribers to the KV events that running servers publish."""

from collections.abc import Callable, Sequence
from functools import partial

from penstock.core.hashing import DEFAULT_KEY
from penstock.core.types.instances import ModelCard, request_salt
from penstock.engine.kv_events.subscriber import KvEventSubscriber, Publish, PublisherAddress
from penstock.engine.kv_events.translator import SaltOf
from penstock.engine.openai.config import ServerConfig

Follow = Callable[[Publish], KvEventSubscriber]
"""Makes the subscriber to one server's KV events."""


def followed(
    config: ServerConfig,
    index: int,
    *,
    card: ModelCard,
    adapters: Sequence[str] = (),
    hash_key: bytes = DEFAULT_KEY,
) -> Follow | None:
    """Return a function that makes the subscriber to a server's KV events; None if the server publishes none.

    Args:
        config: where the servers publish.
        index: of the server in `url`.
        card: of the model, with its block size and salt.
        adapters: LoRA adapters whose blocks count.
        hash_key: the deployment's.

    Raises:
        ConfigError: the address is wrong, or pyzmq is missing; when the subscriber is made.
    """
    if not config.kv_events:
        return None
    replay = config.kv_events_replay[index] if config.kv_events_replay else None
    address = PublisherAddress(endpoint=config.kv_events[index], replay_endpoint=replay)
    return partial(_subscriber, address, card, salts_of(card, adapters), hash_key)


def _subscriber(
    address: PublisherAddress, card: ModelCard, salt_of: SaltOf, hash_key: bytes, publish: Publish
) -> KvEventSubscriber:
    return KvEventSubscriber(
        address, block_size=card.block_size, salt_of=salt_of, publish=publish, hash_key=hash_key
    )


def salts_of(card: ModelCard, adapters: Sequence[str]) -> SaltOf:
    """Return the function that finds a prompt's salt: the model card's or adapter's salt, then the client's `cache_salt`."""
    of_adapters = {name: card.adapted(name).salt for name in adapters}

    def salt_of(cache_salt: str | None, lora_name: str | None) -> bytes | None:
        salt = card.salt if lora_name is None else of_adapters.get(lora_name)
        return None if salt is None else request_salt(salt, cache_salt)

    return salt_of
