"""The pool of encoder processes, which prepare large bodies so that no stream waits for them: see `encoder.py`."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from penstock.core.errors import PenstockError, ProtocolError
from penstock.core.log import get_logger
from penstock.core.wire import encode, unpack_tokens
from penstock.frontend.client_fields import SAME, ClientFields
from penstock.frontend.errors import refusal_of
from penstock.frontend.openai.bodies import ChatRequest, CompletionRequest, GenerationRequest
from penstock.frontend.openai.dialect import EmbeddingOptions, ResponseFields
from penstock.frontend.requests.encoder import (
    LENGTH_BYTES,
    DecodedQuery,
    Encode,
    Encoded,
    MissingFiles,
    ModelName,
    Read,
    ReadQuery,
    Refused,
    Reply,
    Task,
)
from penstock.frontend.requests.encoding import Prompt
from penstock.frontend.requests.route.model import RouteModel
from penstock.frontend.text.models import ModelCache, ServedModel
from penstock.router.service.gateway import Query

LARGE_BYTES = 64 << 10
"""Larger bodies go to an encoder. Decoding and checking any JSON of this size takes at most 5 ms (2 cores of an AMD EPYC)."""

_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_log = get_logger()


@dataclass(frozen=True, slots=True)
class EncodedBody:
    """A decoded request without its prompts, its model, and the tokenized prompts."""

    request: GenerationRequest
    model: ServedModel
    prompts: tuple[Prompt, ...]
    response: ResponseFields | None = None
    messages: bytes | None = None  # to store, encoded
    embedding: EmbeddingOptions | None = None
    fields: ClientFields = SAME


class EncoderPool:
    """Starts encoders on demand and gives each one body at a time. One event loop owns it."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._idle: list[_Process] = []

    async def close(self) -> None:
        """End idle encoders; busy ones end after their task."""
        while self._idle:
            process = self._idle.pop()
            process.end()
            await process.ended()

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator["_Process"]:
        """Lend an encoder once one is free. Cancelling the borrower kills the encoder, so that an abandoned body takes no time from others."""
        async with self._free:
            process = self._idle.pop() if self._idle else await _Process.start()
            try:
                yield process
            except PenstockError:
                self._take_back(process)
                raise
            except BaseException:
                process.end()
                raise
            self._take_back(process)

    def _take_back(self, process: "_Process") -> None:
        if process.is_sound:
            self._idle.append(process)
        else:
            process.end()


class Encoders:
    """Decodes and tokenizes large bodies of the OpenAI API in a pool of encoders."""

    def __init__(
        self, most: int, cache: ModelCache, *, hash_key: bytes, choices_max: int, models_max: int
    ) -> None:
        self._shelf = cache
        self._hash_key = hash_key
        self._choices_max = choices_max
        self._models_max = models_max
        self._pool = EncoderPool(most)

    async def encode(
        self,
        body: Sequence[bytes],
        *,
        dialect: str,
        model_of: Callable[[str], Awaitable[ServedModel]],
        history: Callable[[str], bytes] | None = None,
    ) -> EncodedBody:
        """Decode, check and tokenize a body of an API once an encoder is free; the caller sets the deadline.

        `model_of` gives the model that the body names; `history` gives the encoded messages before those of the body, by the stored answer that it continues.

        Cancelling this kills its encoder, so that an abandoned body takes no time from others.

        Raises:
            PenstockError: the body is invalid, or its model is not served.
        """
        async with self._pool.lend() as process:
            read = Read(body_bytes=sum(map(len, body)), dialect=dialect, choices_max=self._choices_max)
            named = await process.do(read, body)
            if not isinstance(named, ModelName):
                raise _unexpected(named)
            model = await model_of(named.model)
            task = Encode(
                card=model.card,
                source=model.source,
                hash_key=self._hash_key,
                models_max=self._models_max,
                history=history(named.previous)
                if history is not None and named.previous is not None
                else b"",
            )
            encoded = await process.do(task)
            if isinstance(encoded, MissingFiles):
                files = await self._shelf.files(model.source)
                encoded = await process.do(msgspec.structs.replace(task, files=files))
        if not isinstance(encoded, Encoded):
            raise _unexpected(encoded)
        kind = ChatRequest if encoded.is_chat else CompletionRequest
        request: GenerationRequest = msgspec.msgpack.decode(encoded.request, type=kind)
        return EncodedBody(
            request,
            model,
            encoded.prompts,
            encoded.response,
            encoded.messages,
            encoded.embedding,
            encoded.fields,
        )

    async def close(self) -> None:
        """End idle encoders; busy ones end after their task."""
        await self._pool.close()


