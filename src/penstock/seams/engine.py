"""Engines: running a model, and optional protocols for KV transfer and roles."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, runtime_checkable

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.instances import EngineInfo, Role
from penstock.core.types.kv import KvAction, KvReport
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import ExpandedPrompt, MediaPrompt, Request
from penstock.core.wire import HashArray
from penstock.seams.kv import KvLoad, KvNames, KvRun, KvSource


class Engine(Protocol):
    """Runs a model: token ids in, token ids out, one batched step at a time. One task owns it."""

    async def start(self) -> EngineInfo:
        """Load the model; when this returns, `submit` accepts requests.

        Raises:
            ConfigError: the model or a setting cannot work.
        """
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; `steps` yields its tokens. The engine ignores deadlines: the worker aborts late requests.

        Raises:
            RequestError: it can never run here (longer than the context or than all KV blocks).
            Overloaded: the queue is full.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Drop a request and free its blocks by the end of the current step; unknown and finished ids are no error.

        No further delta of this request follows.
        """
        ...

    def steps(self) -> AsyncIterator[Step]:
        """Yield what each step changed; wait while idle, end after `close`. One consumer."""
        ...

    def load(self) -> WorkerLoad:
        """Report the load, including every request submitted so far; may be called during a step."""
        ...

    async def close(self) -> None:
        """Release everything. Safe after a failed `start`, and twice."""
        ...


@runtime_checkable
class Announcing(Protocol):
    """An engine that says before a step which requests it computes for the first time."""

    def announce(self, listener: Callable[[Sequence[RequestId]], None]) -> None:
        """Call `listener` before each step with the requests that no earlier step has computed, if there are any.

        What the listener sends leaves before the step begins. If the step crashes the process, routers know which
        requests were new in it.
        """
        ...


