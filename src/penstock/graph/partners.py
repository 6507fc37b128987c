"""Checks before a start that a graph's roles work together: worker counts, equal KV formats, reachable transports."""

from penstock.core.config import nearest, wrong
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.engine.registry import engine_kind
from penstock.graph.role import Roles
from penstock.transfer.config import SAME_HOST, TransferConfig
from penstock.transfer.default_transports import BETWEEN_PROCESSES, NAMES

_SAME = ("engine", "weight_dtype", "expert_dtype", "kv_dtype")
"""Fields that determine a KV block's bytes, besides the model and block size of the graph."""
_ORDINARY_TOKENS = 512
"""A short chat: system prompt, question and answer."""


def check_partners(roles: Roles) -> None:
    """Check that prefill and decode roles come in pairs and have equal KV formats.

    Raises:
        PydanticCustomError: a role is missing, or a field differs.
    """
    prefill, decode = roles.prefill, roles.decode
    if not roles.present():
        raise wrong("no role is described; describe aggregated, or prefill and decode")
    if prefill and not (decode or roles.aggregated):
        raise wrong("prefill needs decode: no worker would decode its prompts; describe roles.decode as well")
    if decode and not prefill:
        raise wrong("decode needs prefill: nobody would run its prompts; describe roles.prefill as well")
    if not prefill:
        return
    for role, spec in roles.present().items():
        if spec.nodes > 1 and engine_kind(spec.engine).has_weights:
            raise wrong(
                f"{role}.nodes: a worker of engine {spec.engine!r} over {spec.nodes} nodes transfers no KV, which prefill needs;"
                " describe roles.aggregated alone"
            )
    answering = {role: spec for role, spec in roles.present().items() if role is not Role.PREFILL}
    for role, spec in answering.items():
        both = [(field, getattr(prefill, field), getattr(spec, field)) for field in _SAME]
        if prefill.engine == "mock":
            both.append(
                ("mock.kv_bytes_per_block", prefill.mock.kv_bytes_per_block, spec.mock.kv_bytes_per_block)
            )
        for field, ours, theirs in both:
            if ours != theirs:
                raise wrong(
                    f"prefill.{field} is {ours!r} and {role}.{field} is {theirs!r}; KV moves between them as it is, so"
                    " they must be the same"
                )


def check_counts(roles: Roles, workers_max: int) -> None:
    """Check that some worker answers requests, and that a router can know all workers.

    Args:
        roles: roles with their replicas at the start.
        workers_max: most workers that a router can know.

    Raises:
        ConfigError: too few or too many replicas.
    """
    present = roles.present()
    answering = [role for role in present if role is not Role.PREFILL]
    if not any(present[role].replicas for role in answering):
        places = " and ".join(f"roles.{role}.replicas" for role in answering)
        raise ConfigError(f"{places}: must be >= 1 to serve anything, got 0")
    replicas = sum(spec.replicas for spec in present.values())
    if replicas > workers_max:
        places = " + ".join(f"roles.{role}.replicas" for role in present)
        raise ConfigError(
            f"{places}: {replicas:,} workers, but a router knows at most {workers_max:,} (router.workers_max); lower one"
            " or raise the other"
        )


def say_empty(roles: Roles) -> list[str]:
    """Describe the effect of each role with 0 replicas, one line each."""
    said = []
    if roles.prefill and not roles.prefill.replicas:
        said.append(
            "roles.prefill.replicas is 0: prompts are computed where they are answered, until a prefill worker comes"
            " (penstock role WORKER prefill)"
        )
    if roles.decode and not roles.decode.replicas and roles.aggregated and roles.aggregated.replicas:
        said.append(
            "roles.decode.replicas is 0: only aggregated workers decode remote prefills, until a decode worker comes"
            " (penstock role WORKER decode)"
        )
    return said


def say_small_kv(roles: Roles, block_size: int) -> list[str]:
    """Describe each role whose KV holds less than an ordinary request, one line each."""
    return [
        f"roles.{role}.kv_blocks is {spec.kv_blocks}: a worker's KV holds {spec.kv_blocks * block_size} tokens, and prompt and"
        f" answer of a request must fit into it; ordinary requests need {_ORDINARY_TOKENS:,} and more, so raise it to"
        f" {-(-_ORDINARY_TOKENS // block_size)} at least"
        for role, spec in roles.present().items()
        if spec.kv_blocks is not None and spec.kv_blocks * block_size < _ORDINARY_TOKENS
    ]


def check_transfer(transfer: TransferConfig) -> None:
    """Check that transports and listen addresses let workers read each other's memory.

    Raises:
        PydanticCustomError: no transport or listen address qualifies.
    """
    place = "worker.kv_transfer.transfer"
    names = transfer.transports
    for name in names or ():
        if name not in NAMES:
            raise wrong(f"{place}.transports: there is no transport {name!r}{nearest(name, list(NAMES))}")
    if names is not None and not set(names) & set(BETWEEN_PROCESSES):
        raise wrong(
            f"{place}.transports: {', '.join(names) or 'none'} cannot reach another worker's memory; name at least one of"
            f" {', '.join(BETWEEN_PROCESSES)}, or leave it out"
        )
    if not any(address == SAME_HOST or address.startswith("tcp://") for address in transfer.listen):
        raise wrong(
            f"{place}.listen: {', '.join(transfer.listen) or 'nothing'} cannot be reached by other workers, which are"
            f" other processes; add {SAME_HOST!r} or tcp://HOST:PORT"
        )
