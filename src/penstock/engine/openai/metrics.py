"""Reads a server's load from its Prometheus metrics."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from penstock.core.types.load import ModelLoad

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? +([^ ]+)(?: +-?\d+)?")
_BLOCK_COUNT = re.compile(r'(?:^|,)num_gpu_blocks="([0-9]{1,12})"')
_BLOCK_SIZE = re.compile(r'(?:^|,)block_size="([0-9]{1,6})"')
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_BLOCKS = "vllm:cache_config_info"
_TOKENS = "sglang:max_total_num_tokens"
_WORKERS_MAX, _COUNT_MAX = 1_000_000, 10**15
_LINE_CHARACTERS_MAX = 16_384
_LINES_MAX = 20_000
"""Lines that are looked at: vLLM has 5,000, and reading goes on at every `load_interval_s`."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server's load, whoever sent the requests; None for what it does not tell.

    kv_usage:  share of the KV cache in use, 0 to 1
    kv_tokens: tokens that the KV cache holds
    block_size: tokens of a KV block
    workers:   that share the load; everything is of all of them together
    queued_tokens: prompt tokens not computed yet
    context_tokens: of requests that are answered
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_tokens: int | None = None
    block_size: int | None = None
    workers: int = 1
    queued_tokens: int | None = None
    context_tokens: int | None = None


def deployment_load(load: ModelLoad) -> ServerLoad:
    """Give the load of another deployment of Penstock; what it says is bounded, as it comes from elsewhere."""
    workers = min(max(load.workers, 1), _WORKERS_MAX)
    size, total = max(load.block_size, 1), max(load.total_blocks, 0)
    return ServerLoad(
        running=_count(load.running_requests),
        waiting=_count(load.waiting_requests),
        kv_usage=min(max(load.active_blocks / total, 0.0), 1.0) if total else None,
        kv_tokens=_count(total * size) or None,
        block_size=size,
        workers=workers,
        queued_tokens=_count(load.queued_prefill_tokens),
        context_tokens=_count(load.context_tokens),
    )


def _count(number: int) -> int:
    return min(max(number, 0), _COUNT_MAX)


def read_load(text: str) -> ServerLoad:
    """Read what is known of vLLM's, SGLang's and llama.cpp's metrics; engines of one server (data parallel) are added.

    TensorRT-LLM answers with the statistics of its latest iterations as JSON, which tell the size of its KV cache.
    """
    if text.lstrip()[:1] == "[":
        return _trtllm_load(text)
    running = waiting = kv_tokens = block_size = None
    usages: list[float] = []
    for name, labels, value in _samples(text):
        if name in _RUNNING:
            running = (running or 0) + round(value)
        elif name in _WAITING:
            waiting = (waiting or 0) + round(value)
        elif name in _USAGE:
            usages.append(value)
        elif name == _BLOCKS:
            blocks, size = _BLOCK_COUNT.search(labels), _BLOCK_SIZE.search(labels)
            if blocks is not None and size is not None:
                block_size = int(size[1])
                kv_tokens = (kv_tokens or 0) + int(blocks[1]) * block_size
        elif name == _TOKENS:
            kv_tokens = (kv_tokens or 0) + round(value)
    usage = min(max(sum(usages) / len(usages), 0.0), 1.0) if usages else None
    return ServerLoad(running, waiting, usage, kv_tokens, block_size)


def _trtllm_load(text: str) -> ServerLoad:
    try:
        iterations = _iterations.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return ServerLoad()
    caches = [each.kv_cache for each in iterations if each.kv_cache is not None]
    if not caches or not 0 <= caches[-1].blocks * caches[-1].block_size <= _COUNT_MAX:
        return ServerLoad()
    return ServerLoad(kv_tokens=caches[-1].blocks * caches[-1].block_size, block_size=caches[-1].block_size)


class _KvCacheStats(msgspec.Struct):
    blocks: int = msgspec.field(name="maxNumBlocks", default=0)
    block_size: int = msgspec.field(name="tokensPerBlock", default=0)


class _Iteration(msgspec.Struct):
    kv_cache: _KvCacheStats | None = msgspec.field(name="kvCacheStats", default=None)


_iterations = msgspec.json.Decoder(list[_Iteration])


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield (name, labels, value) of the metrics above; other lines and values that are no count are skipped."""
    wanted = (*_RUNNING, *_WAITING, *_USAGE, _BLOCKS, _TOKENS)
    for line in text.split("\n", _LINES_MAX)[:_LINES_MAX]:
        if not line.startswith(wanted) or len(line) > _LINE_CHARACTERS_MAX:
            continue
        sample = _SAMPLE.fullmatch(line.strip())
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if 0 <= value < 1e15:  # neither NaN nor infinite
            yield sample[1], sample[2] or "", value
