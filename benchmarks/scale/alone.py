"""One router alone, before more and more workers: memory, and CPU time of what arrives and of a decision.

Each number of workers has a process of its own, so that memory can be told. What arrives was recorded from several simulated
routers over fewer workers.
"""

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from benchmarks.scale.cluster import Size, simulate
from benchmarks.scale.routers import PER_WORKER_S, RAMP_S, WINDOW_S
from benchmarks.scale.traffic import Recording
from penstock.bench.report import BenchReport
from penstock.core import log
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import AllBlocksCleared, BlockStored, Holder
from penstock.core.types.instances import Instance
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import HashArray, PackedHashes, PackedTokens, unpack_hashes
from penstock.router.config import RouterConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.metrics import RouterMetrics
from penstock.router.router import Router
from penstock.runtime.discovery.view import MemoryDiscovery
from penstock.runtime.requests.outbox import CODEC, Event, Load
from penstock.seams import WorkerSink

_DECISIONS = 2000
_LENGTH_BYTES = 4
_CONNECTED_S = 120.0
_UINT64 = b"\xcf"
"""How msgpack begins an integer of 64 bits."""
_BATCH = 100
"""Decisions that are timed together."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Figures of a router before so many workers.

    rss_bytes:        that the router added to its process.
    index_bytes:      of these, the prefix index.
    pairs:            of a worker and a block, in the index.
    whole_cpu_s:      CPU seconds from the start until the index is whole.
    event_us:         CPU time of a KV event message, decoding included.
    load_us:          CPU time of a load report, decoding included.
    decision_us:      CPU time of a decision and its reservation, median of batches.
    input_cores:      CPU seconds for all that arrives in a second.
    """

    workers: int
    rss_bytes: int
    index_bytes: int
    pairs: int
    whole_cpu_s: float
    event_us: float
    load_us: float
    decision_us: float
    input_cores: float


@dataclass(slots=True)
class _Feed:
    """A connection that sends nothing, and takes recorded frames for its sink."""

    worker_id: WorkerId
    sink: WorkerSink

    def subscribe(self, after_sequence: int | None, holder: Holder = Holder.WORKER) -> None:
        pass

    def unsubscribe(self, holder: Holder) -> None:
        pass

    async def close(self) -> None:
        pass

    def take(self, frame: bytes) -> None:
        """Decode a frame and pass it on, as the connection's reader does."""
        match CODEC.decode(frame[_LENGTH_BYTES:]):
            case Load(load=load):
                self.sink.push_load(self.worker_id, load)
            case Event(message=message):
                self.sink.push_event(self.worker_id, message)
            case other:
                raise AssertionError(f"{other} was not recorded")


@dataclass(slots=True)
class _Plane:
    feeds: dict[WorkerId, _Feed] = field(default_factory=dict)

    async def connect(self, instance: Instance, sink: WorkerSink) -> _Feed:
        feed = self.feeds[instance.worker_id] = _Feed(instance.worker_id, sink)
        return feed


@dataclass(slots=True)
class Copies:
    """The recorded workers, as often as it takes."""

    recording: Recording
    workers: int

    def instances(self) -> Iterator[Instance]:
        for copy, instance in self._numbered():
            number = WorkerId(_copied_id(instance.worker_id, copy))
            yield msgspec.structs.replace(instance, worker_id=number, name=f"{instance.name}-{copy}")

    def snapshots(self) -> Iterator[tuple[WorkerId, list[bytes]]]:
        shared = self.recording.shared
        frames = {
            worker_id: [_Renamable(frame, shared) for frame in frames]
            for worker_id, frames in self.recording.snapshots.items()
        }
        for copy, instance in self._numbered():
            renamed = [frame.of(copy) for frame in frames[instance.worker_id]]
            yield WorkerId(_copied_id(instance.worker_id, copy)), renamed

    def frames(self) -> list[tuple[WorkerId, bytes]]:
        """Give the frames of all copies, in the order of arrival."""
        whole, rest = divmod(self.workers, len(self.recording.instances))
        last = {instance.worker_id for instance in self.recording.instances[:rest]}
        copied: list[tuple[WorkerId, bytes]] = []
        for worker_id, frame in self.recording.frames:
            renamable = _Renamable(frame, self.recording.shared)
            copied += [
                (WorkerId(_copied_id(worker_id, copy)), renamable.of(copy))
                for copy in range(whole + (worker_id in last))
            ]
        return copied

    def _numbered(self) -> Iterator[tuple[int, Instance]]:
        instances = self.recording.instances
        for number in range(self.workers):
            yield number // len(instances), instances[number % len(instances)]


