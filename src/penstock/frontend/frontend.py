"""The frontend without HTTP: turns request bodies into prepared completions, and lists models and health."""

import asyncio
import contextlib
import datetime as dt
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, disable_created_metrics

from penstock.core.clock import wall_time_s
from penstock.core.errors import RequestError
from penstock.core.types.cards import ModelCard
from penstock.frontend.config import FrontendConfig
from penstock.frontend.errors import RateLimitError
from penstock.frontend.limits.access import Access
from penstock.frontend.limits.admission import Admission, Slot
from penstock.frontend.limits.body import BodyReader
from penstock.frontend.limits.headers import RequestOptions, named_tenant
from penstock.frontend.limits.receive_budget import ReceiveBudget
from penstock.frontend.metrics import FrontendMetrics
from penstock.frontend.openai.answers import ModelEntry, ModelList
from penstock.frontend.openai.bodies import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from penstock.frontend.openai.events import Envelope, EventStream, WholeAnswer
from penstock.frontend.openai.validation import check_chat, check_completion
from penstock.frontend.requests.completion import Completion
from penstock.frontend.requests.encoders import LARGE_BYTES, Encoders
from penstock.frontend.requests.encoding import Prompt
from penstock.frontend.requests.media import PromptMedia
from penstock.frontend.requests.next_turns import NextTurns
from penstock.frontend.requests.preprocess import PreparedRequest, Preprocessor, RequestMetadata
from penstock.frontend.tenants.tenants import ANONYMOUS, BELIEVED, Tenant
from penstock.frontend.text.models import ModelCache, ServedModel
from penstock.seams import RequestDispatcher


@dataclass(frozen=True, slots=True)
class PendingAnswer:
    """A completion that is ready to run, and the format of its answer."""

    completion: Completion
    prepared: PreparedRequest
    envelope: Envelope
    stream: bool
    include_usage: bool
    continuous_usage: bool

    def event_stream(self) -> EventStream:
        token_bytes = self.prepared.model.detokenizer.token_bytes
        return EventStream(
            self.envelope,
            token_bytes,
            include_usage=self.include_usage,
            usage_so_far=self.completion.usage if self.continuous_usage else None,
        )

    def whole_answer(self) -> WholeAnswer:
        return WholeAnswer(
            self.envelope,
            self.prepared.model.detokenizer.token_bytes,
            choices=len(self.prepared.requests),
            logprobs=self.prepared.logprobs is not None,
        )


