"""Embeddings: the bodies of `/v1/embeddings`, and the run of one request's inputs, a bounded number at once."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import EngineError, RequestError
from penstock.core.json_text import encode_json
from penstock.core.types.requests import FinishReason, Request
from penstock.core.wire import num_tokens
from penstock.frontend.apis.bodies import ChatRequest, CompletionRequest, StrictBody
from penstock.frontend.apis.checks import check_completion
from penstock.frontend.apis.decoding import parse_body
from penstock.frontend.apis.dialect import (
    ApiDialect,
    EmbeddingOptions,
    ParsedBody,
    PromptTokensDetails,
    Usage,
)
from penstock.frontend.errors import ClientFields
from penstock.frontend.metrics import RequestTimer
from penstock.frontend.prepare import PreparedRequest
from penstock.seams import RequestDispatcher

INPUTS_MAX = 2048  # OpenAI's
_FORMATS = ("float", "base64")
_FIELDS = ClientFields(names={"prompt": "input", "token_ids": "input"})


class EmbeddingsRequest(StrictBody, kw_only=True):
    """One or more inputs, each a text or token ids."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    # Penstock's, as in completions.
    cache_salt: str | None = None
    priority: int | None = None
    add_special_tokens: bool | None = None
    strict: bool | None = None
    # Accepted, no effect on the answer.
    user: Any = None


class Embedding(msgspec.Struct):
    index: int
    embedding: str | list[float]
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


_decode = msgspec.json.Decoder(EmbeddingsRequest).decode


def parse_embeddings(body: bytes) -> ParsedBody:
    """Decode a body.

    Raises:
        RequestError: it is malformed.
    """
    given = parse_body(body, EmbeddingsRequest, _decode)
    if given.encoding_format is not None and given.encoding_format not in _FORMATS:
        raise RequestError(
            f"must be one of {', '.join(_FORMATS)}, got {given.encoding_format[:40]!r}",
            field="encoding_format",
        )
    if given.dimensions is not None and given.dimensions < 1:
        raise RequestError(f"must be >= 1, got {given.dimensions}", field="dimensions")
    request = CompletionRequest(
        model=given.model,
        prompt=given.input,
        max_tokens=1,
        temperature=0.0,
        cache_salt=given.cache_salt,
        priority=given.priority,
        add_special_tokens=given.add_special_tokens,
    )
    return ParsedBody(
        request,
        embedding=EmbeddingOptions(given.encoding_format == "base64", given.dimensions),
        fields=_FIELDS,
    )


def check_embeddings(request: ChatRequest | CompletionRequest, _choices_max: int) -> None:
    """Raises: RequestError: a value is out of its range."""
    assert isinstance(request, CompletionRequest)
    inputs = request.prompt
    if isinstance(inputs, list) and len(inputs) > INPUTS_MAX and not isinstance(inputs[0], int):
        raise RequestError(
            f"at most {INPUTS_MAX} inputs are allowed, got {len(inputs)}; send several requests",
            field="input",
        )
    check_completion(request, INPUTS_MAX)


EMBEDDINGS = ApiDialect("embeddings", "embd-", parse_embeddings, check=check_embeddings)


VALUES_MAX = 1 << 22
"""Values of all embeddings of an answer: 16 MiB, and about 90 MB of JSON as numbers."""
AT_ONCE = 32
"""Inputs of one request that workers compute at once, so that it leaves room for others in their queues."""
_GIVEN_UP = frozenset({FinishReason.ERROR, FinishReason.PREFILLED})


class EmbeddingRun:
    """Computes the embeddings of a prepared request. One task owns it."""

    def __init__(
        self,
        prepared: PreparedRequest,
        dispatcher: RequestDispatcher,
        timer: RequestTimer,
        options: EmbeddingOptions,
    ) -> None:
        self._prepared = prepared
        self._dispatcher = dispatcher
        self._timer = timer
        self._options = options
        self._vectors: list[NDArray[np.float32] | None] = [None] * len(prepared.requests)
        self._cached_tokens = 0
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Compute all inputs; cancelling this cancels all of them.

        Raises:
            PenstockError: one failed; the others are cancelled.
        """
        failed = True
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(self._prepared.requests):
                    group.create_task(self._compute(index, request))
            failed = False
        except asyncio.CancelledError:
            failed = False
            raise
        except ExceptionGroup as errors:
            with self._prepared.fields:
                raise errors.exceptions[0] from errors
        finally:
            self._timer.finish(self.usage(), asyncio.get_running_loop().time(), failed=failed)

    async def body(self) -> bytes:
        """Encode the answer, one embedding in a turn of the loop, so that streams do not wait for it."""
        tokens = self._prepared.prompt_tokens
        usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
        whole = encode_json(EmbeddingsAnswer([], self._prepared.model.card.name, usage))
        before, after = whole.split(b"[]", 1)
        pieces = []
        for index, vector in enumerate(self._vectors):
            assert vector is not None, "it has run"
            pieces.append(encode_json(Embedding(index, _shown(vector, self._options))))
            await asyncio.sleep(0)
        return b"".join((before, b"[", b",".join(pieces), b"]", after))

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to its first embedding; None before it."""
        return self._timer.ttft_s

    def tokens(self) -> tuple[int, int]:
        """Count (prompt, output) tokens."""
        return self._prepared.prompt_tokens, 0

    def usage(self) -> Usage:
        tokens = self._prepared.prompt_tokens
        return Usage(tokens, 0, tokens, PromptTokensDetails(self._cached_tokens))

    async def _compute(self, index: int, request: Request) -> None:
        async with self._turn, self._dispatcher.open(request) as stream:
            async for delta in stream:
                if delta.finish_reason in _GIVEN_UP:
                    raise EngineError(f"the worker ended the request as {delta.finish_reason}; try again")
                self._cached_tokens += delta.cached_tokens or 0
                if num_tokens(delta.token_ids):
                    self._timer.tokens(1, asyncio.get_running_loop().time(), None, stream)
                if delta.embedding:
                    self._vectors[index] = self._unit(delta.embedding)
                    return
        raise EngineError("the worker's stream ended without an embedding; try again")

    def _unit(self, packed: bytes) -> NDArray[np.float32]:
        """Cut a hidden state to the dimensions asked for, and scale it to length 1.

        Raises:
            RequestError: it has fewer values, or those of all inputs are too many for one answer.
        """
        vector = np.frombuffer(packed, dtype="<f4")
        wanted = self._options.dimensions
        if wanted is not None and wanted > len(vector):
            raise RequestError(
                f"must be <= {len(vector)}, the size of this model's embeddings, got {wanted}",
                field="dimensions",
            )
        vector = vector[:wanted]
        if len(vector) * len(self._vectors) > VALUES_MAX:
            raise RequestError(
                f"{len(self._vectors)} embeddings of {len(vector)} values are too large for one answer; at most"
                f" {VALUES_MAX // len(vector)} inputs fit; send several requests, or ask for fewer dimensions",
                field="input",
            )
        length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
        unit: NDArray[np.float32] = (vector / (length or 1.0)).astype(np.float32)
        return unit


def _shown(vector: NDArray[np.float32], options: EmbeddingOptions) -> str | list[float]:
    if options.is_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: Sequence[float] = vector.tolist()
    return list(values)
