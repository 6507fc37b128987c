"""A worker's registration: its role, its engine, its prices, and how changes of it are told."""

from enum import StrEnum

from penstock.core.ids import WorkerId
from penstock.core.types.cards import ModelCard
from penstock.core.types.kv_exchange import KvExchange
from penstock.core.types.kv_layout import KvLayout
from penstock.core.wire import Wire


class Role(StrEnum):
    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineInfo(Wire, frozen=True):
    """What an engine says of itself once started.

    Without `kv_events` it never says what its prefix cache holds; routers guess it from what they sent there.
    `prompts_at_once` are computed beside each other, each as fast as alone: one by each data-parallel rank.
    `kv_layout` is how its KV lies in memory, None where it keeps none.
    With `kv_by_chunk` full blocks are in the prefix cache after the step that computed them, and steps name who is `prefilling`.
    With `announces` its worker sends an empty `Delta` before the step that is the first to compute a request.
    `lower_tier_blocks` is the room below the device, of which it sends events, too.
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


class Prices(Wire, frozen=True):
    """What an engine's work takes, in seconds, for a router that knows neither its hardware nor its model.

    Prefill of n tokens after m cached ones: `prefill_step_s` + n `prefill_token_s` + (n m + n (n + 1) / 2)
    `prefill_pair_s`. A decode step of b sequences with c tokens of context in all: `decode_step_s` +
    b `decode_sequence_s` + c `decode_token_s`. `onboard_token_s` brings a token's KV into the device from
    each `Tier`, the device first. `error`: how far these are from the prices behind them, as a mean part.
    """

    prefill_step_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_step_s: float
    decode_sequence_s: float
    decode_token_s: float
    onboard_token_s: tuple[float, ...] = ()
    error: float = 0.0


class InstanceState(StrEnum):
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new


class Instance(Wire, frozen=True):
    """A worker's registration; it lives as long as its lease. `prices` where somebody can tell what its steps take.

    `adapters` are the LoRA adapters it takes requests for: loaded, or loaded by its engine when one is asked for.
    `host`, `rack`, `zone` and `region` are where it runs, as far as is known.
    `exchange` is there where prompts can be handed over, to it or by it.
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


class InstancePut(Wire, frozen=True, tag="put"):
    """An instance is present, or changed."""

    instance: Instance


class InstanceRemoved(Wire, frozen=True, tag="removed"):
    worker_id: WorkerId
    reason: str = ""


class WatchSynced(Wire, frozen=True, tag="synced"):
    """Everything present when the watch began has been told; what follows are changes."""


InstanceChange = InstancePut | InstanceRemoved | WatchSynced
