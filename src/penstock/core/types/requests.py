"""Requests to an engine, and the deltas that come back."""

import hashlib
from collections.abc import Iterable
from enum import StrEnum

from penstock.core.errors import ErrorInfo
from penstock.core.ids import PinId, RequestId, WorkerId
from penstock.core.types.kv import KvAccess
from penstock.core.wire import NO_TOKENS, PackedHashes, PackedTokens, Wire, num_tokens

MODALITIES = ("image", "audio", "video")


class MediaKind(Wire, frozen=True):
    """What an engine takes of one modality.

    Attributes:
        modality: one of `MODALITIES`.
        placeholder: text that stands for an item in the prompt of a model whose chat template only takes strings.
        items_max: items of one request.
    """

    modality: str
    placeholder: str
    items_max: int


class MediaItem(Wire, frozen=True):
    """One file, as the client encoded it.

    Attributes:
        data: a PNG, WAV, MP4 and the like; decoded by the engine alone.
        digest: of modality and data; equal digests share KV.
        position: index in `Request.token_ids` of the item's first token; set once an engine has expanded the prompt.
    """

    modality: str
    data: bytes
    digest: bytes
    position: int = 0

    @classmethod
    def of(cls, modality: str, data: bytes) -> "MediaItem":
        """Make an item with its digest; hashes 1 MB in about a millisecond."""
        return cls(
            modality=modality, data=data, digest=hashlib.sha256(b"%s:%b" % (modality.encode(), data)).digest()
        )


