"""What a deployment says to an engine of any kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.hashing import DEFAULT_KEY
from penstock.core.types.instances import ModelCard, Role
from penstock.engine.kv_tiers import KvConfig
from penstock.engine.mock import MockConfig
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.host_arena import HostPart


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """The nodes that one worker spans, as one of the nodes sees them.

    Attributes:
        size: number of nodes.
        rank: number of this node; node 0 leads, and has the worker.
        master_addr: address of the leader, as this node reaches it.
        master_port: port of the leader, where the engine's processes of all nodes meet; a name where nothing is started.
        address: address of this node, by which the others reach it.
    """

    size: int
    rank: int
    master_addr: str
    master_port: int | str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """A deployment's settings for an engine of any kind.

    The mock engine takes `context_length` and `vocab_size` from here. Other engines read them from their checkpoint; only a
    smaller `context_length` overrides that. Every engine ends answers at `eos_token_ids`, beside the ends that it knows itself.
    """

    model: str
    """A directory with a checkpoint, or a name on the hub."""
    block_size: int
    model_names: tuple[str, ...] = ()
    """What the model is called: by the graph, and by clients."""
    card: ModelCard | None = None
    """The model's card, whose salts begin the hashes of its blocks; None without a deployment."""
    index: int = 0
    """The worker's number among those of its role."""
    role: Role = Role.AGGREGATED
    """The worker's role at start."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """The graph's `engine_args`: arguments of the engine by its own names."""
    context_length: int | None = None
    vocab_size: int = 32_000
    eos_token_ids: tuple[int, ...] = ()
    kv_blocks: int | None = None
    """None: the engine chooses."""
    kv: KvConfig = field(default_factory=KvConfig)
    """Tiers below the device."""
    host_part: HostPart | None = None
    """The worker's part of the memory that its host's workers share for KV; None: it shares none."""
    sharing_engines: int = 1
    """Engines that take memory from this machine at the same time, this one included."""
    max_batch_tokens: int | None = None
    """Tokens of one step on each data-parallel rank, for an engine with a scheduler of its own; None: it chooses."""
    max_running_requests: int | None = None
    """Requests in the batch of each data-parallel rank, likewise."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Bounds of batch and queue."""
    schedulers: Mapping[Role, SchedulerConfig] = field(default_factory=dict)
    """The same for roles that the worker may change to; `scheduler` for a role that is missing here."""
    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "cpu"
    """`cpu`, `cpu:CORE`, or `cuda:INDEX` of the first of the worker's devices, which have successive indices."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: int = 1
    nodes: NodeGroup | None = None
    """The nodes over which the worker spans; None: one node."""
    adapters: tuple[str, ...] = ()
    """Names of the worker's LoRA adapters."""
    hash_key: bytes = DEFAULT_KEY
    mock: MockConfig = field(default_factory=MockConfig)

    @property
    def local_devices(self) -> int:
        """Devices of the worker on this node."""
        devices = self.tensor_parallel * self.pipeline_parallel * self.data_parallel
        return devices if self.nodes is None else devices // self.nodes.size
