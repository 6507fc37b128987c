"""SGLang behind `seams.Engine`: starts it, gives it calls, and reads its KV events and load."""

import asyncio
import contextlib
import inspect
import os
import signal
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.core.errors import ConfigError, Overloaded, RequestError
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.core.types.instances import Role
from penstock.core.types.requests import FinishReason, KvHandle
from penstock.core.wire import Wire, encode
from penstock.engine.kv_events.subscriber import KvEventSubscriber
from penstock.engine.kv_events.translator import HexSalts
from penstock.engine.launch_host import ThisHost
from penstock.engine.sglang.arguments import (
    PACKAGE,
    Arguments,
    environment,
    make_arguments,
    server_arg_names,
    start_error,
)
from penstock.engine.sglang.outputs import generate_arguments, read_chunk
from penstock.engine.spec import EngineSpec
from penstock.engine.streams.backend import Call, Output, Serving
from penstock.engine.streams.engine import StreamedEngine
from penstock.engine.streams.package import check_gpu, first_line, supported

_log = get_logger()

KV_TRANSFER_KIND = "sglang-bootstrap-1"
_RANK_ARGUMENTS = ("routed_dp_rank", "data_parallel_rank")
"""Arguments of `async_generate` with a request's rank: of newer and of older versions."""
_RUNNING_DEFAULT = 256
_CHUNK_DEFAULT = 8192
"""Assumed for each rank where neither the graph nor SGLang says: requests at once, prompt tokens in a step."""


class Bootstrap(Wire, frozen=True):
    """Where a decode worker asks for a prompt's KV: the payload of `KvHandle`, version 1."""

    host: str
    port: int
    room: int


class SglangEngine(StreamedEngine):
    """Implements `Engine` and `NativeKvTransfer` with SGLang."""

    def __init__(self, spec: EngineSpec) -> None:
        """Make an engine; `start` imports SGLang and loads the model."""
        super().__init__(
            SglangBackend(spec),
            max_waiting_requests=spec.scheduler.max_waiting_requests,
            hash_key=spec.hash_key,
        )

    def kv_transfer_kind(self) -> str:
        return KV_TRANSFER_KIND


