"""A fake `sglang`: `Engine` and what the adapter uses of it, with the names, shapes and habits of 0.5.23."""

import asyncio
import dataclasses
import json
import os
import signal
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from penstock.core.types.events import AllBlocksCleared, BlockRemoved
from penstock.core.types.requests import FinishReason, SamplingParams
from penstock.core.wire import unpack_hashes
from penstock.testing.engines.probe import EngineSetup
from tests.fakes.scheduler import FakeScheduler
from tests.fakes.sglang_ranks import join_ranks

MODEL = SimpleNamespace(vocab_size=256, eos_token_ids=(), context_length=256)
"""What a checkpoint says; tests set it."""
CALLS: list[dict[str, Any]] = []
"""Arguments of every `async_generate`."""
ROOMS: dict[tuple[str, int, int], "asyncio.Future[None]"] = {}
"""Bootstrap rooms: done once the KV of a prompt is there."""
ROOMS_DIR = os.environ.get("FAKE_SGLANG_ROOMS")
"""Directory of rooms, for engines in several processes."""
_TOP_K_ALL = 1 << 30


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    skip_tokenizer_init: bool = False
    incremental_streaming_output: bool = False
    page_size: int | None = None
    context_length: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    base_gpu_id: int = 0
    device: str | None = None
    host: str = "127.0.0.1"
    mem_fraction_static: float | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    chunked_prefill_size: int | None = None
    attention_backend: str | None = None
    enable_dp_attention: bool = False
    enable_deterministic_inference: bool = False
    disable_radix_cache: bool = False
    disaggregation_mode: str = "null"
    disaggregation_transfer_backend: str = "mooncake"
    disaggregation_bootstrap_port: int = 8998
    disaggregation_decode_enable_radix_cache: bool = False
    kv_events_config: str | None = None
    log_level: str = "info"


class TokenizerManager:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.context_len = min(engine.server_args.context_length or 1 << 30, MODEL.context_length)
        self.event_loop = None

    def auto_create_handle_loop(self) -> None:
        if self.event_loop is None:
            self.event_loop = asyncio.get_running_loop()
            self.event_loop.add_signal_handler(signal.SIGTERM, lambda: None)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        for other, request_ids in list(self._engine.running.items()):
            if other.startswith(rid):  # the scheduler compares beginnings
                for request_id in request_ids:
                    self._engine.scheduler.abort(request_id)

    async def get_loads(self, include=None, dp_rank=None):
        scheduler = self._engine.scheduler
        load = scheduler.engine.load() if scheduler.is_started else SimpleNamespace(active_blocks=0)
        size = self._engine.server_args.page_size
        running = self._engine.scheduler.setup.max_running_requests
        return [SimpleNamespace(num_used_tokens=load.active_blocks * size, max_running_requests=running)]


