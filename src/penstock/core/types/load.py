"""How busy a worker is, by its own account."""

from penstock.core.ids import WorkerId
from penstock.core.wire import Wire


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
