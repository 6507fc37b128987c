"""Makes the engine of one worker from the deployment's settings."""

from dataclasses import replace

from penstock.core.errors import ConfigError
from penstock.core.hashing import root_hash
from penstock.core.types.instances import ModelCard, Role
from penstock.core.types.kv import pack_root
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.engine import ServerEngine, Serving
from penstock.engine.openai.events import followed
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
    config = ServerConfig.parse(dict(spec.args), source="engine openai").of_server(spec.index)
    codec = TextCodec.open(spec.model)
    server = Server(config.url[0], config, (*spec.model_names, spec.model), codec, role=spec.role)
    follow = followed(
        config,
        0,
        card=spec.card or ModelCard(name="", context_length=1, block_size=spec.block_size, salt=b""),
        adapters=spec.adapters,
        hash_key=spec.hash_key,
    )
    kind = ServerEngine if spec.role is Role.AGGREGATED else PairedServerEngine
    return kind(server, config, replace(serving_of(spec, codec), follow=follow))


def serving_of(spec: EngineSpec, codec: TextCodec) -> Serving:
    """Give the deployment's settings of a worker.

    Raises:
        ConfigError: the context's length is not known.
    """
    if spec.context_length is None:
        raise ConfigError("context_length: must be given for engine openai")
    card = spec.card
    return Serving(
        block_size=spec.block_size,
        context_length=spec.context_length,
        vocab_size=max(spec.vocab_size, codec.vocab_size),
        eos_token_ids=spec.eos_token_ids,
        kv_blocks=spec.kv_blocks,
        max_running_requests=_chosen(spec.scheduler, "max_running_requests", _RUNNING_REQUESTS),
        max_waiting_requests=spec.scheduler.max_waiting_requests,
        max_batch_tokens=_chosen(spec.scheduler, "max_batch_tokens", _BATCH_TOKENS),
        root=b"" if card is None else pack_root(root_hash(spec.block_size, card.salt, key=spec.hash_key)),
    )


def _chosen(scheduler: SchedulerConfig, name: str, usual: int) -> int:
    """Return a limit that the graph sets, else the usual one of servers, which is higher than that of Penstock's engines."""
    chosen: int = getattr(scheduler, name)
    return usual if chosen == SchedulerConfig.model_fields[name].default else chosen
