"""A process that decodes and tokenizes large bodies for a frontend: `python -m penstock.frontend.requests.encoder FD`, FD being its socket to the frontend.

Decoding and checking 8 MiB of JSON takes 10 ms to 2 s, rendering and tokenizing more, mostly with the GIL held: in
the frontend's process every stream would wait.
"""

import socket
import sys
from collections import OrderedDict

import msgspec

from penstock.core.errors import ErrorInfo, PenstockError, ProtocolError
from penstock.core.types.instances import ModelCard
from penstock.core.wire import PackedTokens, Wire, encode, pack_tokens
from penstock.frontend.client_fields import SAME, ClientFields
from penstock.frontend.openai.bodies import ChatRequest
from penstock.frontend.openai.body_error import nested_too_deeply
from penstock.frontend.openai.dialect import EmbeddingOptions, ParsedBody, ResponseFields
from penstock.frontend.requests.dialects import DIALECTS
from penstock.frontend.requests.encoding import Prompt, encoding_of, without_prompts
from penstock.frontend.requests.route.body import decode_query
from penstock.frontend.requests.route.model import RouteModel
from penstock.frontend.responses.store import fields_after, stored_messages
from penstock.frontend.text.models import ServedModel

LENGTH_BYTES = 8
_FRAMES_MAX = 800
"""Levels of JSON and calls: fewer than a frontend has, which decodes once more what came through here."""


class Read(Wire, frozen=True, tag="read"):
    """Decode and check a body; its bytes follow the message. The reply is `ModelName`."""

    body_bytes: int
    dialect: str
    choices_max: int


class Encode(Wire, frozen=True, tag="encode"):
    """Tokenize the body just read for this model, whose files are those of `source`. The reply is `Encoded` or `MissingFiles`.

    After `MissingFiles` it is sent again with `files`.
    """

    card: ModelCard
    source: ModelCard
    hash_key: bytes
    models_max: int
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


class Encoded(Wire, frozen=True, tag="encoded"):
    """The body's prompts, and the rest of the request as msgpack; `messages`: those to store, encoded; `response`, `embedding` and `fields`: as in `ParsedBody`."""

    request: bytes
    prompts: tuple[Prompt, ...]
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


class Refused(Wire, frozen=True, tag="refused"):
    """The body is invalid."""

    error: ErrorInfo


Task = Read | Encode | ReadQuery
Reply = ModelName | MissingFiles | Encoded | DecodedQuery | Refused
_tasks: msgspec.msgpack.Decoder[Task] = msgspec.msgpack.Decoder(Task)


class Encoder:
    """Runs one task at a time; keeps a body from `Read` to `Encoded`."""

    def __init__(self) -> None:
        self._models: OrderedDict[ModelCard, ServedModel] = OrderedDict()
        self._body: ParsedBody | None = None
        self._route_model: RouteModel | None = None

    def run(self, task: Task, body: bytes) -> Reply:
        """Run a task; `body` are the bytes after a `Read` or `ReadQuery`."""
        try:
            match task:
                case Read():
                    return self._read(task, body)
                case Encode():
                    return self._encode(task)
                case ReadQuery():
                    return self._read_query(task, body)
        except PenstockError as error:
            self._body = None  # done with this body
            return Refused(error=error.to_info())
        except RecursionError:
            self._body = None
            return Refused(error=nested_too_deeply().to_info())

    def _read(self, task: Read, body: bytes) -> ModelName:
        dialect = DIALECTS[task.dialect]
        parsed = self._body = dialect.parse(body)
        with parsed.fields:
            dialect.check(parsed, task.choices_max)
        return ModelName(model=parsed.request.model, previous=parsed.previous)

    def _encode(self, task: Encode) -> MissingFiles | Encoded:
        if self._body is None:
            raise ProtocolError("the encoder was asked to encode before it was given a body")
        if task.files is not None:
            self._models[task.source] = ServedModel(task.source, task.files)
            while len(self._models) > task.models_max:
                self._models.popitem(last=False)
        model = self._models.get(task.source)
        if model is None:
            return MissingFiles()
        self._models.move_to_end(task.source)
        parsed, self._body = self._body, None
        request, messages = parsed.request, stored_messages(parsed, task.history)
        with fields_after(parsed) as fields:
            prompts = encoding_of(parsed)(request, model.adapted(task.card), task.hash_key)
        return Encoded(
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
            body = b"" if isinstance(task, Encode) else tasks.read(task.body_bytes)
            try:
                reply = encode(encoder.run(task, body))
                link.sendall(len(reply).to_bytes(LENGTH_BYTES) + reply)
            except OSError:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
