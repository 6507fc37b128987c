"""The nouns that cross a process boundary."""

from enum import StrEnum

import msgspec

from penstock.core.errors import ErrorInfo
from penstock.core.ids import PinId, RequestId, WorkerId
from penstock.core.kv_exchange import KvExchange
from penstock.core.kv_layout import KvLayout
from penstock.core.wire import NO_TOKENS, PackedHashes, PackedTokens, Wire


class Tier(StrEnum):
    """Where a block lies, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    OBJECT = "object"


class Role(StrEnum):
    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token; it is the last of the delta's token ids
    LENGTH = "length"
    CANCELLED = "cancelled"
    PREFILLED = "prefilled"  # a prefill worker is done; the KvHandle says where the blocks are
    ERROR = "error"  # `Delta.error` says why


class SamplingParams(Wire, frozen=True):
    """How to pick tokens. Noise is a function of (seed, choice, output position), never of the batch.

    `max_tokens` and `min_tokens` count the whole output, `Request.num_emitted` included.
    `logprobs` is the number of alternatives to report (0: only the chosen token's), None for none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None


class KvHandle(Wire, frozen=True):
    """The right to read a finished prefill's blocks for `ttl_s` more seconds, once.

    `block_ids` are packed little-endian uint32, the blocks of the first `num_tokens` tokens, the last one full or not. They lie as `layout` says, an
    encoded `KvLayout` that only the two workers read, in `regions` of the producer's transfer agent: of each rank of the
    layout, those it has. `agent` is that one's metadata. No layout is an engine's that keeps no memory for KV. The handle of
    a prompt that is still being computed names no block, and as many tokens as there will be. The blocks' hashes and the first token are in the
    `Request` that carries it.
    """

    producer: WorkerId
    pin_id: PinId
    ttl_s: float
    num_tokens: int
    block_ids: bytes
    agent: bytes = b""
    layout: bytes = b""
    regions: tuple[tuple[int, ...], ...] = ()


class Request(Wire, frozen=True):
    """One choice of a user request, as an engine sees it: token ids in.

    `token_ids` is the prompt followed by the `num_emitted` tokens the user already has (a request that
    moved to another worker continues there): penalties, stops, positions and usage count them.
    `block_hashes` holds (n, 2) uint64 row-major, one row per full block of `token_ids` under `salt`.
    `deadline_s` is what remains, since clocks differ between hosts; None means no deadline.
    `session` is the client's name for what belongs together, for policies that go by it. `adapter` names the LoRA
    adapter of `model` to run with; `salt` differs by it.
    `tenant` and `priority` (above 0: sooner, below: later) say whose turn it is where requests wait for a worker.
    `expected_cached_tokens` is how much of the prompt its router takes to be cached where it sends it: what is left,
    the worker tells other routers. `known_peer_arrivals` is the worker's `peer_arrivals` that the choice of it was made
    by: if more have come, it sends the request back for another choice; None has it stay.
    With `hand_over` it ends after its first token, if more would follow, and another worker goes on with `kv`.
    `slo_ttft_s` until its first token and `slo_itl_s` between two tokens are what its client wants it to take at most.
    """

    request_id: RequestId
    model: str
    token_ids: PackedTokens
    sampling: SamplingParams
    block_hashes: PackedHashes = PackedHashes(b"")
    salt: bytes = b""
    choice: int = 0
    num_emitted: int = 0
    deadline_s: float | None = None
    kv: KvHandle | None = None
    session: str | None = None
    tenant: str = ""
    priority: int = 0
    adapter: str | None = None
    expected_cached_tokens: int = 0
    known_peer_arrivals: int | None = None
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    hand_over: bool = False


class Prefetch(Wire, frozen=True):
    """A hint to a worker: this request's prompt is computed elsewhere, and comes here next; its KV may be fetched meanwhile.

    `kv` names a pin that grows as blocks are computed. `block_hashes` are the prompt's, as in `Request`.
    """

    request_id: RequestId
    block_hashes: PackedHashes
    kv: KvHandle


class TokenLogprob(Wire, frozen=True, array_like=True):
    """`top` holds (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(Wire, frozen=True, array_like=True):
    """What one engine step added to one request. Only the last delta carries `finish_reason`.

    `cached_tokens` comes with the first delta: how many prompt tokens the prefix cache gave. `kv` without a finish says
    where the prompt's KV can be had while it is still computed (`Prefetch`). One with nothing but its id says that the
    step that comes is the first to compute the request.
    """

    request_id: RequestId
    token_ids: PackedTokens = NO_TOKENS
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: ErrorInfo | None = None
    kv: KvHandle | None = None


class BlockStored(Wire, frozen=True, tag="stored"):
    """Blocks became readable, chained in this order; `parent_block_hash` comes before the first (None: root)."""

    block_hashes: PackedHashes
    parent_block_hash: int | None
    block_size: int
    tier: Tier = Tier.DEVICE


class BlockRemoved(Wire, frozen=True, tag="removed"):
    block_hashes: PackedHashes
    tier: Tier = Tier.DEVICE


class AllBlocksCleared(Wire, frozen=True, tag="cleared"):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvRead(Wire, frozen=True):
    """What a worker has read of another one's KV, `producer`, since its start, and how long that took; `transport` moved the last of it."""

    producer: WorkerId
    transport: str
    num_bytes: int
    seconds: float


class WorkerLoad(Wire, frozen=True):
    """A worker's own account of its load; the router adds what it has reserved since.

    `active_blocks` are held by live requests (cached but unused ones do not count).
    `queued_prefill_tokens` are prompt tokens not computed yet, of waiting and running requests.
    `steps` to `generated_tokens`, and `failed_steps` of these, count since start. What follows is set for each frontend. `accepted_requests`: how many of
    the requests it sent on this connection are in these figures, so that it stops adding its own reservations for them.
    The `peer` figures are of the other frontends that are connected (`peers` of them): their requests that have not ended,
    what these had to compute, by their routers' expectation, as long as they have no token (and the pairs of one
    of these tokens and one that it attends to), and how many it has taken of them since its start.
    `onboarded_tokens`, by the engine again: those that requests found in each `Tier` beneath the device when they were
    first taken in, host first; empty where there is no such tier. `oldest_wait_s`: how long the one of its requests that
    has waited longest for its first token has done so by now. `kv_reads`: of those whose KV it has read last, a few.
    Since it has handed over first: `kv_failures`, prompts that it computed again as their KV did not come; `kv_expired`, those whose KV it
    held and nobody took in time; `kv_refused`, those that went without, as it held too much.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    active_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    queued_prefill_tokens: int = 0
    context_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    accepted_requests: int = 0
    peers: int = 0
    peer_requests: int = 0
    peer_prefill_tokens: int = 0
    peer_prefill_pairs: int = 0
    peer_arrivals: int = 0
    onboarded_tokens: tuple[int, ...] = ()
    oldest_wait_s: float = 0.0
    kv_reads: tuple[KvRead, ...] = ()
    kv_failures: int = 0
    kv_expired: int = 0
    kv_refused: int = 0
    failed_steps: int = 0


class Step(Wire, frozen=True):
    """All that one engine step changed, at once.

    `prefilling` names the requests of whose prompt a part was computed, and not the end.
    """

    deltas: tuple[Delta, ...] = ()
    events: tuple[KvEvent, ...] = ()
    load: WorkerLoad | None = None
    prefilling: tuple[RequestId, ...] = ()


class EventBatch(Wire, frozen=True, tag="batch"):
    """The events of one engine step; a worker numbers its batches 1, 2, 3, ... without gaps."""

    sequence: int
    events: tuple[KvEvent, ...]


class EventSnapshot(Wire, frozen=True, tag="snapshot"):
    """One chunk of a worker's whole content as of `sequence`; replaces what a subscriber knew once `last` has come."""

    sequence: int
    chunk: int
    last: bool
    events: tuple[BlockStored, ...]


EventMessage = EventBatch | EventSnapshot


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


class CardFile(Wire, frozen=True):
    """A file of a model card, fetched from any worker of the model by its content hash."""

    name: str
    sha256: str
    size_bytes: int


class ModelCard(Wire, frozen=True):
    """What a frontend on another host needs to serve a model; the files come over the request plane.

    `salt` starts every block-hash chain: model revision and KV dtype. `default_sampling` holds the model's own
    (name, value) defaults, such as temperature. `parent` is the model that a LoRA adapter of this name belongs to.
    """

    name: str
    context_length: int
    block_size: int
    salt: bytes
    eos_token_ids: tuple[int, ...] = ()
    files: tuple[CardFile, ...] = ()
    created_s: int = 0
    default_sampling: tuple[tuple[str, float], ...] = ()
    parent: str | None = None

    def adapted(self, adapter: str) -> "ModelCard":
        """Describe the model with a LoRA adapter: all the same but its KV, so its blocks are named apart."""
        name = adapter.encode()
        salt = self.salt + b"|adapter=%d:" % len(name) + name
        return msgspec.structs.replace(self, name=adapter, parent=self.name, salt=salt)


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
