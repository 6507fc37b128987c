"""Makes the engine of one worker, in front of a running server or of one that it starts, from the deployment's settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.hashing import root_hash
from penstock.core.types.instances import ModelCard, Role
from penstock.core.types.kv import pack_root
from penstock.engine.launch import ThisHost
from penstock.engine.openai.child import HEALTH, ChildServerEngine, ServerCommand, ServerProcess
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.connection import ServerConnection
from penstock.engine.openai.engine import ServerEngine, Serving
from penstock.engine.openai.events import POLLED_PATH, Follow, followed
from penstock.engine.openai.paired import PairedServerEngine
from penstock.engine.openai.server import EngineServer
from penstock.engine.openai.sglang_server import sglang_command, sglang_launch
from penstock.engine.openai.text import TextCodec
from penstock.engine.openai.trtllm_server import publishes_events, trtllm_command, trtllm_launch
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
    server = EngineServer(config.url[0], config, (*spec.model_names, spec.model), codec, role=spec.role)
    kind = ServerEngine if spec.role is Role.AGGREGATED else PairedServerEngine
    return kind(server, config, serving_of(spec, codec, config))


def make_sglang(spec: EngineSpec) -> ServerEngine:
    """Make an engine that starts SGLang's server.

    Raises:
        ConfigError: SGLang is not installed, or cannot have a setting.
    """
    host = ThisHost()
    launch = sglang_launch(spec, host)
    given: dict[str, Any] = {
        "api": "sglang",
        "bootstrap_port": launch.arguments.get("disaggregation_bootstrap_port"),
    }
    if launch.kv_events is not None:
        given["kv_events"] = launch.kv_events.endpoint
        given["kv_events_replay"] = launch.kv_events.replay_endpoint
    return _child(spec, host, sglang_command(launch), given, ranks=spec.data_parallel)


def make_trtllm(spec: EngineSpec) -> ServerEngine:
    """Make an engine that starts TensorRT-LLM's server.

    Raises:
        ConfigError: the server is not installed, or cannot have a setting.
    """
    host = ThisHost()
    launch = trtllm_launch(spec, host)
    command = trtllm_command(launch, host)
    given = {
        "api": "trtllm",
        "kv_events": f"{command.url}{POLLED_PATH}" if publishes_events(launch) else None,
    }
    return _child(spec, host, command, given, separates_salts=False)


def _child(
    spec: EngineSpec,
    host: ThisHost,
    command: ServerCommand,
    given: Mapping[str, Any],
    *,
    ranks: int = 1,
    separates_salts: bool = True,
) -> ServerEngine:
    """Make the engine of a server that is started by a command; `given` are further fields of `ServerConfig`, or None."""
    fields = {name: value for name, value in given.items() if value is not None}
    config = ServerConfig(url=(command.url,), health=HEALTH, **fields)
    codec = TextCodec.open(spec.model)
    connection = ServerConnection(command.url, config.limits, command.api_key)
    server = EngineServer(
        command.url,
        config,
        (*spec.model_names, spec.model),
        codec,
        role=spec.role,
        connection=connection,
    )
    serving = serving_of(spec, codec, config, ranks=ranks)
    # limits of one data-parallel rank, as the graph says them; a server whose ranks nobody chooses among has those of all
    copies = spec.data_parallel // ranks
    serving = replace(
        serving,
        kv_blocks=spec.kv_blocks and spec.kv_blocks // ranks,
        max_running_requests=(spec.max_running_requests or _RUNNING_REQUESTS) * copies,
        max_batch_tokens=(spec.max_batch_tokens or _BATCH_TOKENS) * copies,
        separates_salts=separates_salts,
    )
    return ChildServerEngine(ServerProcess(command), host, server, config, serving)


def serving_of(
    spec: EngineSpec, codec: TextCodec, config: ServerConfig | None = None, *, ranks: int = 1
) -> Serving:
    """Give the deployment's settings of a worker.

    Args:
        spec: the engine.
        codec: the model's tokenizer.
        config: where the server publishes KV events; None: nowhere.
        ranks: the server's data-parallel ranks that routers choose among.

    Raises:
        ConfigError: the context's length is not known.
    """
    if spec.context_length is None:
        raise ConfigError("context_length: must be given for a model that another server runs")
    card = spec.card
    if config is None or not config.kv_events:
        follow: tuple[Follow, ...] = ()
    else:
        known = card or ModelCard(name="", context_length=1, block_size=spec.block_size, salt=b"")
        sources = (
            followed(config, 0, card=known, adapters=spec.adapters, hash_key=spec.hash_key, rank=rank)
            for rank in range(ranks)
        )
        follow = tuple(source for source in sources if source is not None)
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
        follow=follow,
        ranks=ranks,
    )


def _chosen(scheduler: SchedulerConfig, name: str, usual: int) -> int:
    """Return a limit that the graph sets, else the usual one of servers, which is higher than that of Penstock's engines."""
    chosen: int = getattr(scheduler, name)
    return usual if chosen == SchedulerConfig.model_fields[name].default else chosen
