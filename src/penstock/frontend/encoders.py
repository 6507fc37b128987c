"""Encoder processes, which decode and tokenize large bodies: both sides. `python -m penstock.frontend.encoders FD` is one, FD its socket.

Decoding and checking 8 MiB of JSON takes 10 ms to 2 s, rendering and tokenizing more, mostly with the GIL held. In the frontend's
process every stream would wait.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from penstock.core.errors import ErrorInfo, PenstockError, ProtocolError
from penstock.core.log import get_logger
from penstock.core.types.instances import ModelCard
from penstock.core.wire import PackedTokens, Wire, encode, pack_tokens, unpack_tokens
from penstock.frontend.apis.bodies import ChatRequest, CompletionRequest, GenerationRequest
from penstock.frontend.apis.chat import CHAT, COMPLETIONS
from penstock.frontend.apis.decoding import nested_too_deeply
from penstock.frontend.apis.dialect import EmbeddingOptions, ParsedBody, ResponseFields
from penstock.frontend.apis.messages_answer import COUNT_TOKENS, MESSAGES
from penstock.frontend.apis.responses_answer import RESPONSES
from penstock.frontend.apis.responses_store import stored_messages
from penstock.frontend.apis.tokens import TOKENIZE
from penstock.frontend.embeddings import EMBEDDINGS
from penstock.frontend.encoding import EncodedPrompt, encoding_of, without_prompts
from penstock.frontend.errors import SAME, ClientFields, refusal_of
from penstock.frontend.route_query import RouteModel, decode_query
from penstock.frontend.text.models import MODELS_MAX, ModelCache, ServedModel
from penstock.router.gateway import Query

DIALECTS = {
    dialect.name: dialect
    for dialect in (CHAT, COMPLETIONS, MESSAGES, RESPONSES, COUNT_TOKENS, TOKENIZE, EMBEDDINGS)
}
"""Every API whose bodies an encoder decodes, by name."""
LENGTH_BYTES = 8
_FRAMES_MAX = 800
"""Levels of JSON and calls: fewer than a frontend has, which decodes once more what came through here."""


class ReadBody(Wire, frozen=True, tag="read"):
    """Decode and check a body; its bytes follow the message. The reply is `ModelName`."""

    body_bytes: int
    dialect: str
    choices_max: int


class EncodeBody(Wire, frozen=True, tag="encode"):
    """Tokenize the body that was read last for the model `card`, with the files of `source`. The reply is `EncodedReply` or `MissingFiles`.

    After `MissingFiles` it is sent again with `files`.
    """

    card: ModelCard
    source: ModelCard
    hash_key: bytes
    files: dict[str, bytes] | None = None
    history: bytes = b""  # encoded messages that the body continues


class ReadQuery(Wire, frozen=True, tag="read_query"):
    """Decode and check a body of the standalone router's `/route`; its bytes follow the message. The reply is `DecodedQuery`.

    The text of requests for one of `names` is tokenized by the model of `directory`.
    """

    body_bytes: int
    directory: str = ""
    names: tuple[str, ...] = ()
    context_length: int = 0


class ModelName(Wire, frozen=True, tag="named"):
    """The model named in the body, and the stored answer that it continues."""

    model: str
    previous: str | None = None


class MissingFiles(Wire, frozen=True, tag="lacks"):
    """The encoder does not have the model's files."""


class EncodedReply(Wire, frozen=True, tag="encoded"):
    """The body's prompts, and the rest of the request as msgpack; `messages`: those to store, encoded; `response`, `embedding` and `fields`: as in `ParsedBody`."""

    request: bytes
    prompts: tuple[EncodedPrompt, ...]
    is_chat: bool
    messages: bytes | None = None
    response: ResponseFields | None = None
    embedding: EmbeddingOptions | None = None
    fields: ClientFields = SAME


class DecodedQuery(Wire, frozen=True, tag="query"):
    """A `Query`; of `token_ids` and `text` one is its prompt."""

    model: str
    token_ids: PackedTokens | None = None
    text: str | None = None
    cache_salt: str | None = None
    session: str | None = None
    exclude: tuple[str, ...] = ()
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None


