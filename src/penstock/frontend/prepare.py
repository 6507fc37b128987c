"""Prepares engine requests from an API request: template, tokens, block hashes, sampling parameters.

Block hashes are computed once per prompt; all its choices share them, and they are sent with each request.
"""

import asyncio
import random
from collections.abc import Sequence
from functools import cached_property

import msgspec

from penstock.core.errors import RequestError
from penstock.core.ids import RequestId
from penstock.core.types.instances import request_salt
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import num_tokens, token_list
from penstock.frontend.apis.bodies import (
    FORMATTED_PROMPT,
    TOKEN_IDS,
    AgentOptions,
    ChatRequest,
    CompletionRequest,
    ContinuationBody,
    GenerationRequest,
    agent_options,
    annotation_event,
    annotations_of,
)
from penstock.frontend.apis.checks import (
    demands_calls,
    named_tool,
    required_calls,
    stop_strings,
    structured_of,
    tool_schemas,
)
from penstock.frontend.encoding import EncodedPrompt, Encoding, encode_prompts
from penstock.frontend.errors import SAME, ClientFields, ContextLengthError
from penstock.frontend.limits.headers import NO_OPTIONS, RequestOptions
from penstock.frontend.text.answer import PromptPart
from penstock.frontend.text.models import ServedModel
from penstock.frontend.text.parser import ParserPlan

COMPLETION_TOKENS_DEFAULT = 16
"""`max_tokens` of a text completion without one, as OpenAI documents it."""
_VALUES_MAX = 1 << 19
"""Log-probabilities of prompts in one answer: about 20 MB."""
_STREAMED_VALUES_MAX = 1 << 14
"""In a stream, where they are encoded between other requests' tokens: about 10 ms."""
_ECHOED_BYTES_MAX = 16 << 20
"""Text of echoed prompts in one answer, of all choices, as JSON."""
_STREAMED_ECHOED_BYTES_MAX = 4 << 20
"""In a stream, where it is encoded between other requests' tokens: about 12 ms."""
_TOP_P_MIN = 1e-6
"""For 0, which engines refuse: below the probability of the likeliest of a million tokens, so that it alone is kept."""
THREAD_BYTES = 20_000
"""Larger bodies are encoded in a thread: this many bytes take about 5 ms (2 cores of an AMD EPYC)."""
_LIMITS_HERE_MAX = 16
"""Words and token ids of limits that are read on the event loop: a word takes 60 µs (2 cores of an AMD EPYC)."""


class RequestMetadata(msgspec.Struct, frozen=True):
    """A request's id, body size, deadline and header options."""

    id: str
    size_bytes: int
    deadline: float  # event loop time
    options: RequestOptions = NO_OPTIONS


class PreparedRequest(msgspec.Struct, frozen=True):
    """Engine requests ready to be sent, one per choice in the API's order."""

    id: str
    model: ServedModel
    requests: tuple[Request, ...]
    choices_per_prompt: int
    prompt_tokens: int
    options: RequestOptions = NO_OPTIONS
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    begins_text: bool = True
    min_tokens: int = 0
    shows_stop: bool = False
    """Whether answers end with the stop string or stop token that ended them."""
    parser: ParserPlan | None = None
    prompts: tuple[PromptPart, ...] = ()
    """What the answers say of their prompts, each; empty: nothing."""
    gives_token_ids: bool = False
    """Whether the answers have the ids of their tokens."""
    drops_output: bool = False
    """Whether the answers have no tokens of their own: `max_tokens` is 0, and engines make one."""

    annotations: bytes = b""
    """Encoded events before those of a streamed answer."""
    fields: ClientFields = SAME
    """The client's names of fields, for errors of workers."""

    def prompt_of(self, choice: int) -> PromptPart | None:
        return self.prompts[choice // self.choices_per_prompt] if self.prompts else None

    @property
    def num_prompt_values(self) -> int:
        """Log-probabilities of prompts in the whole answer."""
        return self.choices_per_prompt * sum(prompt.num_values for prompt in self.prompts)

    @property
    def echoed_bytes(self) -> int:
        """Text and token ids of prompts in the whole answer, as JSON."""
        return self.choices_per_prompt * sum(prompt.text_bytes + prompt.ids_bytes for prompt in self.prompts)


class TokenLimits(msgspec.Struct, frozen=True):
    """Which tokens the answers of a request may have, as `SamplingParams` has it."""

    stop_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, request: GenerationRequest, model: ServedModel) -> "TokenLimits":
        """Read the token limits of a checked request.

        Raises:
            RequestError: a token id is not the model's.
        """
        limits = cls(
            stop_token_ids=tuple(request.stop_token_ids or ()),
            logit_bias=tuple((int(key), bias) for key, bias in (request.logit_bias or {}).items()),
            allowed_token_ids=tuple(request.allowed_token_ids or ()),
            bad_words=_bad_words(request.bad_words or (), model),
        )
        _check_ids("stop_token_ids", limits.stop_token_ids, model)
        _check_ids("allowed_token_ids", limits.allowed_token_ids, model)
        _check_ids("logit_bias", [token_id for token_id, _ in limits.logit_bias], model)
        return limits


