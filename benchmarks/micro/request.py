"""CPU time of one request in a frontend, from the bytes of its HTTP request to those of its answer, without sockets.

Everything of a frontend process runs but the kernel: HTTP, limits, template, tokens, routing, the frames to and from two
workers. Clients and workers are transports in this process, whose time is taken off.
"""

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.frontend.load import Prompts
from benchmarks.frontend.servers import make_model
from benchmarks.runner import expect_at_least
from penstock.bench.report import BenchReport
from penstock.core.framing import FrameReader
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.instances import TEXT_FILES, CardFile, EngineInfo, Instance, ModelCard, Prices, Role
from penstock.core.types.requests import Delta, FinishReason
from penstock.core.wire import pack_tokens
from penstock.deploy.processes.frontend_process import GC_THRESHOLDS
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.server import FrontendServer
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.runtime import handshake
from penstock.runtime.config import PlaneConfig
from penstock.runtime.discovery.view import MemoryDiscovery
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.outbox import CODEC, Deltas, Fetch, FetchChunk, Submit
from penstock.runtime.requests.worker_peer import WorkerPeer
from penstock.seams import RequestPlane, WorkerSink

_CONNECTIONS = 16
_OUTPUT_TOKENS = 64
_STEPS = 4
"""Frames in which the tokens of one answer come."""
_WORKERS = 2
_CONTEXT_TOKENS = 131_072
_FRAME_BYTES_MAX = 1 << 24
_TOKENS = pack_tokens(range(300, 300 + _OUTPUT_TOKENS // _STEPS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=int, default=500, metavar="N", help="of a round (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="the least counts (default 20)")


def run(options: argparse.Namespace) -> BenchReport:
    """Send chats of 150 words with answers of 64 tokens, streamed and whole, over 16 connections.

    The least of the rounds counts: what else runs on the machine only adds to it.
    """
    expect_at_least(options, requests=1, rounds=1)
    if options.quick:
        options.requests, options.rounds = 100, 2
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        model = make_model(Path(directory) / "model")
        samples = uvloop.run(_measure(model, options.requests, options.rounds))
    return BenchReport(
        name="request",
        config={
            "requests": options.requests,
            "rounds": options.rounds,
            "connections": _CONNECTIONS,
            "output_tokens": _OUTPUT_TOKENS,
            "steps": _STEPS,
            "workers": _WORKERS,
            "quick": options.quick,
        },
        samples=samples,
        figures={name: min(values) for name, values in samples.items()},
    )


async def _measure(model: Path, requests: int, rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    async with in_process(model) as clients:
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        for _ in range(rounds + 1):
            for name, stream in (("stream_us", True), ("unary_us", False)):
                took_s = await clients.send(requests, Prompts(_OUTPUT_TOKENS, stream=stream))
                samples.setdefault(name, []).append(1e6 * took_s / requests)
    return {name: values[1:] for name, values in samples.items()}


class _Outside:
    """The time that clients and workers take."""

    def __init__(self) -> None:
        self.taken_s = 0.0

    @contextmanager
    def taking(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.taken_s += time.perf_counter() - began_s


class _Transport(asyncio.Transport):
    """Gives what is written to a function; always has room."""

    def __init__(self, take: Callable[[bytes], None], outside: _Outside) -> None:
        super().__init__()
        self._take = take
        self._outside = outside

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._outside.taking():
            self._take(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        with self._outside.taking():
            self._take(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


class _Plane:
    """Connects to workers that answer each request in the next turn of the loop."""

    def __init__(self, outside: _Outside, files: Mapping[str, bytes]) -> None:
        self._outside = outside
        self._files = files

    async def connect(self, instance: Instance, sink: WorkerSink) -> WorkerPeer:
        peer = WorkerPeer(instance, sink, Identity(), PlaneConfig())
        challenge = handshake.challenge()
        reader, loop = FrameReader(_FRAME_BYTES_MAX), asyncio.get_running_loop()
        waiting: list[RequestId] = []

        def take(data: bytes) -> None:
            for payload in reader.feed(data):
                match CODEC.decode(payload):
                    case handshake.Hello() as hello:
                        reply = handshake.reply(Identity(), challenge, hello)
                        loop.call_soon(peer.channel.data_received, CODEC.encode(reply))
                    case Submit(request=request):
                        if not waiting:
                            loop.call_soon(answer)
                        waiting.append(request.request_id)
                    case Fetch(fetch_id=fetch_id, sha256=digest):
                        chunk = FetchChunk(fetch_id=fetch_id, data=self._files[digest], last=True)
                        loop.call_soon(peer.channel.data_received, CODEC.encode(chunk))
                    case _:
                        pass

        def answer() -> None:
            with self._outside.taking():
                frames = b"".join(CODEC.encode(_step(waiting, index)) for index in range(_STEPS))
                waiting.clear()
            peer.channel.data_received(frames)

        peer.channel.connection_made(_Transport(take, self._outside))
        peer.channel.data_received(CODEC.encode(challenge))
        await asyncio.sleep(0)  # the reply
        await peer.enter()
        return peer


def _step(requests: Sequence[RequestId], index: int) -> Deltas:
    is_last = index == _STEPS - 1
    return Deltas(
        deltas=tuple(
            Delta(
                request_id=request_id,
                token_ids=_TOKENS,
                finish_reason=FinishReason.LENGTH if is_last else None,
                cached_tokens=0 if index == 0 else None,
            )
            for request_id in requests
        )
    )


class _Client:
    """One connection, that sends the next request when it has an answer."""

    def __init__(self, connect: Callable[[], asyncio.Protocol], outside: _Outside) -> None:
        self.protocol = connect()
        self._outside = outside
        self._end = b""
        self._received = b""
        self._answered: Callable[[bool], bytes | None] = lambda _: None
        self.protocol.connection_made(_Transport(self._take, outside))

    def begin(self, end: bytes, answered: Callable[[bool], bytes | None]) -> None:
        """Send a first request; `answered` gives the next one, None after the last."""
        self._end, self._answered = end, answered
        first = answered(True)
        if first is not None:
            self.protocol.data_received(first)

    def _take(self, data: bytes) -> None:
        self._received += data
        if not self._received.endswith(self._end):
            return
        head, self._received = self._received[:12], b""
        following = self._answered(head == b"HTTP/1.1 200")
        if following is not None:
            asyncio.get_running_loop().call_soon(self.protocol.data_received, following)


class Clients:
    """Sends requests over standing connections."""

    def __init__(self, connect: Callable[[], asyncio.Protocol], outside: _Outside) -> None:
        self._outside = outside
        self._clients = [_Client(connect, outside) for _ in range(_CONNECTIONS)]
        self._next = 0

    async def send(self, requests: int, prompts: Prompts) -> float:
        """Send so many requests, and give the CPU seconds that the frontend took for them."""
        body = json.dumps(prompts.body("bench")).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\n"
            b"Accept: */*\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        waiting = deque(
            head + body.replace(b"########", b"%08d" % number)
            for number in range(self._next, self._next + requests)
        )
        self._next += requests
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        open_requests = failures = 0

        def answered(is_sound: bool) -> bytes | None:  # noqa: FBT001 - one kind of answer
            nonlocal open_requests, failures
            open_requests -= 1
            failures += not is_sound
            if waiting:
                open_requests += 1
                return waiting.popleft()
            if not open_requests and not ended.done():
                ended.set_result(None)
            return None

        began_s, outside_s = time.process_time(), self._outside.taken_s
        open_requests = len(self._clients)
        for client in self._clients:
            client.begin(b"\r\n0\r\n\r\n" if prompts.stream else b"}", answered)
        await ended
        assert not failures, f"{failures} of {requests} requests failed"
        return time.process_time() - began_s - (self._outside.taken_s - outside_s)


@asynccontextmanager
async def in_process(model: Path) -> AsyncIterator[Clients]:
    """Run a frontend before two workers; gives its clients."""
    outside, registry, discovery, rng = _Outside(), CollectorRegistry(), MemoryDiscovery(), random.Random(0)
    card, files = _card(model)
    for number in range(1, _WORKERS + 1):
        await discovery.register(_instance(card, number))
    plane = _Plane(outside, files)
    dispatcher = Dispatcher(discovery, cast("RequestPlane", plane), rng=rng, registry=registry)
    frontend = Frontend(FrontendConfig(port=0), dispatcher, hash_key=DEFAULT_KEY, registry=registry, rng=rng)
    async with dispatcher:
        await dispatcher.serving()
        server = FrontendServer(frontend)
        await server.start()
        try:
            yield Clients(server.connection, outside)
        finally:
            await server.close()


def _card(model: Path) -> tuple[ModelCard, dict[str, bytes]]:
    """Give the model's card, and its files by their hash."""
    contents = {name: (model / name).read_bytes() for name in TEXT_FILES[:2]}
    files = {sha256(content).hexdigest(): content for content in contents.values()}
    listed = tuple(
        CardFile(name=name, sha256=digest, size_bytes=len(content))
        for (name, content), digest in zip(contents.items(), files, strict=True)
    )
    card = ModelCard(
        name="bench",
        context_length=_CONTEXT_TOKENS,
        block_size=16,
        salt=b"bench",
        eos_token_ids=(1,),
        files=listed,
    )
    return card, files


def _instance(card: ModelCard, number: int) -> Instance:
    return Instance(
        worker_id=WorkerId(number),
        name=f"worker-{number}",
        address=f"memory://{number}",
        role=Role.AGGREGATED,
        card=card,
        engine=EngineInfo(
            block_size=card.block_size,
            total_blocks=65_536,
            context_length=card.context_length,
            max_batch_tokens=8_192,
            max_running_requests=256,
            announces=True,
        ),
        prices=Prices(
            prefill_step_s=2e-3,
            prefill_token_s=5e-5,
            prefill_pair_s=1e-9,
            decode_step_s=5e-3,
            decode_sequence_s=1e-4,
            decode_token_s=1e-7,
        ),
    )
