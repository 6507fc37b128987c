"""What runs a model, and what it offers so that KV can move."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, runtime_checkable

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.instances import EngineInfo, Role
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Request
from penstock.core.types.steps import Step
from penstock.core.wire import HashArray


class Engine(Protocol):
    """Runs a model: token ids in, token ids out, one batched step at a time. One task owns it."""

    async def start(self) -> EngineInfo:
        """Load the model; when this returns, `submit` accepts requests.

        Raises:
            ConfigError: the model or a setting cannot work.
        """
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; its tokens come out of `steps`. What is late is aborted: an engine knows no deadline.

        Raises:
            RequestError: it can never run here (longer than the context or than all KV blocks).
            Overloaded: the queue is full.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Free the request's blocks by the end of the step under way; unknown and finished ids are no error.

        No delta of this request follows, not even a last one.
        """
        ...

    def steps(self) -> AsyncIterator[Step]:
        """Yield what each step changed; waits while there is nothing to do and ends after `close`. One consumer."""
        ...

    def load(self) -> WorkerLoad:
        """Account for every request `submit` has taken so far, also within a step."""
        ...

    async def close(self) -> None:
        """Release everything. Safe after a failed `start`, and twice."""
        ...


@runtime_checkable
class Announcing(Protocol):
    """What an engine offers beside `Engine` that knows which step is the first to compute a request."""

    def announce(self, listener: Callable[[Sequence[RequestId]], None]) -> None:
        """Have a listener called before each step, where it is the first to compute some requests, with these.

        What the listener sends is under way when the step begins: should the step end the process, it is known who was new in it.
        """
        ...


@runtime_checkable
class KvBlocks(Protocol):
    """What an engine offers beside `Engine` so that KV can move: its memory, and blocks held while others copy.

    Held blocks are nobody's to write but the holder's, so that bytes may move while a step computes. Sync, from the event
    loop.
    """

    def kv_memory(self) -> Sequence[Sequence[object]]:
        """Give the memory of all blocks: what `penstock.transfer` can register, of each rank of `EngineInfo.kv_layout`.

        Returns:
            of each rank the regions that its layout names, in their order; nothing where there is no layout, as the engine
            keeps no memory (a mock): holding and publishing are then all there is to a move.
        """
        ...

    def pin(self, block_hashes: HashArray) -> Sequence[BlockId]:
        """Hold the leading blocks that are resident.

        Args:
            block_hashes: (n, 2) uint64, each the child of the one before it; the first need be at no root.

        Returns:
            (m,) with m <= n: it stops at the first block that is not there.
        """
        ...

    def reserve(self, count: int) -> Sequence[BlockId] | None:
        """Hold `count` blocks to be written; None where what runs will need them."""
        ...

    def publish(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        """Put held blocks whose content is complete into the prefix cache and announce them; they stay held.

        Args:
            block_ids: (n,) each the child of the one before it.
            block_hashes: (n, 2) uint64, their names.
            parent: low64 of the block before the first, None at the root.
        """
        ...

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Let go of what `pin` or `reserve` gave, once each."""
        ...


@runtime_checkable
class RoleAware(Protocol):
    """What an engine offers beside `Engine` that works otherwise by its worker's role."""

    def assume(self, role: Role) -> EngineInfo:
        """Work as a worker of this role from now on; called once started, and when the role changes, without any request.

        Returns:
            what it says of itself in this role: `max_batch_tokens` and `prompts_at_once` may be others.
        """
        ...


@runtime_checkable
class KvTails(KvBlocks, Protocol):
    """What an engine may offer beside `KvBlocks`, so that the tokens past a prompt's full blocks move too. Sync, likewise."""

    def claim_tail(self, request_id: RequestId) -> BlockId | None:
        """Hold the last block of a request with `prefill_only` that ended in the step just yielded; None where that is full.

        After the next step has begun it is too late.
        """
        ...

    def lend_tail(self, request_id: RequestId, block_id: BlockId, num_tokens: int) -> None:
        """Have a request, submitted this moment, begin with a held block after its full ones, if all these are resident.

        The engine lets go of it, used or not: for a request that it does not know as well.

        Args:
            request_id: whose.
            block_id: held by the caller until now.
            num_tokens: computed in it, of the request's tokens after its full blocks.
        """
        ...