class Preprocessor:
    """Prepares requests of every model. Not thread-safe."""

    def __init__(self, *, hash_key: bytes, rng: random.Random) -> None:
        """Set what all requests share.

        Args:
            hash_key: the deployment's key of block hashes.
            rng: draws seeds for requests without one; must differ between processes.
        """
        self._hash_key = hash_key
        self._rng = rng

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns it, asked for once: asking takes a system call, half a microsecond."""
        return asyncio.get_running_loop()

    async def encode(
        self,
        request: ChatRequest | CompletionRequest,
        model: ServedModel,
        size_bytes: int,
        encode: Encoding = encode_prompts,
    ) -> tuple[EncodedPrompt, ...]:
        """Encode the prompts of a checked request; in a thread where its body has more than `THREAD_BYTES`.

        Raises:
            RequestError: see `encode_prompts`.
        """
        if size_bytes <= THREAD_BYTES:
            return encode(request, model, self._hash_key)
        return await asyncio.to_thread(encode, request, model, self._hash_key)

    async def limits(self, request: GenerationRequest, model: ServedModel) -> TokenLimits:
        """Read the limits of a request on tokens; in a thread where they are many.

        Raises:
            RequestError: see `TokenLimits.of`.
        """
        if len(request.bad_words or ()) + len(request.allowed_token_ids or ()) > _LIMITS_HERE_MAX:
            return await asyncio.to_thread(TokenLimits.of, request, model)
        return TokenLimits.of(request, model)

    def prepared(
        self,
        request: GenerationRequest,
        model: ServedModel,
        metadata: RequestMetadata,
        prompts: Sequence[EncodedPrompt],
        *,
        limits: TokenLimits | None = None,
        embeds: bool = False,
        fields: ClientFields = SAME,
    ) -> PreparedRequest:
        """Prepare a request from its encoded prompts.

        Args:
            request: checked.
            model: serves it.
            metadata: of the request.
            prompts: its own.
            limits: what `limits` gave; None: they are read here.
            embeds: as in `Request`.
            fields: for errors of workers.

        Raises:
            RequestError: a prompt is empty or exceeds the context, or the body names another session than a header.
        """
        card, n = model.card, request.n or 1
        limits = limits or TokenLimits.of(request, model)
        limit, logprobs = _limits(request)
        if isinstance(request, CompletionRequest) and request.answers_per_prompt > n:
            n, logprobs = request.answers_per_prompt, logprobs or 0  # by which the best ones are found
        parts = _prompt_parts(request, prompts, model)
        salt = request_salt(card.salt, request.cache_salt)
        seed = self._rng.getrandbits(63) if request.seed is None else request.seed & (2**63 - 1)
        agent, options = agent_options(request), metadata.options
        session = _session(agent, options)
        priority = _priority(request, agent, options)
        deadline_s = max(metadata.deadline - self._loop.time(), 0.0)
        going_on = _continuation(request)
        emitted = 0 if going_on is None else going_on.num_emitted
        requests: list[Request] = []
        asked = parts[0].asked if parts else None
        for prompt in prompts:
            room = _check_context(prompt, request, limit, card.context_length)
            max_tokens = room if limit is None else limit
            sampling = _sampling(request, model, limits, max_tokens=max_tokens, seed=seed, logprobs=logprobs)
            if asked is not None or not max_tokens:
                sampling = msgspec.structs.replace(
                    sampling, max_tokens=max(max_tokens, 1), prompt_logprobs=asked
                )
            if emitted:  # what engines count includes them
                least = sampling.min_tokens + emitted if sampling.min_tokens else 0
                sampling = msgspec.structs.replace(
                    sampling, max_tokens=sampling.max_tokens + emitted, min_tokens=least
                )
            for _ in range(n):
                requests.append(
                    Request(
                        request_id=RequestId(f"{metadata.id}-{len(requests)}"),
                        model=card.parent or card.name,
                        adapter=None if card.parent is None else card.name,
                        token_ids=prompt.token_ids,
                        sampling=sampling,
                        block_hashes=prompt.block_hashes,
                        salt=salt,
                        choice=len(requests) if going_on is None else going_on.choice,
                        num_emitted=emitted,
                        deadline_s=deadline_s,
                        session=session,
                        expected_output_tokens=agent.output_tokens,
                        retention=agent.retention,
                        follows_tool=_follows_tool(request),
                        tenant=options.tenant,
                        priority=priority,
                        slo_ttft_s=options.slo_ttft_s,
                        slo_itl_s=options.slo_itl_s,
                        media=prompt.expanded,
                        trace=options.trace,
                        embeds=embeds,
                        # A proxy may drop the header; what says how far the answer is, no client of a region sends.
                        is_forwarded=options.is_forwarded or going_on is not None,
                    )
                )
        prepared = PreparedRequest(
            id=metadata.id,
            model=model,
            requests=tuple(requests),
            choices_per_prompt=n,
            prompt_tokens=sum(num_tokens(prompt.token_ids) for prompt in prompts),
            options=options,
            stops=stop_strings(request),
            logprobs=logprobs,
            begins_text=isinstance(request, ChatRequest) and not request.continue_final_message,
            min_tokens=request.min_tokens or 0,
            shows_stop=bool(request.include_stop_str_in_output),
            parser=_parser(request, model, prompts[0], requests[0].sampling)
            if isinstance(request, ChatRequest)
            else None,
            prompts=parts,
            gives_token_ids=bool(request.return_token_ids),
            drops_output=limit == 0,
            annotations=b"" if request.nvext is None else _annotations(request, prompts),
            fields=fields,
        )
        _check_values(prepared, is_stream=bool(request.stream))
        _check_echoed(prepared, is_stream=bool(request.stream))
        return prepared


def _parser(
    request: ChatRequest, model: ServedModel, prompt: EncodedPrompt, sampling: SamplingParams
) -> ParserPlan | None:
    """Give how the answers are parsed; None if all of their text is for the user."""
    tools = tool_schemas(request)
    if sampling.structured is not None and required_calls(request) is None:
        return None  # constrained from its first token on, so without reasoning, calls and marks
    plan = ParserPlan(
        format=model.format,
        tools=tools,
        required=tools is not None and demands_calls(request),
        named=None if tools is None else named_tool(request),
        in_reasoning=prompt.in_reasoning,
        shows_reasoning=request.include_reasoning is not False,
        calls_max=1 if request.parallel_tool_calls is False else None,
    )
    is_forced = plan.required or plan.named is not None
    return plan if is_forced or (plan.is_needed and not request.continue_final_message) else None


def _follows_tool(request: GenerationRequest) -> bool:
    return isinstance(request, ChatRequest) and any(message.role == "tool" for message in request.messages)


def _session(agent: AgentOptions, options: RequestOptions) -> str | None:
    """Give the request's session, from its body or from a header.

    Raises:
        RequestError: the two name different ones.
    """
    if agent.session is None or options.session is None or agent.session == options.session:
        return agent.session or options.session
    raise RequestError(
        f"{agent.session!r} contradicts the session {options.session!r} in the header; send one of them",
        field="session.id",
    )


def _priority(request: GenerationRequest, agent: AgentOptions, options: RequestOptions) -> int:
    """Give `Request.priority` from the header, the body (as in vLLM, lower values come first) or `agent_hints`; at most the tenant's."""
    return options.priority_of(-request.priority if request.priority else agent.priority)


