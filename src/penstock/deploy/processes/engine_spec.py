"""Makes the engine spec of a worker from the graph."""

from pathlib import Path

from penstock.core.hashing import DEFAULT_KEY
from penstock.core.types.instances import ModelCard, Role
from penstock.deploy.card import served_name
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.spec import EngineSpec, NodeGroup
from penstock.graph import Graph, RoleSpec
from penstock.graph.engine_prices import engine_prices, with_step_size
from penstock.kv.host_arena import HostPart

_VOCABULARY = 32_000  # assumed where the checkpoint has none


def engine_spec(
    graph: Graph,
    role: RoleSpec,
    checkpoint: Checkpoint | None,
    *,
    card: ModelCard | None = None,
    index: int = 0,
    device_index: int = 0,
    core: int | None = None,
    adapters: tuple[str, ...] = (),
    hash_key: bytes = DEFAULT_KEY,
    host_part: HostPart | None = None,
    nodes: NodeGroup | None = None,
) -> EngineSpec:
    """Make the engine spec of a role's workers.

    Args:
        graph: the deployment.
        role: one of its roles.
        checkpoint: the graph's model; None where it is not on this machine: then what the checkpoint says stays open.
        card: the worker's model card.
        index: the worker's number among those of its role.
        device_index: index of the worker's first GPU; unused on CPUs.
        core: CPU core of an engine on a CPU; None for any.
        adapters: the worker's LoRA adapters.
        hash_key: the deployment's key of block hashes.
        host_part: the worker's part of the memory that its host's workers share for KV.
        nodes: those of a worker that spans several; None names them, as only a start finds them.

    Raises:
        ConfigError: the checkpoint lacks a field that the engine needs, or the engine does not support the role's settings.
    """
    present = graph.roles.present()
    model_dir = Path(graph.model) if checkpoint is None else checkpoint.path
    schedulers = {name: _scheduler(_sized(name, each, model_dir)) for name, each in present.items()}
    found = next((name for name, each in present.items() if each is role), None)
    own = found or Role.AGGREGATED
    return EngineSpec(
        model=str(model_dir),
        block_size=graph.block_size,
        model_names=(graph.model, served_name(graph)),
        card=card,
        index=index,
        role=own,
        args=role.engine_args,
        context_length=graph.context_length
        if checkpoint is None
        else checkpoint.served_context(graph.context_length),
        vocab_size=_VOCABULARY
        if checkpoint is None
        else checkpoint.text_config.get("vocab_size", _VOCABULARY),
        eos_token_ids=_ends(checkpoint, card),
        kv_blocks=role.kv_blocks,
        kv=role.kv,
        host_part=host_part,
        sharing_engines=_sharing(graph, role),
        max_batch_tokens=_sized(own, role, model_dir).max_batch_tokens,
        max_running_requests=role.max_running_requests,
        scheduler=_scheduler(role) if found is None else schedulers[found],
        schedulers=schedulers,
        dtype=role.weight_dtype,
        kv_dtype=role.kv_dtype,
        device=_device(role, device_index, core),
        tensor_parallel=role.tensor_parallel,
        pipeline_parallel=role.pipeline_parallel,
        data_parallel=role.data_parallel,
        expert_parallel=role.expert_parallel,
        nodes=nodes or _named_nodes(role),
        adapters=adapters,
        hash_key=hash_key,
        mock=role.mock,
    )


def _ends(checkpoint: Checkpoint | None, card: ModelCard | None) -> tuple[int, ...]:
    if card is not None:  # which also knows what the chat template ends turns with
        return card.eos_token_ids
    return () if checkpoint is None else checkpoint.eos_token_ids


def _named_nodes(role: RoleSpec) -> NodeGroup | None:
    if role.nodes == 1:
        return None
    return NodeGroup(
        size=role.nodes, rank=0, master_addr="<leader>", master_port="<leader's port>", address="<node>"
    )


def _sharing(graph: Graph, role: RoleSpec) -> int:
    """Count the engines that share memory with a role's: 1 on a GPU, all CPU engines on the host."""
    if role.hardware != "cpu":
        return 1
    roles = graph.roles.present().values()
    hosted = sum(
        each.replicas_most for each in roles if each.engine == role.engine and each.hardware == "cpu"
    )
    return max(1, hosted)


def _device(role: RoleSpec, index: int, core: int | None) -> str:
    if role.hardware != "cpu":
        return f"cuda:{index}"
    return "cpu" if core is None else f"cpu:{core}"


def _sized(name: Role, role: RoleSpec, model_dir: Path) -> RoleSpec:
    return with_step_size(name, role, lambda: engine_prices(role, model_dir))


def _scheduler(role: RoleSpec) -> SchedulerConfig:
    others = {"max_waiting_requests": role.max_waiting_requests}
    return SchedulerConfig.of_ranks(
        role.data_parallel,
        max_batch_tokens=role.max_batch_tokens,
        max_running_requests=role.max_running_requests,
        order=role.prompt_order,
        ageing=role.prompt_ageing,
        retention=role.retention,
        eviction=role.kv.eviction,
        tenant_share=role.kv.tenant_share,
        prefetched_requests=role.kv.prefetch,
        **{name: value for name, value in others.items() if value is not None},
    )
