"""Whether the roles of a graph can work together, in number and in what they hand over; what cannot is refused before anything starts."""

from penstock.core.config import nearest, wrong
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.graph.role import Roles
from penstock.transfer.config import SAME_HOST, TransferConfig
from penstock.transfer.default_transports import BETWEEN_PROCESSES, NAMES

_SAME = ("engine", "weight_dtype", "expert_dtype", "kv_dtype")
"""What makes a block's bytes, beside the model and the block size, which all roles of a graph have in common."""


def check_partners(roles: Roles) -> None:
    """Refuse roles that have nobody to hand prompts over to, or to get them from, or whose KV differs.

    Raises:
        PydanticCustomError: why.
    """
    prefill, decode = roles.prefill, roles.decode
    if not roles.present():
        raise wrong("no role is described; describe aggregated, or prefill and decode")
    if prefill and not (decode or roles.aggregated):
        raise wrong("prefill needs decode: nobody would take its KV over; describe roles.decode as well")
    if decode and not prefill:
        raise wrong("decode needs prefill: nobody would run its prompts; describe roles.prefill as well")
    if not prefill:
        return
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
    """Refuse numbers of workers with which nobody would answer, or not everybody would be known.

    Args:
        roles: as many as they are to start with.
        workers_max: how many a router knows.

    Raises:
        ConfigError: which ones, and what they would have to be.
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
    """Say what a role that nobody has yet means for the others; one line each."""
    said = []
    if roles.prefill and not roles.prefill.replicas:
        said.append(
            "roles.prefill.replicas is 0: prompts are computed where they are answered, until a prefill worker comes"
            " (penstock role WORKER prefill)"
        )
    if roles.decode and not roles.decode.replicas and roles.aggregated and roles.aggregated.replicas:
        said.append(
            "roles.decode.replicas is 0: aggregated workers alone take prompts over, until a decode worker comes"
            " (penstock role WORKER decode)"
        )
    return said


def check_ways(transfer: TransferConfig) -> None:
    """Refuse settings with which no worker reaches another one's memory.

    Raises:
        PydanticCustomError: why.
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
