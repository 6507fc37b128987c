"""Makes the engine of one worker from the deployment's settings."""

from collections.abc import Callable
from functools import partial

from penstock.core.errors import ConfigError
from penstock.core.types.cards import ModelCard
from penstock.core.types.instances import Role
from penstock.engine.kv_events.subscriber import KvEventSubscriber, Publish, PublisherAddress
from penstock.engine.kv_events.translator import SaltOf
from penstock.engine.openai.apis.api import CLIENT_SALT
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.engine import ServerEngine, Serving
from penstock.engine.openai.paired import PairedServerEngine
from penstock.engine.openai.server import Server
from penstock.engine.openai.text import TextCodec
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.spec import EngineSpec

_RUNNING_REQUESTS = 256
_BATCH_TOKENS = 8192
"""vLLM's defaults for a server on most GPUs; routers price prompts and fill workers by them."""


def make_engine(spec: EngineSpec) -> ServerEngine:
    """Make the engine of the worker `spec.index`, which has the server at this place of `url`.

    Raises:
        ConfigError: an argument is wrong, or there are fewer servers than workers.
    """
    config = ServerConfig.parse(dict(spec.args), source="engine openai")
    if spec.index >= len(config.url):
        raise ConfigError(
            f"engine openai: worker {spec.index + 1} has no server, as url names {len(config.url)}; name one for each worker"
        )
    if spec.context_length is None:
        raise ConfigError("context_length: must be given for engine openai")
    codec = TextCodec.open(spec.model)
    server = Server(config.url[spec.index], config, (*spec.model_names, spec.model), codec)
    serving = Serving(
        block_size=spec.block_size,
        context_length=spec.context_length,
        vocab_size=max(spec.vocab_size, codec.vocab_size),
        eos_token_ids=spec.eos_token_ids,
        kv_blocks=spec.kv_blocks,
        max_running_requests=_chosen(spec.scheduler, "max_running_requests", _RUNNING_REQUESTS),
        max_waiting_requests=spec.scheduler.max_waiting_requests,
        max_batch_tokens=_chosen(spec.scheduler, "max_batch_tokens", _BATCH_TOKENS),
        follow=_follower(spec, config),
    )
    kind = ServerEngine if spec.role is Role.AGGREGATED else PairedServerEngine
    return kind(server, config, serving)


def _follower(spec: EngineSpec, config: ServerConfig) -> Callable[[Publish], KvEventSubscriber] | None:
    """Return a function that makes the subscriber to the server's KV events; None if the server publishes none.

    Raises:
        ConfigError: the address is wrong, or pyzmq is missing.
    """
    if not config.kv_events:
        return None
    replay = config.kv_events_replay[spec.index] if config.kv_events_replay else None
    address = PublisherAddress(endpoint=config.kv_events[spec.index], replay_endpoint=replay)
    return partial(_subscriber, spec, address)


def _subscriber(spec: EngineSpec, address: PublisherAddress, publish: Publish) -> KvEventSubscriber:
    return KvEventSubscriber(
        address, block_size=spec.block_size, salt_of=_salts(spec), publish=publish, hash_key=spec.hash_key
    )


def _salts(spec: EngineSpec) -> SaltOf:
    """Return the function that finds a prompt's salt: the model card's or adapter's salt, then the client's `cache_salt`."""
    card = spec.card or ModelCard(name="", context_length=1, block_size=spec.block_size, salt=b"")
    adapters = {name: card.adapted(name).salt for name in spec.adapters}

    def salt_of(cache_salt: str | None, lora_name: str | None) -> bytes | None:
        salt = card.salt if lora_name is None else adapters.get(lora_name)
        return salt if salt is None or cache_salt is None else salt + CLIENT_SALT + cache_salt.encode()

    return salt_of


def _chosen(scheduler: SchedulerConfig, name: str, usual: int) -> int:
    """Return a limit that the graph sets, else the usual one of servers, which is higher than that of Penstock's engines."""
    chosen: int = getattr(scheduler, name)
    return usual if chosen == SchedulerConfig.model_fields[name].default else chosen