async def decode_large_query(
    pool: EncoderPool, body: Sequence[bytes], model: RouteModel | None = None
) -> Query:
    """Decode and check a body of the standalone router's `/route`, tokenized by `model`; the caller sets the deadline.

    Raises:
        RequestError: the body is invalid.
    """
    async with pool.lend() as process:
        task = ReadQuery(body_bytes=sum(map(len, body)))
        if model is not None:
            task = msgspec.structs.replace(
                task, directory=model.directory, names=model.names, context_length=model.context_length
            )
        decoded = await process.do(task, body)
    if not isinstance(decoded, DecodedQuery):
        raise _unexpected(decoded)
    return Query(
        model=decoded.model,
        prompt=unpack_tokens(decoded.token_ids) if decoded.token_ids is not None else decoded.text or "",
        cache_salt=decoded.cache_salt,
        session=decoded.session,
        exclude=decoded.exclude,
        slo_ttft_s=decoded.slo_ttft_s,
        slo_itl_s=decoded.slo_itl_s,
    )


class _Process:
    """The frontend's side of one encoder."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._exit: asyncio.Future[int] | None = None
        self.is_sound = True

    @classmethod
    async def start(cls) -> "_Process":
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        # In a thread: forking takes longer the more memory this process has.
        starting = asyncio.get_running_loop().run_in_executor(None, _start, theirs)
        try:
            process = await asyncio.shield(starting)
        except BaseException:
            writer.close()  # the process, if it still starts, ends on the closed socket
            starting.add_done_callback(_reap)
            raise
        _log.info("encoder_started", pid=process.pid)
        return cls(process, reader, writer)

    async def do(self, task: Task, body: Sequence[bytes] = ()) -> Reply:
        """Send a task and wait for its reply; `body` are the bytes after a `Read`.

        Raises:
            PenstockError: the body is invalid, or the process died on it.
        """
        message = encode(task)
        try:
            self._writer.write(len(message).to_bytes(LENGTH_BYTES))
            self._writer.write(message)
            for piece in body:  # piece by piece: one large copy would block the loop for milliseconds
                self._writer.write(piece)
                await self._writer.drain()
            size_bytes = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES))
            reply = _replies.decode(await self._reader.readexactly(size_bytes))
        except (OSError, asyncio.IncompleteReadError) as error:
            self.is_sound = False
            status = await self.ended()
            _log.error("encoder_died", pid=self._process.pid, status=status)
            raise PenstockError(
                f"the process that encodes large bodies ended (status {status}) on this request; the server's log says more"
            ) from error
        if isinstance(reply, Refused):
            raise refusal_of(reply.error)
        return reply

    async def ended(self) -> int:
        """Wait for the process to end; returns its exit status."""
        if self._exit is None:
            self._exit = asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        return await self._exit

    def end(self) -> None:
        self._writer.close()
        self._process.kill()
        if self._exit is None:
            self._exit = asyncio.get_running_loop().run_in_executor(None, self._process.wait)


def _start(link: socket.socket) -> subprocess.Popen[bytes]:
    with link:
        return subprocess.Popen(  # noqa: S603 - no client input in it
            [sys.executable, "-P", "-m", "penstock.frontend.requests.encoder", str(link.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(link.fileno(),),
            process_group=0,  # the frontend handles Ctrl-C; no session of its own, see `Child.spawn`
        )


def _reap(starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    if starting.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, starting.result().wait)


def _unexpected(reply: Reply) -> PenstockError:
    return ProtocolError(f"an encoder answered {type(reply).__name__}, which was not asked for")