class _Renamable:
    """A frame whose blocks can be renamed where they lie in it, but for what prompts have in common."""

    def __init__(self, frame: bytes, shared: HashArray) -> None:
        self._frame = np.frombuffer(frame, dtype=np.uint8)
        little: list[int] = []
        big: list[int] = []
        message = CODEC.decode(frame[_LENGTH_BYTES:])
        at = 0
        for event in getattr(getattr(message, "message", None), "events", ()):
            if isinstance(event, AllBlocksCleared):
                continue
            at = frame.index(event.block_hashes, at)
            own = ~np.isin(unpack_hashes(event.block_hashes), shared)
            little += (at + 8 * np.flatnonzero(own)).tolist()
            parent = event.parent_block_hash if isinstance(event, BlockStored) else None
            if parent is not None and parent not in shared:
                big.append(frame.index(_UINT64 + parent.to_bytes(8, "big"), at) + 1)
        self._little = np.add.outer(np.array(little, dtype=np.intp), np.arange(8))
        self._big = np.add.outer(np.array(big, dtype=np.intp), np.arange(8))

    def of(self, copy: int) -> bytes:
        """Give the frame of a copy; the first is as recorded."""
        other = copy * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF
        renamed = self._frame.copy()
        renamed[self._little] ^= np.frombuffer(other.to_bytes(8, "little"), dtype=np.uint8)
        renamed[self._big] ^= np.frombuffer(other.to_bytes(8, "big"), dtype=np.uint8)
        return renamed.tobytes()


def _copied_id(worker_id: int, copy: int) -> int:
    return copy * 1_000_000 + worker_id


async def measure(recording: Recording, workers: int) -> Alone:
    """Start a router beside so many workers, fill its index, feed it, and have it decide."""
    copies = Copies(recording, workers)
    instances, frames = list(copies.instances()), copies.frames()
    snapshots = list(copies.snapshots())
    discovery = MemoryDiscovery()
    for instance in instances:
        await discovery.register(instance)
    plane = _Plane()
    config = RouterConfig(workers_max=max(1024, workers), indexed_blocks_max=1 << 28)
    metrics, rng = RouterMetrics(None), random.Random(1)
    gc.collect()
    gc.freeze()
    rss_before = _rss_bytes()
    begun_s = time.process_time()
    fleet = Fleet(discovery, plane, config=config, metrics=metrics, rng=rng)  # type: ignore[arg-type]
    router = Router(fleet, config, metrics=metrics, rng=rng)
    running = asyncio.create_task(fleet.run())
    try:
        async with asyncio.timeout(_CONNECTED_S):
            while len(plane.feeds) < workers or not fleet.has_looked:  # noqa: ASYNC110 - each turn connects some
                await asyncio.sleep(0)
        for worker_id, parts in snapshots:
            for part in parts:
                plane.feeds[worker_id].take(part)
        whole_cpu_s = time.process_time() - begun_s
        kinds = _by_kind(frames)
        spent = [_feed(plane, kind) for kind in kinds]
        decision_us = _decide(fleet, router, recording)
        stats = fleet.tree.stats()
        return Alone(
            workers=workers,
            rss_bytes=_rss_bytes() - rss_before,
            index_bytes=stats.num_bytes,
            pairs=stats.pairs,
            whole_cpu_s=whole_cpu_s,
            event_us=1e6 * spent[0] / len(kinds[0]),
            load_us=1e6 * spent[1] / len(kinds[1]),
            decision_us=decision_us,
            input_cores=sum(spent) / recording.seconds,
        )
    finally:
        running.cancel()
        await asyncio.wait((running,))


def _by_kind(
    frames: Sequence[tuple[WorkerId, bytes]],
) -> tuple[list[tuple[WorkerId, bytes]], list[tuple[WorkerId, bytes]]]:
    """Separate event messages and load reports, each in its order."""
    events: list[tuple[WorkerId, bytes]] = []
    loads: list[tuple[WorkerId, bytes]] = []
    for worker_id, frame in frames:
        is_load = isinstance(CODEC.decode(frame[_LENGTH_BYTES:]), Load)
        (loads if is_load else events).append((worker_id, frame))
    return events, loads


def _feed(plane: _Plane, frames: Sequence[tuple[WorkerId, bytes]]) -> float:
    """Feed frames; give the CPU seconds."""
    feeds = [(plane.feeds[worker_id], frame) for worker_id, frame in frames]
    begun_s = time.process_time()
    for feed, frame in feeds:
        feed.take(frame)
    return time.process_time() - begun_s


