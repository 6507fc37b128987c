"""What the HTTP layer serves, without HTTP: bodies in, prepared answers out, and the state of the service."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, disable_created_metrics

from penstock.core.clock import wall_time_s
from penstock.core.types import ModelCard
from penstock.frontend.access import Access
from penstock.frontend.admission import Admission, Slot
from penstock.frontend.body import BodyReader
from penstock.frontend.completion import Completion
from penstock.frontend.config import FrontendConfig
from penstock.frontend.encoders import LARGE_BYTES, Encoders
from penstock.frontend.headers import Wishes
from penstock.frontend.metrics import FrontendMetrics
from penstock.frontend.models import ModelShelf
from penstock.frontend.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ModelEntry,
    ModelList,
    parse_chat,
    parse_completion,
)
from penstock.frontend.preprocess import Arrival, Preprocessor, Work
from penstock.frontend.receiving import ReceiveRoom
from penstock.frontend.sse import Envelope, EventStream, WholeAnswer
from penstock.frontend.validation import check_chat, check_completion
from penstock.seams import RequestDispatcher


@dataclass(frozen=True, slots=True)
class Answering:
    """A request that is about to run, and how its answer is to be given."""

    completion: Completion
    work: Work
    envelope: Envelope
    stream: bool
    include_usage: bool

    def event_stream(self) -> EventStream:
        token_bytes = self.work.model.detokenizer.token_bytes
        return EventStream(self.envelope, token_bytes, include_usage=self.include_usage)

    def whole_answer(self) -> WholeAnswer:
        return WholeAnswer(
            self.envelope,
            self.work.model.detokenizer.token_bytes,
            choices=len(self.work.requests),
            logprobs=self.work.logprobs is not None,
        )


class Frontend:
    """One frontend process's state. One event loop owns it."""

    def __init__(
        self,
        config: FrontendConfig,
        dispatcher: RequestDispatcher,
        *,
        hash_key: bytes,
        access: Access | None = None,
        registry: CollectorRegistry | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Compose.

        Args:
            config: the frontend's settings.
            dispatcher: the way to the workers.
            hash_key: the deployment's, for block hashes.
            access: who may ask; None is an open API and a closed `/admin`.
            registry: what /metrics shows, the dispatcher's figures too if it has the same; None makes one.
            rng: for ids and seeds; None takes one seeded by the system.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter, of no use
        self.config = config
        self.dispatcher = dispatcher
        self.access = access or Access()
        self.metrics = FrontendMetrics(registry if registry is not None else CollectorRegistry())
        self.admission = Admission(
            inflight_max=config.inflight_max,
            request_timeout_s=config.request_timeout_s,
            receive_timeout_s=config.receive.timeout_s,
            retry_after_s=dispatcher.retry_after_s,
        )
        self.room = ReceiveRoom(config.receive.bytes_max, self.metrics)
        self.bodies = BodyReader(config.body_bytes_max, self.metrics)
        self._rng = rng if rng is not None else random.Random()
        self._models = ModelShelf(dispatcher, config.models_max)
        self._preprocessor = Preprocessor(hash_key=hash_key, rng=self._rng)
        self._encoders = Encoders(
            config.receive.encoders_max,
            self._models,
            hash_key=hash_key,
            choices_max=config.choices_max,
            models_max=config.models_max,
        )

    @contextlib.contextmanager
    def arrive(self) -> Iterator[Slot]:
        """Know of a request until it has ended, also while its body is on its way."""
        with self.admission.arrive() as slot:
            try:
                yield slot
            finally:
                if slot.admitted:
                    self.metrics.inflight(-1)

    def admit(self, slot: Slot) -> None:
        """Count a request, whose body is there, among those under way.

        Raises:
            Overloaded: as many as allowed are.
        """
        self.admission.admit(slot)
        self.metrics.inflight(1)

    async def chat(self, body: Sequence[bytes], slot: Slot, wishes: Wishes) -> Answering:
        """Understand and prepare a chat request, whose body came in pieces.

        Raises:
            PenstockError: it cannot be served; the text says why.
        """
        arrival = Arrival(f"chatcmpl-{self.new_id()}", sum(map(len, body)), slot.deadline, wishes)
        if arrival.size_bytes > LARGE_BYTES:
            return await self._large(body, slot, arrival, chat=True)
        request = parse_chat(b"".join(body))
        check_chat(request, self.config.choices_max)
        return await self._small(request, slot, arrival)

    async def completion(self, body: Sequence[bytes], slot: Slot, wishes: Wishes) -> Answering:
        """Understand and prepare a plain completion request; see `chat`.

        Raises:
            PenstockError: it cannot be served; the text says why.
        """
        arrival = Arrival(f"cmpl-{self.new_id()}", sum(map(len, body)), slot.deadline, wishes)
        if arrival.size_bytes > LARGE_BYTES:
            return await self._large(body, slot, arrival, chat=False)
        request = parse_completion(b"".join(body))
        check_completion(request, self.config.choices_max)
        return await self._small(request, slot, arrival)

    async def _small(
        self, request: ChatRequest | CompletionRequest, slot: Slot, arrival: Arrival
    ) -> Answering:
        model = await self._models.get(request.model)
        return self._answering(await self._preprocessor.prepare(request, model, arrival), slot, request)

    async def _large(self, body: Sequence[bytes], slot: Slot, arrival: Arrival, *, chat: bool) -> Answering:
        understood = await self._encoders.understand(body, chat=chat)
        request = understood.request
        work = self._preprocessor.work(request, understood.model, arrival, understood.prompts)
        return self._answering(work, slot, request)

    async def close(self) -> None:
        """End the processes that work for this one. Safe twice."""
        await self._encoders.close()

    def models(self) -> ModelList:
        return ModelList(data=[_entry(card) for card in self.dispatcher.models().values()])

    def model(self, name: str) -> ModelEntry:
        """Raises: UnknownModelError: no worker serves it."""
        return _entry(self._models.card(name))

    def unhealthy(self) -> str | None:
        """Say why no request could be served now; None if it could."""
        return None if self.dispatcher.models() else "no worker is ready"

    def new_id(self) -> str:
        return f"{self._rng.getrandbits(96):024x}"

    def _answering(self, work: Work, slot: Slot, request: GenerationRequest) -> Answering:
        name, options = work.model.card.name, request.stream_options
        timer = self.metrics.timer(name, slot.arrived)
        return Answering(
            completion=Completion(work, self.dispatcher, timer, explains=work.wishes.explains),
            work=work,
            envelope=Envelope(work.id, int(wall_time_s()), name, isinstance(request, ChatRequest)),
            stream=bool(request.stream),
            include_usage=options is not None and options.include_usage,
        )


def _entry(card: ModelCard) -> ModelEntry:
    return ModelEntry(
        id=card.name, created=card.created_s, max_model_len=card.context_length, parent=card.parent
    )