class MediaPrompt(Wire, frozen=True):
    """A tokenized prompt with one placeholder for each item, and the items in the order of their placeholders."""

    token_ids: PackedTokens
    items: tuple[MediaItem, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all items."""
        return sum(len(item.data) for item in self.items)

    def extra(self) -> list[tuple[int, bytes]]:
        """Give what the block hashes of an expanded prompt cover besides its tokens, as `block_hashes` takes it."""
        return sorted((item.position, item.digest) for item in self.items)


class ExpandedPrompt(Wire, frozen=True):
    """The tokens that an engine computes for a `MediaPrompt`: an item takes as many as the engine has embeddings for.

    Attributes:
        positions: index in `token_ids` of the first token of each item, in the order of the items.
    """

    token_ids: PackedTokens
    positions: tuple[int, ...]


_TRACE_ID = slice(3, 35)


class TraceContext(Wire, frozen=True):
    """What a client said of its request for logs and traces, passed on unchanged to workers and the servers behind them.

    Attributes:
        request_id: the client's `X-Request-Id`; empty: none.
        traceparent: W3C's header, valid; empty: none.
        tracestate: W3C's header; empty: none.
    """

    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """The 32 hexadecimal digits that all spans of the trace share; empty without a traceparent."""
        return self.traceparent[_TRACE_ID]

    def headers(self) -> dict[str, str]:
        """Give the HTTP headers that pass it on."""
        named = {
            "X-Request-Id": self.request_id,
            "traceparent": self.traceparent,
            "tracestate": self.tracestate,
        }
        return {name: value for name, value in named.items() if value}


KV_PRIORITY_MIN, KV_PRIORITY_MAX = -8, 7
TRANSFER_ID_BYTES = 16
"""Length of `Request.transfer_id` in a request with a KV transfer."""


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token; it is the last of the delta's token ids
    LENGTH = "length"
    PREFILLED = "prefilled"  # a prefill worker is done; the KvHandle says where the blocks are
    ERROR = "error"  # `Delta.error` says why


class SamplingParams(Wire, frozen=True):
    """How to sample tokens. Random numbers depend on (seed, choice, output position) only, never on the batch.

    `max_tokens` and `min_tokens` count the whole output, `Request.num_emitted` included.
    `logprobs` is the number of alternatives to report; 0: only the sampled token's logprob; None: no logprobs.
    `seed_drawn`: the frontend drew the seed, so an engine that samples faster without one may leave it out.
    `structured` constrains the text: JSON of one of vLLM's `structured_outputs`, as `{"json": SCHEMA}` or `{"regex": "..."}`;
    an engine that cannot keep to it refuses the request.
    `logit_bias` (token id, what is added to its logit), `allowed_token_ids` (empty: all) and `bad_words` (token ids that do not
    follow each other in the output) are for engines that name them in `EngineInfo.sampling_fields`.
    `prompt_logprobs`, for such engines too, is the number of alternatives to report at each prompt token but the first; None: no
    logprobs of the prompt. Of the first `prompt_logprobs_from` prompt tokens the client has them already.
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
    structured: bytes | None = None
    seed_drawn: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0

    def stops_with(self, eos_token_ids: Iterable[int]) -> list[int]:
        """Give the tokens that end the output where these are the model's ends, each once."""
        ends = () if self.ignore_eos else eos_token_ids
        return list(dict.fromkeys((*self.stop_token_ids, *ends)))


class KvRetention(Wire, frozen=True):
    """How long a request's KV is kept after its end, against other KV that nobody uses. A hint: answers do not depend on it.

    Attributes:
        priority: from KV_PRIORITY_MIN to KV_PRIORITY_MAX; blocks of a lower one are evicted first, 0 is that of other requests.
        ttl_s: seconds from the request's end until the priority ends; None: the worker's default for a priority above 0, and
            until the next use for one below.
    """

    priority: int
    ttl_s: float | None = None


class KvHandle(Wire, frozen=True):
    """The right to read the KV blocks of a finished prefill once, within `ttl_s` seconds.

    The `Request` that carries the handle has the blocks' hashes, and the first token unless the engine leaves it to decode.

    Attributes:
        prefill_worker: pinned the blocks.
        num_tokens: tokens whose KV the blocks hold.
        block_ids: packed little-endian uint32, in the prefill worker's pool; the last block may be partial.
        source: how to read them.
        payload: the engine's own description of its KV, where the engine transfers KV by itself (`seams.NativeKvTransfer`); only
            an engine of the same `kv_transfer_kind` reads it. Empty where Penstock transfers the blocks.
    """

    prefill_worker: WorkerId
    pin_id: PinId
    ttl_s: float
    num_tokens: int
    block_ids: bytes = b""
    source: KvAccess = KvAccess()
    payload: bytes = b""

    @classmethod
    def native(cls, payload: bytes, num_tokens: int, ttl_s: float) -> "KvHandle":
        """Describe KV that the engine itself transfers."""
        return cls(WorkerId(0), PinId(0), ttl_s, num_tokens, payload=payload)


class Request(Wire, frozen=True):
    """One choice of a user request, tokenized, as an engine gets it.

    Attributes:
        token_ids: the prompt, then `num_emitted` tokens that the client already has, if the request moved from another
            worker. Penalties, stops, positions and usage count these as output.
        block_hashes: (n, 2) uint64 row-major, one row per full block of `token_ids`, hashed with `salt`.
        deadline_s: seconds that remain, since clocks differ between hosts; None: no deadline.
        kv: blocks that a prefill worker holds for this request.
        session: the client's name for its session, for session-aware policies and for the order of eviction.
        tenant: whose fair share the request counts against in a router's request queue.
        priority: above 0: sooner, below: later.
        adapter: LoRA adapter of `model`; its `salt` differs.
        expected_cached_tokens: prompt tokens that the router expects in the worker's cache; the worker reports the
            rest to other routers as work to come.
        known_peer_arrivals: the worker's `WorkerLoad.peer_arrivals` that the router knew when it chose the worker. If
            more have arrived, the worker answers `StaleRoute`; None: it always accepts.
        slo_ttft_s: the client's limit until the first token.
        slo_itl_s: the client's limit between two tokens.
        prefill_only: end after the first token with `FinishReason.PREFILLED`, if more tokens would follow.
        transfer_id: 16 random bytes that name the KV transfer; a secret of the router and the two workers.
        expected_output_tokens: length of the answer that the client expects; None: unknown.
        retention: which KV is evicted before this request's; None: no preference.
        follows_tool: the prompt has results of tools: a turn of an agent.
        media: images and the like, and the prompt that `token_ids` begins with before they were expanded in it; `block_hashes`
            cover their digests.
        rank: the data-parallel rank that computes it, which the worker sets by the connection that it came over; None: any.
        trace: for logs and traces; None: the client said nothing.
        embeds: the answer is `Delta.embedding` of the prompt; its one token means nothing.
        is_forwarded: another deployment's router sent it here, and it goes to no further deployment.
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
    expected_output_tokens: int | None = None
    retention: KvRetention | None = None
    follows_tool: bool = False
    media: MediaPrompt | None = None
    rank: int | None = None
    trace: TraceContext | None = None
    embeds: bool = False
    is_forwarded: bool = False

    def extra_after(self, start: int) -> list[tuple[int, bytes]]:
        """Give what the block hashes of the tokens from `start` on cover besides them, positions counted from `start`."""
        extra = () if self.media is None else self.media.extra()
        return [(position - start, digest) for position, digest in extra if position >= start]


class Prefetch(Wire, frozen=True):
    """Tells a decode worker that `prefill_worker` computes this request's prompt; the request will follow.

    The decode worker subscribes to `transfer_id` at the prefill worker and reads KV as blocks are computed.

    Attributes:
        block_hashes: of the prompt, as in `Request`.
        source: how to read the prefill worker's KV.
    """

    request_id: RequestId
    block_hashes: PackedHashes
    transfer_id: bytes
    prefill_worker: WorkerId
    source: KvAccess


class TokenLogprob(Wire, frozen=True, array_like=True):
    """`top` holds (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(Wire, frozen=True, array_like=True):
    """Logprobs of n prompt tokens that follow each other, each given the tokens before it.

    Attributes:
        start: position of the first of them in the prompt, at least 1.
        token_ids: (n, 1 + alternatives) int32 row-major: the prompt's own token, then the most likely ones.
        logprobs: (n, 1 + alternatives) little-endian float32 of these.
        ranks: (n,) int32 of the prompt's own tokens; 1: none is more likely.
    """

    start: int
    token_ids: PackedTokens
    logprobs: bytes
    ranks: PackedTokens

    @property
    def end(self) -> int:
        """Position after the last of them."""
        return self.start + num_tokens(self.ranks)

    @property
    def num_bytes(self) -> int:
        return len(self.token_ids) + len(self.logprobs) + len(self.ranks)

    def after(self, position: int) -> "PromptLogprobs":
        """Leave out those before a position."""
        skipped = min(max(position - self.start, 0), num_tokens(self.ranks))
        if not skipped:
            return self
        row_bytes = len(self.token_ids) // num_tokens(self.ranks)
        return PromptLogprobs(
            start=self.start + skipped,
            token_ids=PackedTokens(self.token_ids[skipped * row_bytes :]),
            logprobs=self.logprobs[skipped * row_bytes :],
            ranks=PackedTokens(self.ranks[4 * skipped :]),
        )


class Delta(Wire, frozen=True, array_like=True):
    """What one engine step added to one request.

    A delta with nothing but `request_id` announces that the next step is the first to compute the request.

    Attributes:
        finish_reason: set on the last delta only.
        cached_tokens: prompt tokens found in the prefix cache; set once, on the first delta with tokens, or on the last one by an
            engine that learns it then.
        kv: set with `FinishReason.PREFILLED`.
        embedding: of a request that `embeds`: the hidden state of the prompt's last token after the model's last norm, as packed
            little-endian float32, not normalised.
        prompt_logprobs: of the prompt tokens that this step computed, in deltas up to the first one with tokens.
    """

    request_id: RequestId
    token_ids: PackedTokens = NO_TOKENS
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: ErrorInfo | None = None
    kv: KvHandle | None = None
    embedding: bytes = b""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