class Engine:
    server_args_class = ServerArgs

    def __init__(self, **kwargs: Any) -> None:
        self.server_args = args = ServerArgs(**kwargs)
        if not args.incremental_streaming_output or not args.skip_tokenizer_init:
            raise NotImplementedError("this fake streams increments of ids")
        if args.nnodes > 1:
            join_ranks(args)
            if args.node_rank > 0:
                return
        setup = EngineSetup(
            block_size=args.page_size or 1,
            kv_blocks=(args.max_total_tokens or 4096) // (args.page_size or 1),
            context_length=min(args.context_length or 1 << 30, MODEL.context_length),
            max_batch_tokens=args.chunked_prefill_size or 8192,
            max_running_requests=args.max_running_requests or 64,
            max_waiting_requests=100_000,
        )
        self.scheduler = FakeScheduler(setup, MODEL.vocab_size, MODEL.eos_token_ids)
        self.running: dict[str, list] = {}
        if args.kv_events_config is not None:
            publisher = KvPublisher(self.scheduler, json.loads(args.kv_events_config))
            self.scheduler.on_events = publisher.publish
            self._publisher = publisher
        info = {"status": "ready", "max_total_num_tokens": setup.kv_blocks * setup.block_size}
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[info])
        self.tokenizer_manager = TokenizerManager(self)

    async def async_generate(
        self,
        prompt=None,
        sampling_params=None,
        input_ids=None,
        return_logprob=False,
        logprob_start_len=None,
        top_logprobs_num=None,
        lora_path=None,
        stream=False,
        bootstrap_host=None,
        bootstrap_port=None,
        bootstrap_room=None,
        routed_dp_rank=None,
        rid=None,
        priority=None,
        *,
        cache_salt=None,
    ):
        CALLS.append({name: value for name, value in locals().items() if name != "self"})
        params = dict(sampling_params)
        if not -2 <= params["frequency_penalty"] <= 2:
            raise ValueError(f"frequency_penalty must be in [-2, 2], got {params['frequency_penalty']}.")
        if not -2 <= params["presence_penalty"] <= 2:
            raise ValueError(f"presence_penalty must be in [-2, 2], got {params['presence_penalty']}.")
        if not 0 < params["repetition_penalty"] <= 2:
            raise ValueError(f"repetition_penalty must be in (0, 2], got {params['repetition_penalty']}.")
        assert stream
        sampling = SamplingParams(
            max_tokens=params["max_new_tokens"],
            min_tokens=params["min_new_tokens"],
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=None if params["top_k"] in (-1, _TOP_K_ALL) else params["top_k"],
            min_p=params["min_p"],
            seed=params.get("sampling_seed"),
            stop_token_ids=tuple(params["stop_token_ids"]),
            ignore_eos=params["ignore_eos"],
            logprobs=top_logprobs_num if return_logprob else None,
        )
        room = (bootstrap_host, bootstrap_port, bootstrap_room)
        return self._stream(rid, list(input_ids), sampling, (cache_salt or "").encode(), room)

    async def _stream(self, rid, input_ids, sampling, salt, room):
        mode = self.server_args.disaggregation_mode
        meta = {"id": rid, "prompt_tokens": len(input_ids), "completion_tokens": 0, "cached_tokens": 0}
        if mode != "null" and None in room:
            yield _abort(meta, "Disaggregated request received without bootstrap room id.", 400)
            return
        if mode == "decode":
            try:
                await asyncio.wait_for(_filled(room), timeout=0.5 if ROOMS_DIR is None else 10)
            except TimeoutError:
                yield _abort(
                    meta, f"Decode handshake failed for request rank=0 {rid=} bootstrap_room={room[2]}", 500
                )
                return
        holder: list = []
        self.running[rid] = holder
        try:
            async for delta in self.scheduler.serve(input_ids, sampling, salt=salt, holder=holder):
                ids = list(memoryview(delta.token_ids).cast("i")) if delta.token_ids else []
                meta["completion_tokens"] += len(ids)
                meta["cached_tokens"] = delta.cached_tokens or meta["cached_tokens"]
                if mode == "prefill":
                    _fill(room)
                    yield {
                        "output_ids": ids,
                        "meta_info": meta | {"finish_reason": {"type": "length", "length": 0}},
                    }
                    return
                yield _chunk(meta, delta, ids)
                if delta.finish_reason is not None:
                    return
            yield _abort(meta, "Aborted", None)
        finally:
            del self.running[rid]

    def shutdown(self) -> None:
        self.scheduler.stop()
        if self.server_args.kv_events_config is not None:
            self._publisher.close()


