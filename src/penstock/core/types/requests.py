"""A request on its way to an engine, and the tokens that come back."""

from enum import StrEnum

from penstock.core.errors import ErrorInfo
from penstock.core.ids import PinId, RequestId, WorkerId
from penstock.core.types.kv_exchange import KvSource
from penstock.core.wire import NO_TOKENS, PackedHashes, PackedTokens, Wire

TRANSFER_ID_BYTES = 16
"""Those of a `Request.transfer_id` that names a transfer."""


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

    `block_ids` are packed little-endian uint32: the producer's blocks of the first `num_tokens` tokens, the last one full or
    not. `source` says how to read them. The blocks' hashes and the first token are in the `Request` that carries the handle.
    """

    producer: WorkerId
    pin_id: PinId
    ttl_s: float
    num_tokens: int
    block_ids: bytes
    source: KvSource = KvSource()


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
    With `prefill_only` it ends after its first token, if more would follow, and another worker goes on with `kv`.
    `transfer_id`, 16 random bytes, names the KV transfer between the two workers: both are given it, nobody else is.
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
    prefill_only: bool = False
    transfer_id: bytes = b""


class Prefetch(Wire, frozen=True):
    """Tells a decode worker that `prefill_worker` computes this request's prompt, and that the request comes here next.

    The decode worker follows `transfer_id` at the prefill worker and reads the KV as soon as there is any. `block_hashes`
    are the prompt's, as in `Request`. `source` says how to read the prefill worker's KV.
    """

    request_id: RequestId
    block_hashes: PackedHashes
    transfer_id: bytes
    prefill_worker: WorkerId
    source: KvSource


class TokenLogprob(Wire, frozen=True, array_like=True):
    """`top` holds (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(Wire, frozen=True, array_like=True):
    """What one engine step added to one request. Only the last delta carries `finish_reason`.

    `cached_tokens` comes with the first delta: how many prompt tokens the prefix cache gave. `kv` comes with
    `FinishReason.PREFILLED`. One with nothing but its id says that the step that comes is the first to compute the request.
    """

    request_id: RequestId
    token_ids: PackedTokens = NO_TOKENS
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: ErrorInfo | None = None
    kv: KvHandle | None = None
