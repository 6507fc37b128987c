"""A worker's load report."""

from penstock.core.ids import WorkerId
from penstock.core.wire import Wire


class KvRead(Wire, frozen=True):
    """Totals of a decode worker's KV reads from one prefill worker since its start; `transport` is that of the latest read."""

    prefill_worker: WorkerId
    transport: str
    num_bytes: int
    seconds: float


class WorkerLoad(Wire, frozen=True):
    """A worker's report to one frontend; the router adds what it has reserved since.

    Attributes:
        active_blocks: blocks held by live requests; cached blocks without a request do not count.
        cached_blocks: blocks in the prefix cache, in use or not.
        queued_prefill_tokens: prompt tokens not computed yet, of waiting and running requests.
        context_tokens: tokens of context of all running requests.
        steps: since start, like `preemptions`, `prefilled_tokens`, `prefix_hit_tokens`, `generated_tokens`.
        accepted_requests: how many requests of this frontend these figures include; its router drops its own
            reservations for them.
        peers: other connected frontends.
        peer_requests: unfinished requests of these.
        peer_prefill_tokens: prompt tokens that requests of these without a first token had to compute, as their routers expected.
        peer_prefill_pairs: pairs of such a token with a token that it attends to.
        peer_arrivals: requests accepted from these since start.
        onboarded_tokens: prompt tokens that admitted requests found in each `Tier` below the device, host first;
            empty without such tiers.
        oldest_wait_s: longest time that a request has waited for its first token so far.
        kv_reads: the prefill workers read from most recently.
        kv_failures: prompts that a decode worker recomputed since their KV did not arrive.
        kv_expired: prompts whose pinned KV no decode worker read in time.
        kv_refused: prompts that a prefill worker exported no KV of, since too many blocks were pinned.
        failed_steps: how many of `steps` failed.
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
