"""A worker's registration: its role, its engine, its prices, and the changes that discovery reports."""

from enum import StrEnum

from penstock.core.ids import WorkerId
from penstock.core.types.cards import ModelCard
from penstock.core.types.events import Holder
from penstock.core.types.kv.exchange import KvExchange
from penstock.core.types.kv.layout import KvLayout
from penstock.core.types.media import MediaKind
from penstock.core.wire import Wire


class Role(StrEnum):
    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class KvHolder(Wire, frozen=True):
    """A keeper of KV blocks that several workers load: a host's arena, or an object store.

    Attributes:
        kind: which of them.
        id: the same of all workers that load the same blocks from it.
        blocks: that it may keep, as far as this worker knows.
    """

    kind: Holder
    id: str
    blocks: int = 0


OPTIONAL_SAMPLING = ("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs")
"""Fields of `SamplingParams` that not every engine has."""


class EngineInfo(Wire, frozen=True):
    """What an engine reports of itself once started. With `data_parallel` > 1 sizes are those of one rank.

    Attributes:
        data_parallel: ranks with a queue, a batch and KV of their own; routers choose among ranks as among workers.
        kv_events: whether it sends KV events; if not, routers predict its prefix cache from the requests they sent.
        prompts_at_once: prompts computed in parallel without slowing each other: the ranks of an engine whose ranks routers do not see.
        kv_layout: where KV lies in memory; None for an engine without KV memory.
        kv_by_chunk: whether full blocks enter the prefix cache after the step that computed them, and `Step.prefilling` is set.
        announces: whether its worker sends an empty `Delta` before the first step that computes a request.
        lower_tier_blocks: blocks in the worker's own tiers below the device.
        kv_holders: what it loads from beside these; KV events of each are sent to whoever subscribes to it.
        transferred_prompts_only: whether its decode workers compute no prompts; routers then give each one to a prefill worker.
        media: what it takes besides text; its worker refuses requests with anything else.
        embedding_size: values of an embedding (`Request.embeds`); 0: it makes none, and its worker refuses such requests.
        structured_outputs: whether it keeps to `SamplingParams.structured`; if not, its worker refuses such requests.
        interleaves_tenants: whether a prompt overtakes those that the engine has begun, where its tenant was served less or it is shorter.
        is_deployment: whether it is another deployment, whose router chooses the worker; it gets no forwarded request.
        sampling_fields: which of `OPTIONAL_SAMPLING` it heeds; its worker refuses requests with the others.
    """

    block_size: int
    total_blocks: int
    context_length: int
    max_batch_tokens: int
    max_running_requests: int
    kv_bytes_per_block: int = 0
    kv_events: bool = True
    prompts_at_once: int = 1
    kv_layout: KvLayout | None = None
    kv_by_chunk: bool = False
    announces: bool = False
    lower_tier_blocks: int = 0
    structured_outputs: bool = False
    transferred_prompts_only: bool = False
    media: tuple[MediaKind, ...] = ()
    data_parallel: int = 1
    kv_holders: tuple[KvHolder, ...] = ()
    embedding_size: int = 0
    sampling_fields: tuple[str, ...] = ()
    is_deployment: bool = False
    interleaves_tenants: bool = False


class Prices(Wire, frozen=True):
    """Seconds of an engine's work, for a router that knows neither its hardware nor its model.

    Prefill of n tokens after m cached ones: `prefill_step_s` + n `prefill_token_s` + (n m + n (n + 1) / 2)
    `prefill_pair_s`. A decode step of b sequences with c tokens of context in all: `decode_step_s` +
    b `decode_sequence_s` + c `decode_token_s`.

    Attributes:
        onboard_token_s: seconds to bring one token's KV into the device from each `Tier`, the device first.
        error: mean relative error of these prices against the latency model that they approximate.
    """

    prefill_step_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_step_s: float
    decode_sequence_s: float
    decode_token_s: float
    onboard_token_s: tuple[float, ...] = ()
    error: float = 0.0


class Distance(Wire, frozen=True):
    """The way to a worker: seconds one way, and the bandwidth of one connection."""

    latency_s: float
    bandwidth_bytes_per_s: float


class InstanceState(StrEnum):
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    ASLEEP = "asleep"  # has given up its memory, takes nothing until it wakes


class Instance(Wire, frozen=True):
    """A worker's registration; it lives as long as its lease.

    Attributes:
        host: where it runs, as far as is known; likewise `rack`, `zone`, `region`.
        prices: None without a profile or latency model of the engine.
        adapters: LoRA adapters that it serves, loaded already or on first use.
        exchange: None for a worker without KV transfer.
        problem: why its engine cannot serve for now; empty while it can.
        rank: the data-parallel rank that a router's connection is for; 0 in registrations.
        registered_id: of a rank, the id of its worker's registration.
        distance: of a link, the way to the other region; None: routers know it by their topology.
    """

    worker_id: WorkerId
    name: str
    address: str
    role: Role
    card: ModelCard
    engine: EngineInfo
    state: InstanceState = InstanceState.READY
    pid: int = 0
    host: str = ""
    prices: Prices | None = None
    adapters: tuple[str, ...] = ()
    rack: str = ""
    zone: str = ""
    region: str = ""
    exchange: KvExchange | None = None
    problem: str = ""
    rank: int = 0
    registered_id: WorkerId | None = None
    distance: Distance | None = None

    @property
    def registration(self) -> WorkerId:
        """The id under which its worker is registered."""
        return self.worker_id if self.registered_id is None else self.registered_id

    @property
    def worker(self) -> str:
        """The name under which its worker is registered."""
        return self.name if self.registered_id is None else self.name.rpartition("/")[0]


class InstancePut(Wire, frozen=True, tag="put"):
    """An instance is present, or changed."""

    instance: Instance


class InstanceRemoved(Wire, frozen=True, tag="removed"):
    worker_id: WorkerId
    reason: str = ""


class WatchSynced(Wire, frozen=True, tag="synced"):
    """All instances present when the watch began have been reported; changes follow."""


InstanceChange = InstancePut | InstanceRemoved | WatchSynced