class RefusedBody(Wire, frozen=True, tag="refused"):
    """The body is invalid."""

    error: ErrorInfo


EncoderTask = ReadBody | EncodeBody | ReadQuery
EncoderReply = ModelName | MissingFiles | EncodedReply | DecodedQuery | RefusedBody
_tasks: msgspec.msgpack.Decoder[EncoderTask] = msgspec.msgpack.Decoder(EncoderTask)


class Encoder:
    """Runs one task at a time; keeps a body from `ReadBody` to `EncodedReply`."""

    def __init__(self) -> None:
        self._models: OrderedDict[ModelCard, ServedModel] = OrderedDict()
        self._body: ParsedBody | None = None
        self._route_model: RouteModel | None = None

    def run(self, task: EncoderTask, body: bytes) -> EncoderReply:
        """Run a task; `body` are the bytes after a `ReadBody` or `ReadQuery`."""
        try:
            match task:
                case ReadBody():
                    return self._read(task, body)
                case EncodeBody():
                    return self._encode(task)
                case ReadQuery():
                    return self._read_query(task, body)
        except PenstockError as error:
            self._body = None  # done with this body
            return RefusedBody(error=error.to_info())
        except RecursionError:
            self._body = None
            return RefusedBody(error=nested_too_deeply().to_info())

    def _read(self, task: ReadBody, body: bytes) -> ModelName:
        dialect = DIALECTS[task.dialect]
        parsed = self._body = dialect.parse(body)
        with parsed.fields:
            dialect.check(parsed.request, task.choices_max)
        return ModelName(model=parsed.request.model, previous=parsed.previous)

    def _encode(self, task: EncodeBody) -> MissingFiles | EncodedReply:
        if self._body is None:
            raise ProtocolError("the encoder was asked to encode before it was given a body")
        if task.files is not None:
            self._models[task.source] = ServedModel(task.source, task.files)
            while len(self._models) > MODELS_MAX:
                self._models.popitem(last=False)
        model = self._models.get(task.source)
        if model is None:
            return MissingFiles()
        self._models.move_to_end(task.source)
        parsed, self._body = self._body, None
        request, messages = parsed.request, stored_messages(parsed, task.history)
        with parsed.fields_now() as fields:
            prompts = encoding_of(parsed)(request, model.adapted(task.card), task.hash_key)
        return EncodedReply(
            request=encode(without_prompts(request)),
            prompts=prompts,
            is_chat=isinstance(request, ChatRequest),
            messages=messages,
            response=parsed.response,
            embedding=parsed.embedding,
            fields=fields,
        )

    def _read_query(self, task: ReadQuery, body: bytes) -> DecodedQuery:
        known = self._route_model
        if task.names and (known is None or (known.directory, known.names) != (task.directory, task.names)):
            known = self._route_model = RouteModel.open(task.directory, task.names, task.context_length)
        query = decode_query(body, known if task.names else None)
        prompt = query.prompt
        return DecodedQuery(
            model=query.model,
            token_ids=None if isinstance(prompt, str) else pack_tokens(prompt),
            text=prompt if isinstance(prompt, str) else None,
            cache_salt=query.cache_salt,
            session=query.session,
            exclude=query.exclude,
            slo_ttft_s=query.slo_ttft_s,
            slo_itl_s=query.slo_itl_s,
        )


def main() -> int:
    """Serve tasks until the frontend closes the socket."""
    sys.setrecursionlimit(_FRAMES_MAX)
    encoder = Encoder()
    with socket.socket(fileno=int(sys.argv[1])) as link, link.makefile("rb") as tasks:
        link.set_inheritable(False)
        while len(head := tasks.read(LENGTH_BYTES)) == LENGTH_BYTES:
            task = _tasks.decode(tasks.read(int.from_bytes(head)))
            body = b"" if isinstance(task, EncodeBody) else tasks.read(task.body_bytes)
            try:
                reply = encode(encoder.run(task, body))
                link.sendall(len(reply).to_bytes(LENGTH_BYTES) + reply)
            except OSError:
                break
    return 0