def _limits(request: GenerationRequest) -> tuple[int | None, int | None]:
    """Give (max_tokens, top log-probabilities per token); None where the request has none."""
    if isinstance(request, ChatRequest):
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return request.max_completion_tokens or request.max_tokens, logprobs
    assert isinstance(request, CompletionRequest)
    return COMPLETION_TOKENS_DEFAULT if request.max_tokens is None else request.max_tokens, request.logprobs


def _annotations(request: GenerationRequest, prompts: Sequence[EncodedPrompt]) -> bytes:
    """Encode what the request's `nvext.annotations` ask for; each prompt has its own."""
    names = annotations_of(request)
    events = []
    for prompt in prompts if names else ():
        if FORMATTED_PROMPT in names and isinstance(request, ChatRequest):
            events.append(annotation_event(FORMATTED_PROMPT, prompt.text))
        if TOKEN_IDS in names:
            events.append(annotation_event(TOKEN_IDS, token_list(prompt.token_ids)))
    return b"".join(events)


def _continuation(request: GenerationRequest) -> ContinuationBody | None:
    """Give what a client says of how far the answer has come; None where it begins."""
    return request.continuation if isinstance(request, CompletionRequest) else None


def _prompt_parts(
    request: GenerationRequest, prompts: Sequence[EncodedPrompt], model: ServedModel
) -> tuple[PromptPart, ...]:
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    gives_ids = bool(request.return_token_ids) and _continuation(request) is None  # who goes on has them
    if not (echoes or gives_ids) and request.prompt_logprobs is None:
        return ()
    echoed = request.logprobs if isinstance(request, CompletionRequest) and echoes else None
    return tuple(
        PromptPart(
            token_ids=prompt.token_ids,
            detokenizer=model.detokenizer,
            text=prompt.text if echoes else "",
            text_bytes=prompt.text_bytes if echoes else 0,
            echoed=echoed,
            listed=request.prompt_logprobs,
            gives_ids=gives_ids,
        )
        for prompt in prompts
    )