@runtime_checkable
class KvBlocks(Protocol):
    """An engine whose KV blocks can be transferred: it exposes its KV memory, and pins blocks during a copy.

    The engine neither writes nor evicts pinned blocks, so bytes may move while a step computes. Call from the event loop.
    """

    def kv_memory(self) -> Sequence[Sequence[object]]:
        """Return the memory of all blocks, for `penstock.transfer` to register.

        Returns:
            for each rank of `EngineInfo.kv_layout` its regions in the layout's order. Empty without a layout: such an
            engine (a mock) keeps no KV memory, and a transfer only pins and publishes blocks.
        """
        ...

    def pin(self, block_hashes: HashArray) -> Sequence[BlockId]:
        """Pin the longest resident prefix of a chain of blocks.

        Args:
            block_hashes: (n, 2) uint64, each the child of the one before it; the first may be in the middle of a prompt.

        Returns:
            (m,) block ids with m <= n: pinning stops at the first block that is not resident.
        """
        ...

    def reserve(self, count: int) -> Sequence[BlockId] | None:
        """Pin `count` free blocks to be written by a transfer; None if running requests will need them."""
        ...

    def publish(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        """Put pinned blocks with complete content into the prefix cache and emit KV events; they stay pinned.

        Args:
            block_ids: (n,) each the child of the one before it.
            block_hashes: (n, 2) uint64, hashes of these blocks.
            parent: low64 of the first block's parent, None at the root.
        """
        ...

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Release blocks that `pin` or `reserve` returned, once for each time."""
        ...

    def find_runs(self, block_hashes: HashArray, num_before: int, peer: KvSource) -> Sequence[KvRun]:
        """Find what brings a prefix's blocks soonest: `peer`, or a tier of this engine that is quicker than computing.

        Args:
            block_hashes: (n, 2) uint64.
            num_before: leading blocks that are resident.
            peer: a prefill worker's blocks.

        Returns:
            consecutive runs, up to the first block that nobody brings.
        """
        ...

    def load_runs(
        self,
        runs: Sequence[KvRun],
        targets: Sequence[BlockId],
        peer: KvSource,
        done: Callable[[int], None],
        on_arrived: Callable[[int], None] = lambda _num_blocks: None,
    ) -> KvLoad:
        """Load runs that `find_runs` returned into reserved blocks; another source brings what one fails to bring.

        Args:
            runs: at least one.
            targets: as many blocks, reserved until `done` is called. They are not published.
            peer: the prefill worker's blocks.
            done: called once, later, with the number of leading blocks that are complete; soon after `cancel` too.
            on_arrived: called before that each time more leading blocks are complete, with their number so far: they may be
                published at once.
        """
        ...


@runtime_checkable
class KvGrouped(Protocol):
    """An engine with `KvBlocks` that may keep blocks of several groups of layers for one prompt."""

    @property
    def has_kv_groups(self) -> bool:
        """Whether it does; a prefix is of use to it only with its last window, so that no other prefix of it can be transferred."""
        ...

    def kv_names(self, block_hashes: HashArray) -> KvNames:
        """Name all blocks that a prompt needs to go on after its full blocks.

        Args:
            block_hashes: (n, 2) uint64, of the full blocks.
        """
        ...


@runtime_checkable
class NativeKvTransfer(Protocol):
    """An engine that transfers KV to engines of its own kind by itself, as vLLM does with its NixlConnector.

    Its worker may be prefill or decode without `KvBlocks`. Of a `prefill_only` request the last delta has a `KvHandle` with a
    `payload`. It may come as soon as a decode worker can start, before the prompt is computed, and without a token: then the
    decode worker samples the first one. `submit` of a request with such a handle loads the KV, or else recomputes it.
    """

    def kv_transfer_kind(self) -> str:
        """Name what transfers the KV, with the version of its payload, such as `vllm-nixl-1`; only equal kinds are paired."""
        ...


@runtime_checkable
class HealthReporting(Protocol):
    """An engine that cannot serve at times, and then can again: a server elsewhere computes for it."""

    def report_health(self, listener: Callable[[str | None], None]) -> None:
        """Call `listener` with the reason when no request can be served, and with None when they can again.

        The worker stays registered and gets no requests meanwhile. The engine ends the requests that it has, with an error.
        """
        ...


@runtime_checkable
class Sleeping(Protocol):
    """An engine that can give up its memory for a while without ending its processes.

    Levels are vLLM's: at 1 the weights go to host memory, at 2 they are dropped and read again on waking. The KV cache is lost
    at both, as KV events say. The worker calls `sleep` while there is no request, and submits none until `wake_up` has returned.
    """

    def check_sleep(self, level: int) -> None:
        """Check that `sleep` can work, before the worker drains.

        Raises:
            RequestError: it cannot, as it was started (409); says why, and what to set.
        """
        ...

    async def sleep(self, level: int) -> None:
        """Release the memory. The engine can still serve if this raises."""
        ...

    async def wake_up(self) -> None:
        """Take the memory again; when this returns, `submit` accepts requests. The engine still sleeps if this raises."""
        ...


@runtime_checkable
class MediaReading(Protocol):
    """An engine that takes images and the like: those of `EngineInfo.media`."""

    async def expand_media(self, prompt: MediaPrompt) -> ExpandedPrompt:
        """Decode the items of a prompt, and put as many tokens in place of each placeholder as the engine has embeddings for.

        Requests come with the expanded prompt, so that routers, limits and usage count what is computed.

        Raises:
            RequestError: an item is broken or too large, or there are too many.
            Overloaded: too many prompts wait.
        """
        ...


@runtime_checkable
class KvManaged(Protocol):
    """An engine whose KV cache an operator can list, pin, evict and flush. Call from the event loop."""

    def act(self, action: KvAction) -> KvReport:
        """Act on the cache at once.

        Raises:
            RequestError: it cannot, as it was started (409), or a value is out of its range.
        """
        ...


@runtime_checkable
class RoleAware(Protocol):
    """An engine whose batch limits or queue order depend on the role of its worker."""

    def assume(self, role: Role) -> EngineInfo:
        """Apply the settings of this role; called after `start` and when the role changes, while there is no request.

        Returns:
            the engine's info in this role; `max_batch_tokens` and `prompts_at_once` may differ.
        """
        ...


@runtime_checkable
class KvPartialBlocks(KvBlocks, Protocol):
    """An engine that can also transfer a prompt's last, partial block. Call from the event loop."""

    def claim_partial_block(self, request_id: RequestId) -> BlockId | None:
        """Pin the partial last block of a `prefill_only` request that ended in the step just yielded.

        Call it before the next step begins: the engine frees unclaimed blocks then.

        Returns:
            None if the request's last block is full, or the request is unknown.
        """
        ...

    def give_partial_block(self, request_id: RequestId, block_id: BlockId, num_tokens: int) -> None:
        """Give a request that was just submitted a pinned partial block to start from.

        The request uses the block if all its full blocks are resident when it is admitted. The engine takes over the pin
        and releases it in any case, also for an unknown request.

        Args:
            request_id: request that was just submitted.
            block_id: pinned by the caller until now.
            num_tokens: tokens of the request after its full blocks whose KV is in the block.
        """
        ...