class Frontend:
    """State of one frontend process. One event loop owns it."""

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
        """Create the parts.

        Args:
            config: the frontend's settings.
            dispatcher: sends requests to workers.
            hash_key: the deployment's key of block hashes.
            access: checks keys; None leaves the API open and `/admin` closed.
            registry: shown by /metrics; pass the dispatcher's to show both; None creates one.
            rng: draws ids and seeds; None is seeded by the system.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they add one useless series per counter
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
        self.budget = ReceiveBudget(config.receive.bytes_max, self.metrics)
        self.bodies = BodyReader(config.body_bytes_max, self.metrics)
        self.hash_key = hash_key
        self._rng = rng if rng is not None else random.Random()
        self._next_turns = NextTurns(
            dispatcher,
            self.metrics,
            hash_key=hash_key,
            new_id=self.new_id,
            turns_max=config.next_turns_max,
            within_s=config.next_turn_within_s,
        )
        self._models = ModelCache(dispatcher, config.models_max)
        self._preprocessor = Preprocessor(hash_key=hash_key, rng=self._rng)
        self._media = PromptMedia(config.media, dispatcher, hash_key=hash_key, count=self.metrics.media)
        self._encoders = Encoders(
            config.receive.encoders_max,
            self._models,
            hash_key=hash_key,
            choices_max=config.choices_max,
            models_max=config.models_max,
        )

    @contextlib.contextmanager
    def arrive(self) -> Iterator[Slot]:
        """Track a request until it has ended, including while its body arrives."""
        with self.admission.arrive() as slot:
            try:
                yield slot
            finally:
                self._media.release(slot)
                if slot.admitted:
                    self.metrics.inflight(-1)
                if slot.use is not None:
                    self.metrics.tenant_ended(slot.tenant, *slot.use.end(asyncio.get_running_loop().time()))

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """Give the tenant that a request counts for, by its API key or, where its client is trusted, by a header.

        Raises:
            ApiKeyError: it lacks a key of this server.
            RequestError: it names a tenant by too long a name.
        """
        tenant = self.access.tenant_of(headers)
        if not tenant.name and self.config.trust_headers:
            tenant = BELIEVED
        if tenant.is_trusted:
            return self.access.tenants.acting(tenant, named_tenant(headers, self.config))
        return tenant

    def admit(self, slot: Slot, tenant: Tenant = ANONYMOUS) -> None:
        """Count a request as in flight, once its body is complete.

        Raises:
            RateLimitError: its tenant is at a limit of its own.
            Overloaded: `inflight_max` requests are in flight.
        """
        if tenant.usage is not None:
            try:
                slot.use = tenant.usage.admit(asyncio.get_running_loop().time())
            except RateLimitError as error:
                self.metrics.tenant_refused(tenant.name, error.limit)
                raise
            slot.tenant = tenant.name
            self.metrics.tenant_began(tenant.name)
        self.admission.admit(slot)
        self.metrics.inflight(1)

    async def chat(self, body: Sequence[bytes], slot: Slot, options: RequestOptions) -> PendingAnswer:
        """Decode, check and prepare a chat request.

        Args:
            body: the body's bytes, in the pieces that arrived.

        Raises:
            PenstockError: it cannot be served; the text says why.
        """
        metadata = RequestMetadata(f"chatcmpl-{self.new_id()}", sum(map(len, body)), slot.deadline, options)
        if metadata.size_bytes > LARGE_BYTES:
            return await self._large(body, slot, metadata, chat=True)
        request = parse_chat(b"".join(body))
        check_chat(request, self.config.choices_max)
        return await self._small(request, slot, metadata)

    async def completion(self, body: Sequence[bytes], slot: Slot, options: RequestOptions) -> PendingAnswer:
        """Decode, check and prepare a completion request; see `chat`.

        Raises:
            PenstockError: it cannot be served; the text says why.
        """
        metadata = RequestMetadata(f"cmpl-{self.new_id()}", sum(map(len, body)), slot.deadline, options)
        if metadata.size_bytes > LARGE_BYTES:
            return await self._large(body, slot, metadata, chat=False)
        request = parse_completion(b"".join(body))
        check_completion(request, self.config.choices_max)
        return await self._small(request, slot, metadata)

    async def _small(
        self, request: ChatRequest | CompletionRequest, slot: Slot, metadata: RequestMetadata
    ) -> PendingAnswer:
        model = await self._models.get(request.model, metadata.options.cache_salt)
        prompts = await self._preprocessor.encode(request, model, metadata.size_bytes)
        return await self._prepare(
            request,
            model,
            metadata,
            prompts,
            slot,
            chat=request if isinstance(request, ChatRequest) else None,
        )

    async def _large(
        self, body: Sequence[bytes], slot: Slot, metadata: RequestMetadata, *, chat: bool
    ) -> PendingAnswer:
        encoded = await self._encoders.encode(body, chat=chat, cache_salt=metadata.options.cache_salt)
        return await self._prepare(
            encoded.request, encoded.model, metadata, encoded.prompts, slot, chat=body if chat else None
        )

    async def _prepare(
        self,
        request: GenerationRequest,
        model: ServedModel,
        metadata: RequestMetadata,
        prompts: Sequence[Prompt],
        slot: Slot,
        *,
        chat: Sequence[bytes] | ChatRequest | None,
    ) -> PendingAnswer:
        prompts = await self._media.complete(prompts, request, model, slot)
        prepared = self._preprocessor.prepared(request, model, metadata, prompts)
        return self._pending(prepared, slot, request, metadata.size_bytes, chat=chat)

    async def close(self) -> None:
        """End the encoder processes, connections for media, and what is computed ahead. Safe twice."""
        await self._next_turns.close()
        await self._media.close()
        await self._encoders.close()

    async def served_model(self, name: str | None) -> ServedModel:
        """Give a model with its tokenizer; None: the only one, without its adapters.

        Raises:
            RequestError: nobody serves it, or there are several and none is named.
        """
        if name is None:
            names = sorted(name for name, card in self.dispatcher.models().items() if card.parent is None)
            if len(names) != 1:
                raise RequestError(
                    f"model: name one of {', '.join(names) or 'none, as no worker is ready'}", param="model"
                )
            (name,) = names
        return await self._models.get(name)

    def models(self) -> ModelList:
        entries = [_entry(card) for card in self.dispatcher.models().values()]
        return ModelList(
            data=entries,
            first_id=entries[0].id if entries else None,
            last_id=entries[-1].id if entries else None,
        )

    def model(self, name: str) -> ModelEntry:
        """Raises: UnknownModelError: no worker serves it."""
        return _entry(self._models.card(name))

    def unhealthy(self) -> str | None:
        """Give the reason why no request can be served now; None if one can."""
        return None if self.dispatcher.models() else "no worker is ready"

    def new_id(self) -> str:
        return f"{self._rng.getrandbits(96):024x}"

    def _pending(
        self,
        prepared: PreparedRequest,
        slot: Slot,
        request: GenerationRequest,
        size_bytes: int,
        *,
        chat: Sequence[bytes] | ChatRequest | None,
    ) -> PendingAnswer:
        """Make the completion of a prepared request; `chat` is the body of one, with its messages."""
        name, options = prepared.model.card.name, request.stream_options
        include_usage = options is not None and bool(options.include_usage)
        self._next_turns.arrived(prepared)
        on_answer = None if chat is None else self._next_turns.follow(chat, prepared, size_bytes)
        timer = self.metrics.timer(name, slot.arrived, prepared.prompt_tokens)
        completion = Completion(
            prepared, self.dispatcher, timer, explains=prepared.options.explains, on_answer=on_answer
        )
        if slot.use is not None:
            slot.use.charge(
                prepared.prompt_tokens,
                sum(request.sampling.max_tokens for request in prepared.requests),
                completion.tokens,
                asyncio.get_running_loop().time(),
            )
        return PendingAnswer(
            completion=completion,
            prepared=prepared,
            envelope=Envelope(
                prepared.id,
                int(wall_time_s()),
                name,
                isinstance(request, ChatRequest),
                short_call_ids=prepared.model.format.short_call_ids,
            ),
            stream=bool(request.stream),
            include_usage=include_usage,
            continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
        )


def _entry(card: ModelCard) -> ModelEntry:
    created = dt.datetime.fromtimestamp(card.created_s, dt.UTC)
    return ModelEntry(
        id=card.name,
        created=card.created_s,
        max_model_len=card.context_length,
        parent=card.parent,
        display_name=card.name,
        created_at=created.isoformat().replace("+00:00", "Z"),
    )
