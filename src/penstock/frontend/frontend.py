"""The frontend without HTTP: turns request bodies into prepared completions, and lists models and health."""

import asyncio
import datetime as dt
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, disable_created_metrics

from penstock.core.clock import wall_time_s
from penstock.core.errors import RequestError
from penstock.core.types.instances import ModelCard
from penstock.core.types.load import LINK_VERSION, DeploymentLoads
from penstock.core.wire import token_list
from penstock.frontend.apis.bodies import ChatRequest, Message
from penstock.frontend.apis.chat import ModelEntry, ModelList
from penstock.frontend.apis.dialect import (
    AnswerContext,
    ApiDialect,
    Envelope,
    StreamedAnswer,
    WholeBody,
)
from penstock.frontend.apis.responses_answer import RESPONSES
from penstock.frontend.apis.responses_store import (
    KeptResponse,
    ResponseStore,
    SharedResponses,
    kept_bytes,
    kept_response,
    stored_messages,
    with_items,
)
from penstock.frontend.apis.tokens import TOKENIZE, TokenizerInfo, parse_detokenize
from penstock.frontend.completion import Completion
from penstock.frontend.config import FrontendConfig
from penstock.frontend.embeddings import EMBEDDINGS, EmbeddingRun
from penstock.frontend.encoders import LARGE_BYTES, DecodedBody, Encoders
from penstock.frontend.encoding import ChangingHeads, EncodedPrompt, encoding_of
from penstock.frontend.errors import ApiKeyError, RateLimitError
from penstock.frontend.limits.admission import BodyReader, ReceiveBudget, RequestAdmission, RequestSlot
from penstock.frontend.limits.headers import RequestOptions, named_tenant
from penstock.frontend.limits.regions import RegionLinks
from penstock.frontend.limits.tenants import ANONYMOUS, BELIEVED, ApiAccess, Tenant
from penstock.frontend.media import PromptMedia
from penstock.frontend.metrics import FrontendMetrics, RefusedHandshakes
from penstock.frontend.prepare import PreparedRequest, Preprocessor, RequestMetadata
from penstock.frontend.text.models import ModelCache, ServedModel
from penstock.seams import RequestDispatcher

_VALUES_AT_ONCE = 2048
"""Log-probabilities of prompts that are encoded in one turn of the loop: about 2 ms."""
_ECHOED_BYTES_AT_ONCE = 256 << 10
"""Text of echoed prompts: about 1 ms."""


class PendingAnswer(msgspec.Struct, frozen=True):
    """A completion that is ready to run, and the format of its answer."""

    completion: Completion
    prepared: PreparedRequest
    dialect: ApiDialect
    context: AnswerContext
    stream: bool

    def event_stream(self) -> StreamedAnswer:
        assert self.dialect.stream is not None, "an API of generated text"
        return self.dialect.stream(self.context)

    def whole_answer(self) -> WholeBody:
        assert self.dialect.whole is not None, "an API of generated text"
        return self.dialect.whole(self.context)

    async def body(self, answer: WholeBody) -> bytes:
        """Encode a whole answer; in a thread where it has many log-probabilities of prompts, or much of their text."""
        usage, prepared = self.completion.usage(), self.prepared
        if prepared.num_prompt_values <= _VALUES_AT_ONCE and prepared.echoed_bytes <= _ECHOED_BYTES_AT_ONCE:
            return answer.body(usage)
        return await asyncio.to_thread(answer.body, usage)


class PendingEmbeddings(msgspec.Struct, frozen=True):
    """Embeddings that are ready to be computed. The access log reads the fields that `PendingAnswer` has too."""

    completion: EmbeddingRun
    prepared: PreparedRequest
    stream: bool = False


