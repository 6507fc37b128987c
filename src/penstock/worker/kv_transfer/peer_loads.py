"""Loads of prompts' beginnings from the caches of other workers, before their requests are submitted.

The router names a worker that has more of a prompt than this one. What of it is loaded sooner than computed is read by the same
loader as all other KV, chunk by chunk, and published. Requests with the same prefix wait for one load. Whatever fails, is late
or has no room here is computed: the request is submitted in any case.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from penstock.core.errors import DeadlineExceeded, PenstockError, PinExpired
from penstock.core.ids import BlockId, PinId, RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import EngineInfo
from penstock.core.types.kv.exchange import KvAccess, KvPeer
from penstock.core.types.requests import Request
from penstock.core.wire import HashArray, num_tokens, unpack_hashes
from penstock.kv.shared_loads import SharedLoad, SharedLoads
from penstock.seams import KvBlocks, KvGrouped, KvRun
from penstock.transfer import Peer
from penstock.transfer.regions.waiting import settled
from penstock.worker.config import KvTransferConfig
from penstock.worker.kv_transfer.peer_source import PeerSource, PeerSpeeds
from penstock.worker.kv_transfer.reader import Origin, Reader

_ASK_S = 0.25
"""A worker that is not connected and has not answered by then is done without, as a load that was predicted to take no time."""
_ASKED_MAX = 1 << 15
"""Blocks of one question, which is half of what a notification carries."""
_MEASURED_S = 10.0
"""A worker that nobody has measured, or that was too slow or silent so long ago, is measured while its blocks are computed."""
_PROBE_BYTES = 64 << 20
"""Of one measurement: 3 ms at 25 GB/s, long beside the messages around it."""
_PROBE_S = 5.0
"""A measurement that takes longer is ended, and counts as if it had ended then."""
_PROBES_MAX = 2
_PROBED_MAX = 1024
"""Workers of which is remembered when they were measured last."""

_log = get_logger()

_Submit = Callable[[Request], None]


_Load = SharedLoad[tuple[Request, _Submit], "asyncio.Task[bool]"]


class PeerLoads:
    """The loads of one worker's requests from other workers' caches. One event loop owns it."""

    def __init__(
        self,
        engine: KvBlocks,
        info: EngineInfo,
        config: KvTransferConfig,
        *,
        connect: Callable[[KvAccess], Awaitable[Peer]],
        reader: Reader,
        release: Callable[[Origin, PinId, Sequence[int]], None],
        speeds: PeerSpeeds,
    ) -> None:
        """Make an empty set.

        Args:
            engine: started.
            info: the engine's info.
            config: bounds.
            connect: connects to another worker's agent.
            reader: reads the blocks.
            release: tells another worker to unpin the blocks of a pin, and which of its host tier's arrived wrong.
            speeds: what was measured of other workers.
        """
        self.loaded_tokens = 0
        """Prompt tokens loaded from other workers."""
        self.failures = 0
        """Loads that brought less than they were to."""
        self._engine = engine
        self._info = info
        self._config = config
        self._connect = connect
        self._reader = reader
        self._release = release
        self._speeds = speeds
        self._loads: SharedLoads[tuple[Request, _Submit], asyncio.Task[bool]] = SharedLoads()
        self._missing_blocks = 0  # of loads under way
        self._probes: set[asyncio.Task[None]] = set()
        self._probed_s: dict[WorkerId, float] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return self._loads.num_waiting

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel all loads; their requests are not submitted."""
        assert self._tasks is not None, "entered"
        for task in (*(load.work for load in self._loads.all()), *self._probes):
            assert task is not None, "begun"
            task.cancel()
        tasks, self._tasks = self._tasks, None
        await tasks.__aexit__(None, None, None)

    def begin(self, request: Request, submit: _Submit) -> bool:
        """Begin to load what another worker has of a request's prompt, or wait for a load of the same, and submit the request afterwards.

        Args:
            request: with `peer`, unless it only waits.
            submit: called once, later, unless the load is cancelled.

        Returns:
            False if nothing is loaded: too many requests wait for loads, no block is free, computing is sooner, nobody has
            measured the other worker, which is done then, or the prompt's logprobs are wanted, which cached KV cannot give.
        """
        peer, is_full = request.peer, len(self) >= self._config.fetches_max
        if isinstance(self._engine, KvGrouped) and self._engine.has_kv_groups:
            return False  # others have the windows of few prefixes
        if not self._config.peers or is_full or request.sampling.prompt_logprobs is not None:
            return False
        if peer is None and not self._loads:
            return False
        cacheable = (num_tokens(request.token_ids) - 1) // self._info.block_size
        hashes = unpack_hashes(request.block_hashes).reshape(-1, 2)[:cacheable]
        here = list(self._engine.pin(hashes))
        load = self._loads.find(hashes[len(here) :], len(here))
        if load is not None or peer is None:
            self._engine.unpin(here)
        else:
            load = self._begin(request, peer, hashes[: min(peer.num_blocks, len(here) + _ASKED_MAX)], here)
        if load is None:
            return False
        self._loads.join(load, request.request_id, (request, submit))
        return True

    def _begin(
        self, request: Request, peer: KvPeer, hashes: HashArray, here: Sequence[BlockId]
    ) -> _Load | None:
        """Begin a load of the blocks after those that are here, which are unpinned at its end; None if nothing is loaded."""
        assert self._tasks is not None, "entered"
        source = self._source(hashes[len(here) :], peer)
        is_known = source.is_priced and peer.worker_id not in self._speeds.doubted
        count = self._worth_loading(hashes, len(here), source) if is_known else 0
        targets = self._engine.reserve(count) if count else None
        if not targets:
            self._engine.unpin(here)
            if not count and self._speeds.of(peer.worker_id).age_s > _MEASURED_S:
                self._probe(hashes[len(here) :], peer)
            return None
        held = [*here, *targets]
        load = _Load(hashes[len(here) : len(held)], len(here), request.request_id)
        loading = self._load(hashes[: len(held)], len(here), list(targets), source, peer)
        load.work = self._tasks.create_task(loading)
        self._loads.begin(load)

        def on_end(task: "asyncio.Task[bool]") -> None:
            is_whole = not task.cancelled() and task.exception() is None and task.result()
            try:
                self._on_end(load, is_whole=is_whole, is_cancelled=task.cancelled())
            finally:
                self._engine.unpin(held)

        load.work.add_done_callback(on_end)
        return load

    def _on_end(self, load: _Load, *, is_whole: bool, is_cancelled: bool) -> None:
        """Submit the requests that waited for a load, unless it was cancelled; those with longer prompts may load more first.

        Raises:
            ExceptionGroup: some could not be submitted; the others were.
        """
        failures: list[Exception] = []
        for request_id, (request, submit) in self._loads.end(load).items():
            may_load = is_whole and request_id != load.begun_for and self._tasks is not None
            try:
                if not is_cancelled and not (may_load and self.begin(request, submit)):
                    submit(request)
            except Exception as error:  # noqa: BLE001 - the others are submitted first
                failures.append(error)
        if failures:
            raise ExceptionGroup("requests could not be submitted after a load from another worker", failures)

    def cancel(self, request_id: RequestId) -> bool:
        """Have a request wait no longer; return whether it did. A load that nobody waits for is cancelled; its blocks stay reserved until it has ended."""
        load = self._loads.leave(request_id)
        if load is not None and not load.waiters and load.work is not None:
            load.work.cancel()
        return load is not None

    def check_idle(self) -> None:
        """Raise AssertionError if a load is left."""
        self._loads.check_idle()
        assert not self._probes, "workers are still measured"
        assert not self._missing_blocks, f"{self._missing_blocks} blocks are still to come"

    def _worth_loading(self, hashes: HashArray, num_here: int, source: PeerSource) -> int:
        """Count the blocks after those that are here, up to the last one that is best loaded from the other worker."""
        runs = self._engine.find_runs(hashes, num_here, source)
        ends = [run.num_before + run.num_blocks for run in runs if run.source is source]
        return max(ends, default=num_here) - num_here

    def _probe(self, hashes: HashArray, peer: KvPeer) -> None:
        """Read blocks of another worker to measure it; no request waits for them."""
        now_s = asyncio.get_running_loop().time()
        is_due = now_s - self._probed_s.get(peer.worker_id, -math.inf) > _MEASURED_S
        num_blocks = min(len(hashes), max(_PROBE_BYTES // max(self._info.kv_bytes_per_block, 1), 1))
        if not (num_blocks and is_due and self._tasks is not None and len(self._probes) < _PROBES_MAX):
            return
        targets = self._engine.reserve(num_blocks)
        if not targets:
            return
        self._probed_s.pop(peer.worker_id, None)
        if len(self._probed_s) >= _PROBED_MAX:
            del self._probed_s[next(iter(self._probed_s))]
        self._probed_s[peer.worker_id] = now_s
        source = self._source(hashes[:num_blocks], peer, is_weighed=True)
        task = self._tasks.create_task(self._measure(source, list(targets), peer))
        self._probes.add(task)

        def on_end(task: "asyncio.Task[None]") -> None:
            self._probes.discard(task)
            self._engine.unpin(targets)

        task.add_done_callback(on_end)

    async def _measure(self, source: PeerSource, targets: list[BlockId], peer: KvPeer) -> None:
        error: PenstockError | None = None
        origin: Origin | None = None
        try:
            async with asyncio.timeout(_PROBE_S):
                origin = await self._ask(source, peer)
                runs = [KvRun(source, source.hashes[: source.growth.num_full], 0)]
                await self._wait_for(runs, targets, source, lambda _num_blocks: None)
            error = source.error
        except TimeoutError:
            error = DeadlineExceeded(f"worker {peer.worker_id} was not measured within {_PROBE_S:g} s")
        except PenstockError as problem:
            error = problem
        finally:
            self._let_go(origin, source)
        if error is None:
            self._speeds.doubted.discard(peer.worker_id)
        else:
            _log.debug("kv_peer_not_measured", worker_id=peer.worker_id, error=error.message)

    async def _ask(self, source: PeerSource, peer: KvPeer) -> Origin:
        """Connect to another worker, and have it pin a source's blocks."""
        origin = Origin(peer.worker_id, peer.source, await self._connect(peer.source))
        source.asked_s = asyncio.get_running_loop().time()
        source.growth = await self._reader.ask(origin.peer, source.hashes)
        source.origin = origin
        return origin

    def _let_go(self, origin: Origin | None, source: PeerSource) -> None:
        if origin is not None and source.growth.pin_id is not None:
            self._release(origin, source.growth.pin_id, source.wrong)

    async def _load(
        self, hashes: HashArray, num_here: int, targets: list[BlockId], source: PeerSource, peer: KvPeer
    ) -> bool:
        """Load and publish the blocks after those that are here, as far as they come; returns whether all did."""
        arrived = counted = 0
        self._missing_blocks += len(targets)

        def publish(count: int) -> None:
            nonlocal arrived, counted
            self.loaded_tokens += (source.num_loaded - counted) * self._info.block_size
            counted = source.num_loaded
            if count > arrived:
                first, end = num_here + arrived, num_here + count
                parent = int(hashes[first - 1, 0]) if first else None
                self._engine.publish(targets[arrived:count], hashes[first:end], parent)
                self._missing_blocks -= count - arrived
                arrived = count

        error: PenstockError | None = None
        origin: Origin | None = None
        try:
            async with asyncio.timeout(_ASK_S):
                origin = await self._ask(source, peer)
            runs = self._engine.find_runs(hashes, num_here, source)
            if runs:
                publish(await self._wait_for(runs, targets, source, publish))
            error = source.error
        except TimeoutError:
            error = DeadlineExceeded(f"worker {peer.worker_id} did not answer within {_ASK_S:g} s")
        except PenstockError as problem:
            error = problem
        finally:
            publish(0)  # counts what came and is of no use
            self._missing_blocks -= len(targets) - arrived
            self._let_go(origin, source)
        if error is not None and not isinstance(error, PinExpired):
            self._speeds.doubted.add(peer.worker_id)
        if arrived < len(targets):
            self.failures += 1
            _log.debug(
                "kv_not_loaded_from_peer",
                worker_id=peer.worker_id,
                blocks=len(targets),
                arrived=arrived,
                error=None if error is None else error.message,
                effect="computed",
            )
        return arrived == len(targets)

    def _source(self, hashes: HashArray, peer: KvPeer, *, is_weighed: bool = False) -> PeerSource:
        return PeerSource(
            hashes,
            self._reader,
            self._speeds.of(peer.worker_id),
            block_bytes=self._info.kv_bytes_per_block,
            block_s=peer.block_s,
            is_weighed=is_weighed,
            num_expected=len(hashes),
            num_ahead=self._missing_blocks,
        )

    async def _wait_for(
        self,
        runs: Sequence[KvRun],
        targets: Sequence[BlockId],
        source: PeerSource,
        publish: Callable[[int], None],
    ) -> int:
        """Load runs; returns the leading blocks that arrived. A cancellation waits until nothing is written any more."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        wanted = targets[: sum(run.num_blocks for run in runs)]
        load = self._engine.load_runs(runs, wanted, source, done.set_result, publish)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            load.cancel()
            await settled(done)
            raise
