"""Runs the inputs of one request, a bounded number at once, and encodes their embeddings."""

import asyncio
import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import EngineError, RequestError
from penstock.core.types.requests import FinishReason, Request
from penstock.core.wire import num_tokens
from penstock.frontend.embeddings.bodies import Embedding, EmbeddingsAnswer, EmbeddingUsage
from penstock.frontend.metrics import RequestTimer
from penstock.frontend.openai.answers import PromptTokensDetails, Usage, encode
from penstock.frontend.openai.dialect import EmbeddingOptions
from penstock.frontend.requests.preprocess import PreparedRequest
from penstock.seams import RequestDispatcher

VALUES_MAX = 1 << 22
"""Values of all embeddings of an answer: 16 MiB, and about 90 MB of JSON as numbers."""
AT_ONCE = 32
"""Inputs of one request that workers compute at once, so that it leaves room for others in their queues."""
_GIVEN_UP = frozenset({FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.PREFILLED})


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
        whole = encode(EmbeddingsAnswer([], self._prepared.model.card.name, usage))
        before, after = whole.split(b"[]", 1)
        pieces = []
        for index, vector in enumerate(self._vectors):
            assert vector is not None, "it has run"
            pieces.append(encode(Embedding(index, _shown(vector, self._options))))
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
                f"dimensions: must be <= {len(vector)}, the size of this model's embeddings, got {wanted}",
                param="dimensions",
            )
        vector = vector[:wanted]
        if len(vector) * len(self._vectors) > VALUES_MAX:
            raise RequestError(
                f"input: {len(self._vectors)} embeddings of {len(vector)} values are too large for one answer; at most"
                f" {VALUES_MAX // len(vector)} inputs fit; send several requests, or ask for fewer dimensions",
                param="input",
            )
        length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
        unit: NDArray[np.float32] = (vector / (length or 1.0)).astype(np.float32)
        return unit


def _shown(vector: NDArray[np.float32], options: EmbeddingOptions) -> str | list[float]:
    if options.is_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: Sequence[float] = vector.tolist()
    return list(values)