class Frontend:
    """State of one frontend process. One event loop owns it."""

    def __init__(
        self,
        config: FrontendConfig,
        dispatcher: RequestDispatcher,
        *,
        hash_key: bytes,
        access: ApiAccess | None = None,
        registry: CollectorRegistry | None = None,
        rng: random.Random | None = None,
        region: str = "",
        responses: SharedResponses | None = None,
    ) -> None:
        """Create the parts.

        Args:
            config: the frontend's settings.
            dispatcher: sends requests to workers.
            hash_key: the deployment's key of block hashes.
            access: checks keys; None leaves the API open and `/admin` closed.
            registry: shown by /metrics; pass the dispatcher's to show both; None creates one.
            rng: draws ids and seeds; None is seeded by the system.
            region: where it is, for links of other regions.
            responses: shares answers of `/v1/responses` with other processes of the port; None: there are none.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they add one useless series per counter
        self.config = config
        self.dispatcher = dispatcher
        self.access = access or ApiAccess()
        registry = CollectorRegistry() if registry is None else registry
        self.metrics = FrontendMetrics(registry)
        self.region_links = RegionLinks(registry)
        self.refused_handshakes = RefusedHandshakes(registry)
        self._region = region
        self.admission = RequestAdmission(
            inflight_max=config.inflight_max,
            request_timeout_s=config.request_timeout_s,
            receive_timeout_s=config.receive.timeout_s,
            retry_after_s=dispatcher.retry_after_s,
            on_left=self._left,
        )
        self.budget = ReceiveBudget(config.receive.bytes_max, self.metrics)
        self.bodies = BodyReader(config.body_bytes_max, self.metrics)
        self.hash_key = hash_key
        self._rng = rng if rng is not None else random.Random()
        self._responses = ResponseStore(config.responses_bytes_max, responses)
        self._models = ModelCache(dispatcher)
        self._preprocessor = Preprocessor(hash_key=hash_key, rng=self._rng)
        self._media = PromptMedia(config.media, dispatcher, hash_key=hash_key, count=self.metrics.media)
        self._heads = ChangingHeads(self.metrics.prompt_head_changed)
        self._encoders = Encoders(
            config.receive.encoders_max,
            self._models,
            hash_key=hash_key,
            choices_max=config.choices_max,
        )

    def arrive(self) -> RequestSlot:
        """Track a request until its slot is left, including while its body arrives."""
        return self.admission.arrive()

    def _left(self, slot: RequestSlot) -> None:
        if slot.media_bytes:
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
        try:
            tenant = self.access.tenant_of(headers)
        except ApiKeyError:
            self.region_links.refused_key(headers)
            raise
        if not tenant.name and self.config.trust_headers:
            tenant = BELIEVED
        if tenant.is_trusted:
            return self.access.tenants.acting(tenant, named_tenant(headers, self.config))
        return tenant

    def admit(self, slot: RequestSlot, tenant: Tenant = ANONYMOUS) -> None:
        """Count a request as in flight, once its body is complete.

        Raises:
            RateLimitError: its tenant is at a limit of its own.
            Overloaded: `inflight_max` requests are in flight.
        """
        if tenant.usage is not None:
            try:
                slot.use = tenant.usage.admit(asyncio.get_running_loop().time())
            except RateLimitError as error:
                self.metrics.tenant_refused(tenant.usage.tenant, error.limit)
                raise
            slot.tenant = tenant.usage.tenant  # a gateway may name any number of others
            self.metrics.tenant_began(slot.tenant)
        self.admission.admit(slot)
        self.metrics.inflight(1)

    async def generate(
        self, body: Sequence[bytes], slot: RequestSlot, options: RequestOptions, dialect: ApiDialect
    ) -> PendingAnswer:
        """Decode, check and prepare a request of an API.

        Args:
            body: the body's bytes, in the pieces that arrived.
            slot: of the request.
            options: from its headers.
            dialect: of the API.

        Raises:
            PenstockError: it cannot be served; the text says why.
        """
        metadata = RequestMetadata(
            f"{dialect.id_prefix}{self.new_id()}", sum(map(len, body)), slot.deadline, options
        )
        decoded = await self._decode(body, metadata.size_bytes, options, dialect)
        request, model = decoded.request, decoded.model
        if (head := decoded.prompts[0].head) is not None:
            self._heads.saw(model.card.name, options.tenant, head)
        with decoded.fields:
            prompts = await self._with_media(decoded, slot)
            limits = await self._preprocessor.limits(request, model)
            prepared = self._preprocessor.prepared(
                request, model, metadata, prompts, limits=limits, fields=decoded.fields
            )
        return self._pending(prepared, slot, decoded, dialect)

    async def embed(
        self, body: Sequence[bytes], slot: RequestSlot, options: RequestOptions
    ) -> PendingEmbeddings:
        """Decode, check and prepare a request for embeddings.

        Raises:
            PenstockError: it cannot be served; the text says why.
        """
        metadata = RequestMetadata(
            f"{EMBEDDINGS.id_prefix}{self.new_id()}", sum(map(len, body)), slot.deadline, options
        )
        decoded = await self._decode(body, metadata.size_bytes, options, EMBEDDINGS)
        with decoded.fields as fields:
            prepared = self._preprocessor.prepared(
                decoded.request, decoded.model, metadata, decoded.prompts, embeds=True, fields=fields
            )
        assert decoded.embedding is not None, "of this dialect"
        timer = self.metrics.timer(decoded.model.card.name, slot.arrived, prepared.prompt_tokens)
        run = EmbeddingRun(prepared, self.dispatcher, timer, decoded.embedding)
        if slot.use is not None:
            now = asyncio.get_running_loop().time()
            slot.use.charge(prepared.prompt_tokens, 0, run.tokens, now)
        return PendingEmbeddings(run, prepared)

    async def tokenize(
        self, body: Sequence[bytes], slot: RequestSlot, options: RequestOptions, dialect: ApiDialect
    ) -> tuple[list[int], ServedModel]:
        """Give the tokens of a body's prompt, and its model.

        Raises:
            PenstockError: it cannot be tokenized; the text says why.
        """
        decoded = await self._decode(body, sum(map(len, body)), options, dialect)
        with decoded.fields:
            prompts = await self._with_media(decoded, slot)
        return [token for prompt in prompts for token in token_list(prompt.token_ids)], decoded.model

    async def detokenize(self, body: Sequence[bytes]) -> str:
        """Give the text of a body's tokens.

        Raises:
            PenstockError: a token is none of the model's.
        """
        request = await asyncio.to_thread(parse_detokenize, b"".join(body))
        model = await self.served_model(request.model or None)
        tokens = request.tokens
        for token_id in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token_id < model.num_token_ids:
                raise RequestError(
                    f"ids must be >= 0 and < {model.num_token_ids}, got {token_id}", field="tokens"
                )
        return await asyncio.to_thread(model.tokenizer.decode, tokens, False)

    async def _decode(
        self, body: Sequence[bytes], size_bytes: int, options: RequestOptions, dialect: ApiDialect
    ) -> DecodedBody:
        def history(response_id: str) -> bytes:
            return kept_response(self._responses.get(options.tenant, response_id)).messages

        async def model_of(name: str) -> ServedModel:
            if dialect is TOKENIZE and not name:
                return await self.served_model(None)
            return await self._models.get(name, options.cache_salt)

        if dialect is RESPONSES:
            body = (with_items(b"".join(body), lambda name: self._responses.get(options.tenant, name)),)
        if size_bytes > LARGE_BYTES:
            return await self._encoders.encode(body, dialect=dialect.name, model_of=model_of, history=history)
        parsed = dialect.parse(b"".join(body))
        with parsed.fields:
            dialect.check(parsed.request, self.config.choices_max)
        before = b"" if parsed.previous is None else history(parsed.previous)
        messages = stored_messages(parsed, before) if before or parsed.stores else None
        request, fields = parsed.request, parsed.fields_now()
        model = await model_of(request.model)
        with fields:
            size_bytes += len(before)
            prompts = await self._preprocessor.encode(request, model, size_bytes, encoding_of(parsed))
        return DecodedBody(request, model, prompts, parsed.response, messages, parsed.embedding, fields)

    async def _with_media(self, decoded: DecodedBody, slot: RequestSlot) -> Sequence[EncodedPrompt]:
        """Give the prompts of a request, with their media expanded."""
        if not any(prompt.media for prompt in decoded.prompts):
            return decoded.prompts
        return await self._media.complete(decoded.prompts, decoded.request, decoded.model, slot)

    def response(self, tenant: str, response_id: str) -> KeptResponse:
        """Give a kept answer of `/v1/responses`.

        Raises:
            RequestError: it is not kept, or is another tenant's (404).
        """
        return kept_response(self._responses.get(tenant, response_id, "id"))

    def forget_response(self, tenant: str, response_id: str) -> None:
        """Delete a kept answer of `/v1/responses`.

        Raises:
            RequestError: it is not kept, or is another tenant's (404).
        """
        self._responses.delete(tenant, response_id)

    async def close(self) -> None:
        """End the encoder processes and connections for media. Safe twice."""
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
                    f"name one of {', '.join(names) or 'none, as no worker is ready'}", field="model"
                )
            (name,) = names
        return await self._models.get(name)

    async def tokenizer_info(self, name: str | None) -> TokenizerInfo:
        """Describe the tokenizer of a model; None names the only model.

        Raises:
            PenstockError: nobody serves it, or there are several and none is named.
        """
        model = await self.served_model(name)
        template = None if model.templates is None else model.templates.default
        tokens = {} if template is None else template.special_tokens
        return TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            model_max_length=model.card.context_length,
            bos_token=tokens.get("bos_token"),
            eos_token=tokens.get("eos_token"),
            unk_token=tokens.get("unk_token"),
            pad_token=tokens.get("pad_token"),
            chat_template=None if template is None else template.source,
        )

    def models(self) -> ModelList:
        entries = [_entry(card) for card in self.dispatcher.models().values()]
        first, last = (entries[0].id, entries[-1].id) if entries else (None, None)
        return ModelList(data=entries, first_id=first, last_id=last)

    def model(self, name: str) -> ModelEntry:
        """Raises: UnknownModelError: no worker serves it."""
        return _entry(self._models.card(name))

    def loads(self) -> DeploymentLoads:
        """Give the load of each model that is served now; an adapter has the load of its base model."""
        models = self.dispatcher.models()
        loads = {name: self.dispatcher.load(card.parent or name) for name, card in models.items()}
        return DeploymentLoads(
            models={name: load for name, load in loads.items() if load is not None},
            region=self._region,
            link_version=LINK_VERSION,
            time_s=wall_time_s(),
        )

    def unhealthy(self) -> str | None:
        """Give the reason why no request can be served now; None if one can."""
        return None if self.dispatcher.models() else "no worker is ready"

    def new_id(self) -> str:
        return f"{self._rng.getrandbits(96):024x}"

    def _pending(
        self, prepared: PreparedRequest, slot: RequestSlot, decoded: DecodedBody, dialect: ApiDialect
    ) -> PendingAnswer:
        """Make the completion of a prepared request."""
        request, name = decoded.request, prepared.model.card.name
        timer = self.metrics.timer(name, slot.arrived, prepared.prompt_tokens)
        completion = Completion(prepared, self.dispatcher, timer, explains=prepared.options.explains)
        if slot.use is not None:
            slot.use.charge(
                prepared.prompt_tokens,
                sum(request.sampling.max_tokens for request in prepared.requests),
                completion.tokens,
                asyncio.get_running_loop().time(),
            )
        context = AnswerContext(
            envelope=Envelope(
                prepared.id,
                int(wall_time_s()),
                name,
                isinstance(request, ChatRequest),
                short_call_ids=prepared.model.has_short_call_ids,
            ),
            request=request,
            token_bytes=prepared.model.detokenizer.token_bytes,
            choices=len(prepared.requests),
            logprobs=prepared.logprobs is not None,
            usage=completion.usage,
            sampling=prepared.requests[0].sampling,
            response=decoded.response,
            remember=self._remember(prepared, decoded.messages),
            annotations=prepared.annotations,
        )
        return PendingAnswer(completion, prepared, dialect, context, stream=bool(request.stream))

    def _remember(
        self, prepared: PreparedRequest, messages: bytes | None
    ) -> Callable[[Message, bytes], None] | None:
        """Give what stores the answer after its messages; None where they are not to be stored."""
        if messages is None:
            return None
        tenant, response_id = prepared.options.tenant, prepared.id

        def remember(answer: Message, response: bytes) -> None:
            self._responses.put(tenant, response_id, kept_bytes(messages, answer, response))

        return remember


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