def _check_values(prepared: PreparedRequest, *, is_stream: bool) -> None:
    """Raises: RequestError: the answer would have too many log-probabilities of prompts."""
    most = _STREAMED_VALUES_MAX if is_stream else _VALUES_MAX
    if prepared.num_prompt_values > most:
        name = "logprobs" if prepared.prompts[0].echoed is not None else "prompt_logprobs"
        raise RequestError(
            f"{prepared.prompt_tokens} prompt tokens with {prepared.prompts[0].asked} alternatives each, for"
            f" {prepared.choices_per_prompt} choices, are {prepared.num_prompt_values} log-probabilities; at most {most} fit"
            f" {'a stream' if is_stream else 'an answer'}; send shorter prompts, or ask for fewer alternatives or choices",
            field=name,
        )


def _check_echoed(prepared: PreparedRequest, *, is_stream: bool) -> None:
    """Raises: RequestError: the answer would repeat too much text of prompts."""
    most = _STREAMED_ECHOED_BYTES_MAX if is_stream else _ECHOED_BYTES_MAX
    echoed, n = prepared.echoed_bytes, prepared.choices_per_prompt
    if echoed > most:
        name = "echo" if prepared.prompts[0].text else "return_token_ids"
        raise RequestError(
            f"{echoed // n} bytes of prompts as JSON, for {n} choices, are {echoed} bytes; at most {most} fit"
            f" {'a stream' if is_stream else 'an answer'}; send shorter prompts, ask for fewer choices, or leave {name} out",
            field=name,
        )


def _check_context(
    prompt: EncodedPrompt, request: GenerationRequest, limit: int | None, context_length: int
) -> int:
    """Give the number of output tokens that fit after the prompt."""
    size = num_tokens(prompt.token_ids)
    if not size:
        raise RequestError("is empty; expected at least one token", field=prompt.param)
    room = context_length - size
    if room < 1:
        raise ContextLengthError(
            f"{size} tokens do not fit the model's context of {context_length}, which has "
            "to hold the answer too; shorten them",
            field=prompt.param,
        )
    if limit is not None and limit > room:
        name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        raise ContextLengthError(
            f"{size} prompt tokens and {limit} for the answer exceed the model's context of "
            f"{context_length}; at most {room} are left",
            field=name,
        )
    return room


def _check_ids(name: str, token_ids: Sequence[int], model: ServedModel) -> None:
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
    if not 0 <= lowest <= highest < model.num_token_ids:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(f"must be >= 0 and < {model.num_token_ids}, got {wrong}", field=name)


def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Tokenize each word as it is at a text's start and after a space, which are different tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            token_ids = tuple(model.tokenizer.encode(text, add_special_tokens=False).ids)
            if token_ids:
                found[token_ids] = None
    return tuple(found)


def _sampling(
    request: GenerationRequest,
    model: ServedModel,
    limits: TokenLimits,
    *,
    max_tokens: int,
    seed: int,
    logprobs: int | None,
) -> SamplingParams:
    defaults = model.defaults
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(f"must be <= max_tokens, got {min_tokens} > {max_tokens}", field="min_tokens")

    def value(name: str, neutral: float) -> float:
        given = getattr(request, name)
        return defaults.get(name, neutral) if given is None else given

    top_k = int(value("top_k", 0))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0) or _TOP_P_MIN,
        top_k=top_k if top_k > 0 else None,
        min_p=value("min_p", 0.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        seed=seed,
        seed_drawn=request.seed is None,
        stop_token_ids=limits.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        logprobs=logprobs,
        structured=structured_of(request),
        logit_bias=limits.logit_bias,
        allowed_token_ids=limits.allowed_token_ids,
        bad_words=limits.bad_words,
    )