class SglangBackend:
    """Implements `Backend` with `sglang.Engine`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._engine: Any = None
        self._host = ThisHost()
        self._arguments: Arguments | None = None
        self._parameters: frozenset[str] = frozenset()
        """Keyword arguments that the installed `async_generate` has."""
        self._rids: dict[int, str] = {}
        self._died = asyncio.Event()

    async def start(self) -> Serving:
        """Start SGLang's processes and load the model; the event loop goes on meanwhile.

        Raises:
            ConfigError: SGLang is missing, does not fit, or cannot start.
        """
        spec = self._spec
        sglang = PACKAGE.load()
        if "device" not in spec.args:
            check_gpu("sglang", spec.device)
        self._arguments = arguments = make_arguments(spec, server_arg_names(sglang), self._host)
        os.environ.update(environment(spec, self._host))
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # outside the main thread
            loop.add_signal_handler(
                signal.SIGQUIT, self._died.set
            )  # what SGLang's processes send when they fail
        try:
            self._engine = await asyncio.to_thread(sglang.Engine, **arguments.server)
        except Exception as error:
            raise start_error(spec, error) from error
        self._parameters = frozenset(inspect.signature(self._engine.async_generate).parameters)
        if spec.data_parallel > 1 and not self._parameters & set(_RANK_ARGUMENTS):
            raise ConfigError(
                f"engine sglang: {sglang.__version__} takes no data-parallel rank with a request ({' or '.join(_RANK_ARGUMENTS)});"
                f" run `{PACKAGE.install} --upgrade`, or start workers with data_parallel 1"
            )
        if "cache_salt" not in self._parameters:
            raise ConfigError(
                f"engine sglang: {sglang.__version__} has no cache_salt, which separates the prompts of tenants; run"
                f" `{PACKAGE.install} --upgrade`"
            )
        with _keeping_signals(loop):
            self._engine.tokenizer_manager.auto_create_handle_loop()
        return await self._serving()

    def check(self, call: Call) -> None:
        if self._spec.role is Role.DECODE:
            _decode(call.request.kv)

    async def generate(self, call: Call) -> AsyncGenerator[Output, None]:
        request = call.request
        kwargs = generate_arguments(call, self._rid(call), self._spec.eos_token_ids)
        if self._spec.data_parallel > 1:
            kwargs |= dict.fromkeys(_RANK_ARGUMENTS, call.rank)
        if is_prefill := request.prefill_only and self._spec.role is Role.PREFILL:
            kwargs |= self._prefill(call.rank)
            yield Output(
                finish_reason=FinishReason.LENGTH,
                kv_payload=encode(
                    Bootstrap(**{name: kwargs[f"bootstrap_{name}"] for name in ("host", "port", "room")})
                ),
            )
        elif self._spec.role is Role.DECODE:
            kwargs |= _decode(request.kv)
        try:
            stream = await self._engine.async_generate(**supported(kwargs, self._parameters))
            async for chunk in stream:
                output = read_chunk(chunk, call, self._spec.eos_token_ids)
                if is_prefill:  # the decode worker samples the first token
                    output = Output(cached_tokens=output.cached_tokens)
                yield output
        except ValueError as error:
            raise RequestError(f"sglang refuses the request: {first_line(error)}") from error
        finally:
            self._rids.pop(call.number, None)

    def cancel(self, call: Call) -> None:
        rid = self._rids.get(call.number)
        if rid is not None and self._engine is not None and not self._died.is_set():
            self._engine.tokenizer_manager.abort_request(rid=rid)

    async def events(self) -> AsyncIterator[tuple[int, Sequence[KvEvent]]]:
        """Yield the KV events of all ranks."""
        assert self._arguments is not None
        address, spec = self._arguments.events, self._spec
        if address is None:
            return
        arrived: asyncio.Queue[tuple[int, Sequence[KvEvent]]] = asyncio.Queue()

        def publish(rank: int, events: Sequence[KvEvent]) -> None:
            arrived.put_nowait((rank, events))

        async with asyncio.TaskGroup() as group:
            ranks = [
                KvEventSubscriber(
                    address.of_rank(rank),
                    block_size=spec.block_size,
                    salt_of=HexSalts(default=spec.card.salt if spec.card is not None else b""),
                    publish=partial(publish, rank),
                    hash_key=spec.hash_key,
                )
                for rank in range(spec.data_parallel)
            ]
            tasks = [group.create_task(rank.run()) for rank in ranks]
            try:
                while True:
                    yield await arrived.get()
            finally:
                for task in tasks:
                    task.cancel()

    async def active_blocks(self) -> Sequence[int] | None:
        loads = sorted(await self._loads(), key=lambda load: getattr(load, "dp_rank", 0) or 0)
        if len(loads) != self._spec.data_parallel:
            return None
        return [load.num_used_tokens // self._spec.block_size for load in loads]

    async def died(self) -> str:
        await self._died.wait()
        return "sglang: one of its processes failed; its own lines above say why"

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(self._host.close)

    async def _serving(self) -> Serving:
        """Read the sizes that SGLang settled on."""
        spec, engine, ranks = self._spec, self._engine, self._spec.data_parallel
        ready = getattr(engine, "_scheduler_init_result", None)
        info = ready.scheduler_infos[0] if ready is not None else engine.scheduler_info
        tokens, requests = spec.max_batch_tokens, spec.max_running_requests
        loads = await self._loads()
        running = sum(getattr(load, "max_running_requests", 0) for load in loads)
        return Serving(
            block_size=spec.block_size,
            num_blocks=info["max_total_num_tokens"] // spec.block_size,
            context_length=min(spec.context_length or 1 << 62, engine.tokenizer_manager.context_len),
            vocab_size=spec.vocab_size,
            max_running_requests=requests or running // ranks or _RUNNING_DEFAULT,
            max_batch_tokens=tokens or _CHUNK_DEFAULT,
            ranks=ranks,
            transferred_prompts_only=True,
            kv_events=self._arguments is not None and self._arguments.events is not None,
        )

    async def _loads(self) -> Sequence[Any]:
        """Read the latest load of each rank; nothing where SGLang is too old to say."""
        read = getattr(self._engine.tokenizer_manager, "get_loads", None)
        return () if read is None else await read()

    def _rid(self, call: Call) -> str:
        """Make an id of fixed length: SGLang aborts every request whose id begins with the given one."""
        rid = self._rids[call.number] = uuid.uuid4().hex
        return rid

    def _prefill(self, rank: int) -> dict[str, Any]:
        """Choose the room of a prompt. Of several ranks, number `room % dp_size` computes it, by which decode workers find it."""
        assert self._arguments is not None
        assert self._arguments.bootstrap is not None
        host, port = self._arguments.bootstrap
        ranks = self._spec.data_parallel
        room = (uuid.uuid4().int & ((1 << 62) - 1)) // ranks * ranks + rank
        return {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room}


def _decode(kv: KvHandle | None) -> dict[str, Any]:
    """Read where a decode worker finds its prompt's KV.

    Raises:
        Overloaded: the request brings none, or of another version, and may be tried elsewhere; SGLang's decode workers compute no prompts.
    """
    if kv is None or not kv.payload:
        raise Overloaded(
            "sglang: a decode worker computes no prompts, and no prefill worker has; see that one is ready",
            retry_after_s=1.0,
        )
    try:
        found = msgspec.msgpack.decode(kv.payload, type=Bootstrap)
    except msgspec.MsgspecError as error:
        raise Overloaded(f"sglang: the KV handle is not of kind {KV_TRANSFER_KIND}: {error}") from error
    return {"bootstrap_host": found.host, "bootstrap_port": found.port, "bootstrap_room": found.room}


@contextlib.contextmanager
def _keeping_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let SGLang install no signal handlers inside: its own for SIGTERM ends the process before it is drained."""

    def refuse(number: int, *_handler: object) -> None:
        _log.debug("signal_handler_refused", signal=number, of="sglang")

    own = loop.add_signal_handler
    setattr(loop, "add_signal_handler", refuse)  # noqa: B010 - a method of this one loop
    try:
        yield
    finally:
        setattr(loop, "add_signal_handler", own)  # noqa: B010
