"""Measures contenders in turns; figures are medians, and ratios of times measured side by side."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.transfer.contenders import OPS, Contender, Ours
from benchmarks.transfer.nixl_peer import VARIANTS
from benchmarks.transfer.shapes import POOL_BYTES, SHAPES, SMALL, Shape
from penstock.core.descriptors import TransferOp
from penstock.transfer import Arena, TransferAgent, TransferConfig

Samples = dict[str, list[float]]
"""Seconds, one value a round, by contender, direction and shape."""

_BESIDE = {
    "shm": ("memcpy", "nixl"),
    "shm_private": ("memcpy", "nixl"),
    "ours_nixl": ("nixl",),
    "tcp": ("nixl_tcp",),
    "uds": ("nixl_tcp",),
    "file": ("fio",),
}


async def run_rounds(
    contenders: Sequence[Contender], shapes: Sequence[Shape], rounds: int, repeats: int
) -> Samples:
    """Have all contenders move each shape, round after round, starting with another one each round.

    A contender's time in a round is the median of its repeats.
    """
    samples: Samples = {}
    for shape in shapes:
        for op in OPS:
            for number in range(rounds):
                first = number % len(contenders) if contenders else 0
                for contender in (*contenders[first:], *contenders[:first]):
                    seconds = await contender.move(op, shape, repeats)
                    samples.setdefault(key(contender.name, op, shape), []).append(statistics.median(seconds))
    return samples


def figures_of(samples: Samples, names: Sequence[str]) -> dict[str, float]:
    """Give GB/s, microseconds and ratios. NIXL's figure is its best variant's for each shape."""
    best = dict(_best(samples))
    shown = {**samples, **best}
    figures: dict[str, float] = {}
    for name in [*(name for name in names if name not in {"memcpy", "fio"}), "nixl", "nixl_tcp"]:
        if any(name == f"{kind}_{variant}" for kind in ("nixl", "nixl_tcp") for variant in VARIANTS):
            continue
        for op in OPS:
            for shape in SHAPES:
                seconds = shown.get(key(name, op, shape))
                if seconds is None:
                    continue
                figures[f"{name}_{op.value}_{shape.name}_gb_per_s"] = _gb_per_s(seconds, shape)
                for other in _BESIDE.get(name, ()):
                    beside = shown.get(key(other, op, shape))
                    if beside is not None:
                        ratio = statistics.median(b / s for b, s in zip(beside, seconds, strict=True))
                        figures[f"{name}_{op.value}_{shape.name}_over_{other}"] = ratio
        small = shown.get(key(name, TransferOp.WRITE, SMALL))
        if small is not None:
            figures[f"{name}_4KiB_us"] = statistics.median(small) * 1e6
    return figures


def limits_of(samples: Samples) -> dict[str, float]:
    """Give the best speeds of memory and disk."""
    limits = {}
    for shape in SHAPES:
        both = [second for op in OPS for second in samples.get(key("memcpy", op, shape), ())]
        if both:
            limits[f"memcpy_{shape.name}_gb_per_s"] = _gb_per_s(both, shape)
    for shape in SHAPES:
        for op in OPS:
            seconds = samples.get(key("fio", op, shape))
            if seconds:
                size = "" if shape.name.endswith("x1MiB") else f"_{shape.name.partition('x')[2]}"
                limits[f"fio_{op.value}{size}_gb_per_s"] = _gb_per_s(seconds, shape)
    return limits


def key(name: str, op: TransferOp, shape: Shape) -> str:
    return f"{name}_{op.value}_{shape.name}_s"


def _best(samples: Mapping[str, list[float]]) -> Iterator[tuple[str, list[float]]]:
    for kind in ("nixl", "nixl_tcp"):
        for op in OPS:
            for shape in (*SHAPES, SMALL):
                tried = [samples.get(key(f"{kind}_{variant}", op, shape)) for variant in VARIANTS]
                known = [seconds for seconds in tried if seconds]
                if known:
                    yield key(kind, op, shape), min(known, key=statistics.median)


def _gb_per_s(seconds: Sequence[float], shape: Shape) -> float:
    return shape.num_bytes / statistics.median(seconds) / 1e9


_TIMES = 101
_TINY = Shape("2048x16B", 2048, 16)
_MANY = Shape("8192x32KiB", 8192, 32 << 10)


async def overheads(shm: Ours | None) -> dict[str, float]:
    """Measure them; what needs two processes by `shm`, where that works."""
    figures = await _of_an_agent()
    if shm is not None:
        prepared = shm.prepare(SHAPES[1])
        posts = []
        for number in range(_TIMES):
            began_s = time.perf_counter()
            handle = prepared.post(OPS[number % 2])
            posts.append(time.perf_counter() - began_s)
            await handle.wait()
        figures["post_prepared_2048_us"] = statistics.median(posts) * 1e6
        figures["post_to_done_2048x16B_us"] = statistics.median(await shm.move(OPS[0], _TINY, _TIMES)) * 1e6
    return figures


async def _of_an_agent() -> dict[str, float]:
    config = TransferConfig(listen=("memory", "unix", "tcp://127.0.0.1:0"))
    async with TransferAgent("measured", config) as agent:
        with Arena.create(POOL_BYTES) as arena, Arena.create(POOL_BYTES) as other:
            here, there = _MANY.blocks()
            seconds = []
            for _ in range(9):
                began_s = time.perf_counter()
                local, remote = agent.register(arena), agent.register(other)
                agent.prepare(local.blocks(here, _MANY.size_bytes), remote.blocks(there, _MANY.size_bytes))
                seconds.append(time.perf_counter() - began_s)
                length = len(agent.metadata([local]))
                await agent.deregister(local)
                await agent.deregister(remote)
    return {
        "register_prepare_8192_ms": statistics.median(seconds) * 1e3,
        "metadata_one_slab_bytes": length,
    }