def _decide(fleet: Fleet, router: Router, recording: Recording) -> float:
    """Decide for recorded prompts, and reserve; give the median batch's microseconds a decision."""
    card = recording.instances[0].card
    text = bytes(4 * max(tokens for _, tokens in recording.prompts))
    requests = [
        Request(
            request_id=RequestId(f"r{number}"),
            model=card.name,
            token_ids=PackedTokens(text[: 4 * tokens]),
            sampling=SamplingParams(max_tokens=1000),
            block_hashes=PackedHashes(hashes.tobytes()),
            salt=card.salt,
        )
        for number, (hashes, tokens) in enumerate(recording.prompts)
    ]
    batches_us = []
    for first in range(0, _DECISIONS, _BATCH):
        chosen = [requests[(first + number) % len(requests)] for number in range(_BATCH)]
        begun_s = time.process_time()
        for request in chosen:
            router.arrived(request)
            plan = router.plan(request)
            assert plan is not None, "there are workers"
            route = plan.decode
            fleet.loads.release(
                fleet.loads.reserve(route.slot, route.prefill_tokens, route.blocks, route.cached_tokens)
            )
        batches_us.append(1e6 * (time.process_time() - begun_s) / _BATCH)
    return median(batches_us)


def _rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux says it")


_RECORDED = Size(workers=50, routers=8, per_worker_s=PER_WORKER_S, ramp_s=RAMP_S, window_s=WINDOW_S)
_QUICK = Size(workers=10, routers=3, per_worker_s=PER_WORKER_S, ramp_s=2.0, window_s=1.0)
_WORKERS, _QUICK_WORKERS = (1000, 2000, 4000, 10_000), (10, 20)
CORES_MAX, DECISION_S_MAX, RSS_BYTES_MAX, WHOLE_S_MAX = 1.0, 0.001, 4e9, 60.0
"""Where a router breaks: its process has one core; a decision delays all others; and a start that takes a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        help=f"numbers of workers (default {' '.join(map(str, _WORKERS))})",
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Record what reaches one of several routers, and feed it to one alone."""
    log.configure("error", process="bench")
    size = _QUICK if options.quick else _RECORDED
    numbers = options.workers or (_QUICK_WORKERS if options.quick else _WORKERS)
    recording = simulate(size, seed=1).recording
    found = [_in_process(recording, number) for number in numbers]
    figures: dict[str, float] = {}
    for alone in found:
        cores = decision_cores(alone, size)
        figures |= {
            f"{name}_w{alone.workers}": value for name, value in asdict(alone).items() if name != "workers"
        }
        figures[f"decision_cores_w{alone.workers}"] = cores
    return BenchReport(
        name="scale-router",
        config={**asdict(size), "numbers": list(numbers), "quick": options.quick},
        figures=figures | breaking(found, size),
    )


def decision_cores(alone: Alone, size: Size) -> float:
    """Give the CPU seconds of one of `size.routers` routers for the decisions of a second."""
    return alone.decision_us * 1e-6 * alone.workers * size.per_worker_s / size.routers


def breaking(found: Sequence[Alone], size: Size) -> dict[str, float]:
    """Give the number of workers at which each figure passes its limit, on straight lines between those measured and beyond the last."""
    figures: dict[str, tuple[Callable[[Alone], float], float]] = {
        "input_and_decisions": (lambda a: a.input_cores + decision_cores(a, size), CORES_MAX),
        "input": (lambda a: a.input_cores, CORES_MAX),
        "decision": (lambda a: a.decision_us * 1e-6, DECISION_S_MAX),
        "rss": (lambda a: float(a.rss_bytes), RSS_BYTES_MAX),
        "whole": (lambda a: a.whole_cpu_s, WHOLE_S_MAX),
    }
    return {
        f"breaks_at_workers_{name}": crossing([(a.workers, of(a)) for a in found], limit)
        for name, (of, limit) in figures.items()
    }


def crossing(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Give where the line through `points` (x, y) first reaches `limit`; infinite where it never does.

    It begins at the origin, and goes on beyond the last point as between the last two.
    """
    points = [(0.0, 0.0), *points]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= limit:
            return x0 + (x1 - x0) * (limit - y0) / (y1 - y0)
    (x0, y0), (x1, y1) = points[-2:]
    return x1 + (x1 - x0) * (limit - y1) / (y1 - y0) if y1 > y0 else float("inf")


def _in_process(recording: Recording, workers: int) -> Alone:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(_measure, recording, workers).result()


def _measure(recording: Recording, workers: int) -> Alone:
    log.configure("error", process="bench")
    return asyncio.run(measure(recording, workers))