LARGE_BYTES = 64 << 10
"""Larger bodies go to an encoder. Decoding and checking any JSON of this size takes at most 5 ms (2 cores of an AMD EPYC)."""

_replies: msgspec.msgpack.Decoder[EncoderReply] = msgspec.msgpack.Decoder(EncoderReply)
_log = get_logger()


class DecodedBody(msgspec.Struct, frozen=True):
    """A decoded request, its model, and its tokenized prompts; an encoder leaves the prompts out of the request.

    Attributes:
        messages: to store, encoded; None: the request and its answer are not kept.
        fields: the client's names of fields, for errors that come later.
    """

    request: GenerationRequest
    model: ServedModel
    prompts: Sequence[EncodedPrompt]
    response: ResponseFields | None = None
    messages: bytes | None = None
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
    async def acquire(self) -> AsyncIterator["_Process"]:
        """Wait for a free encoder, and hold it for the block. Cancelling the block kills the encoder: an abandoned body takes no time from others."""
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

    async def decode_query(self, body: Sequence[bytes], model: RouteModel | None = None) -> Query:
        """Decode and check a body of the standalone router's `/route`, tokenized by `model`; the caller sets the deadline.

        Raises:
            RequestError: the body is invalid.
        """
        async with self.acquire() as process:
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

    def _take_back(self, process: "_Process") -> None:
        if process.is_sound:
            self._idle.append(process)
        else:
            process.end()


class Encoders(EncoderPool):
    """Encoders that decode and tokenize large bodies of all APIs."""

    def __init__(self, most: int, cache: ModelCache, *, hash_key: bytes, choices_max: int) -> None:
        super().__init__(most)
        self._cache = cache
        self._hash_key = hash_key
        self._choices_max = choices_max

    async def encode(
        self,
        body: Sequence[bytes],
        *,
        dialect: str,
        model_of: Callable[[str], Awaitable[ServedModel]],
        history: Callable[[str], bytes] | None = None,
    ) -> DecodedBody:
        """Decode, check and tokenize a body of an API once an encoder is free; the caller sets the deadline.

        `model_of` gives the model that the body names; `history` gives the encoded messages before those of the body, by the stored answer that it continues.

        Cancelling this kills its encoder, so that an abandoned body takes no time from others.

        Raises:
            PenstockError: the body is invalid, or its model is not served.
        """
        async with self.acquire() as process:
            read = ReadBody(body_bytes=sum(map(len, body)), dialect=dialect, choices_max=self._choices_max)
            named = await process.do(read, body)
            if not isinstance(named, ModelName):
                raise _unexpected(named)
            model = await model_of(named.model)
            task = EncodeBody(
                card=model.card,
                source=model.source,
                hash_key=self._hash_key,
                history=history(named.previous)
                if history is not None and named.previous is not None
                else b"",
            )
            encoded = await process.do(task)
            if isinstance(encoded, MissingFiles):
                files = await self._cache.files(model.source)
                encoded = await process.do(msgspec.structs.replace(task, files=files))
        if not isinstance(encoded, EncodedReply):
            raise _unexpected(encoded)
        kind = ChatRequest if encoded.is_chat else CompletionRequest
        request: GenerationRequest = msgspec.msgpack.decode(encoded.request, type=kind)
        return DecodedBody(
            request,
            model,
            encoded.prompts,
            encoded.response,
            encoded.messages,
            encoded.embedding,
            encoded.fields,
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

    async def do(self, task: EncoderTask, body: Sequence[bytes] = ()) -> EncoderReply:
        """Send a task and wait for its reply; `body` are the bytes after a `ReadBody`.

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
        if isinstance(reply, RefusedBody):
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
            [sys.executable, "-P", "-m", "penstock.frontend.encoders", str(link.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(link.fileno(),),
            process_group=0,  # the frontend handles Ctrl-C; no session of its own, see `Child.spawn`
        )


def _reap(starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    if starting.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, starting.result().wait)


def _unexpected(reply: EncoderReply) -> PenstockError:
    return ProtocolError(f"an encoder answered {type(reply).__name__}, which was not asked for")


if __name__ == "__main__":
    sys.exit(main())