class KvPublisher:
    """Publishes KV events over ZeroMQ: `[topic, number, [time, events, rank]]`, hashes signed and of SGLang's own making."""

    def __init__(self, scheduler: FakeScheduler, config: dict[str, Any]) -> None:
        import zmq

        self._scheduler = scheduler
        self._numbers = count()
        self._topic = config["topic"].encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        assert config.get("bind") or config["endpoint"].startswith("ipc://")
        self._socket.bind(config["endpoint"])
        self._kept: list[tuple[bytes, bytes]] = []
        self._is_closed = False
        self._replayer = threading.Thread(target=self._replay, args=(config["replay_endpoint"],), daemon=True)
        self._replayer.start()

    def _replay(self, endpoint: str) -> None:
        import zmq

        with self._context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(endpoint)
            while not self._is_closed:
                if not router.poll(20):
                    continue
                client, _, start = router.recv_multipart()
                for number, payload in self._kept[int.from_bytes(start, "big") :]:
                    router.send_multipart([client, b"", number, payload])
                router.send_multipart([client, b"", b"\xff" * 8, b""])

    def publish(self, events) -> None:
        batch = [0.0, [self._event(event) for event in events], 0]
        number = next(self._numbers).to_bytes(8, "big")
        self._kept.append((number, msgspec.msgpack.encode(batch)))
        self._socket.send_multipart([self._topic, *self._kept[-1]])

    def close(self) -> None:
        self._is_closed = True
        self._replayer.join()
        self._socket.close()
        self._context.term()

    def _event(self, event) -> dict[str, Any]:
        if isinstance(event, AllBlocksCleared):
            return {"type": "AllBlocksCleared"}
        hashes = unpack_hashes(event.block_hashes).tolist()
        named = {"block_hashes": [_signed(low64) for low64 in hashes], "medium": "GPU"}
        if isinstance(event, BlockRemoved):
            return {"type": "BlockRemoved", **named}
        parent = event.parent_block_hash
        described = [self._scheduler.tokens_of[low64] for low64 in hashes]
        return {
            "type": "BlockStored",
            **named,
            "parent_block_hash": None if parent is None else _signed(parent),
            "token_ids": [token_id for tokens, _, _ in described for token_id in tokens],
            "block_size": event.block_size,
            "lora_id": None,
            "cache_salt": described[0][2].decode() or None,
            "session_id": None,
        }


def _fill(room: tuple[str, int, int]) -> None:
    if ROOMS_DIR is None:
        _in_memory(room).set_result(None)
    else:
        Path(ROOMS_DIR, f"{room[1]}-{room[2]}").touch()


async def _filled(room: tuple[str, int, int]) -> None:
    if ROOMS_DIR is None:
        await _in_memory(room)
        return
    path = f"{ROOMS_DIR}/{room[1]}-{room[2]}"
    while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240, PTH110 - another process makes it
        await asyncio.sleep(0.005)


def _in_memory(room: tuple[str, int, int]) -> "asyncio.Future[None]":
    return ROOMS.setdefault(room, asyncio.get_running_loop().create_future())


def _signed(low64: int) -> int:
    other = low64 * 0x9E3779B97F4A7C15 % (1 << 64)
    return other - (1 << 64) if other >= 1 << 63 else other


def _chunk(meta: dict[str, Any], delta: Any, ids: list[int]) -> dict[str, Any]:
    finish = None
    if delta.finish_reason is FinishReason.LENGTH:
        finish = {"type": "length", "length": meta["completion_tokens"]}
    elif delta.finish_reason is FinishReason.STOP:
        finish = {"type": "stop", "matched": ids[-1]}
    meta = meta | {"finish_reason": finish}
    if delta.logprobs:
        meta["output_token_logprobs"] = [(each.logprob, each.token_id, None) for each in delta.logprobs]
        meta["output_top_logprobs"] = [
            [(value, token_id, None) for token_id, value in each.top] or None for each in delta.logprobs
        ]
    return {"output_ids": ids, "meta_info": meta}


def _abort(meta: dict[str, Any], message: str, status_code: int | None) -> dict[str, Any]:
    reason = {"type": "abort", "message": message, "status_code": status_code, "err_type": None}
    return {"output_ids": [], "meta_info": meta | {"finish_reason": reason}}
