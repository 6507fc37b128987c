"""From an API request to engine requests: template, tokens, block hashes, sampling parameters.

Block hashes are computed once per prompt and shared by all its choices; they travel with the request.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.core.errors import RequestError
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId
from penstock.core.types import Request, SamplingParams
from penstock.core.wire import TokenArray, pack_hashes, pack_tokens
from penstock.frontend.errors import ContextLengthError
from penstock.frontend.headers import NO_WISHES, Wishes
from penstock.frontend.models import ServedModel
from penstock.frontend.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
)
from penstock.frontend.validation import stop_strings

COMPLETION_TOKENS_DEFAULT = 16
"""`max_tokens` of a plain completion that gives none, as OpenAI documents it."""
_THREAD_BYTES = 20_000  # a body this large is encoded in a thread: about 5 ms (2 cores of an AMD EPYC)
_BIG_BYTES = 1 << 20  # encoding takes some 150 bytes of memory for each byte of text
_BIG_AT_ONCE = 2

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request beside its content: the answer's id, the body's size, when time is up, its headers."""

    id: str
    size_bytes: int
    deadline: float  # in the event loop's time
    wishes: Wishes = NO_WISHES


@dataclass(frozen=True, slots=True)
class Work:
    """A request ready to be sent: one engine request per choice, in the order of the API's indices."""

    id: str
    model: ServedModel
    requests: tuple[Request, ...]
    choices_per_prompt: int
    prompt_tokens: int
    wishes: Wishes = NO_WISHES
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    begins_text: bool = True


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: TokenArray
    param: str


class Preprocessor:
    """Prepares requests of every model. Not thread-safe."""

    def __init__(self, *, hash_key: bytes, rng: random.Random) -> None:
        """Take what all requests share.

        Args:
            hash_key: the deployment's, for block hashes.
            rng: where the seeds of requests without one come from; another one in each process.
        """
        self._hash_key = hash_key
        self._rng = rng
        # Threads of their own, not a semaphore: one whose client has gone goes on, and still counts.
        self._big = ThreadPoolExecutor(_BIG_AT_ONCE, thread_name_prefix="encode-big")

    async def chat(self, request: ChatRequest, model: ServedModel, arrival: Arrival) -> Work:
        """Prepare a request that `validation.check_chat` let pass; a large one is encoded in a thread, few big ones at once.

        Raises:
            RequestError: the template refuses the messages, or they do not fit the context.
        """
        if model.template is None:
            raise RequestError(
                f"messages: model {model.card.name!r} has no chat template; use /v1/completions",
                param="messages",
            )
        token_ids = await self._off_loop(arrival.size_bytes, lambda: _encode_chat(request, model))
        limit = request.max_completion_tokens or request.max_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        prompts = [_Prompt(token_ids, "messages")]
        return self._work(request, model, arrival, prompts, limit=limit, logprobs=logprobs)

    async def completion(self, request: CompletionRequest, model: ServedModel, arrival: Arrival) -> Work:
        """Prepare a request that `validation.check_completion` let pass; see `chat`.

        Raises:
            RequestError: a prompt is empty, has ids out of range, or does not fit the context.
        """
        encoded = await self._off_loop(arrival.size_bytes, lambda: _encode_prompts(request, model))
        prompts = [_Prompt(token_ids, "prompt") for token_ids in encoded]
        limit = request.max_tokens or COMPLETION_TOKENS_DEFAULT
        return self._work(request, model, arrival, prompts, limit=limit, logprobs=request.logprobs)

    async def _off_loop(self, size_bytes: int, encode: Callable[[], _T]) -> _T:
        if size_bytes <= _THREAD_BYTES:
            return encode()
        threads = self._big if size_bytes > _BIG_BYTES else None
        return await asyncio.get_running_loop().run_in_executor(threads, encode)

    def _work(
        self,
        request: GenerationRequest,
        model: ServedModel,
        arrival: Arrival,
        prompts: Sequence[_Prompt],
        *,
        limit: int | None,
        logprobs: int | None,
    ) -> Work:
        card, n = model.card, request.n or 1
        salt = request_salt(card.salt, request.cache_salt)
        seed = self._rng.getrandbits(63) if request.seed is None else request.seed & (2**63 - 1)
        deadline_s = max(arrival.deadline - asyncio.get_running_loop().time(), 0.0)
        requests: list[Request] = []
        for prompt in prompts:
            room = _check_context(prompt, request, limit, card.context_length)
            sampling = _sampling(request, model, max_tokens=limit or room, seed=seed, logprobs=logprobs)
            hashes = block_hashes(prompt.token_ids, card.block_size, salt, key=self._hash_key)
            packed_tokens, packed_hashes = pack_tokens(prompt.token_ids), pack_hashes(hashes)
            for _ in range(n):
                requests.append(
                    Request(
                        request_id=RequestId(f"{arrival.id}-{len(requests)}"),
                        model=card.parent or card.name,
                        adapter=None if card.parent is None else card.name,
                        token_ids=packed_tokens,
                        sampling=sampling,
                        block_hashes=packed_hashes,
                        salt=salt,
                        choice=len(requests),
                        deadline_s=deadline_s,
                        session=arrival.wishes.session,
                        tenant=arrival.wishes.tenant,
                        priority=arrival.wishes.priority,
                        slo_ttft_s=arrival.wishes.slo_ttft_s,
                        slo_itl_s=arrival.wishes.slo_itl_s,
                    )
                )
        return Work(
            id=arrival.id,
            model=model,
            requests=tuple(requests),
            choices_per_prompt=n,
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            wishes=arrival.wishes,
            stops=stop_strings(request),
            logprobs=logprobs,
            begins_text=isinstance(request, ChatRequest),
        )


def request_salt(card_salt: bytes, cache_salt: str | None) -> bytes:
    """Combine the model's salt with the caller's: callers with different cache salts share no blocks."""
    return card_salt if cache_salt is None else card_salt + b"|cache_salt=" + cache_salt.encode()


def _encode_chat(request: ChatRequest, model: ServedModel) -> TokenArray:
    assert model.template is not None
    text = model.template.render([_message(m) for m in request.messages], request.chat_template_kwargs)
    return _encode(model, text, "messages", special=False)  # the template writes the special tokens


def _message(message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text or "" for part in content)
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return fields


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Turn the arguments, a JSON text in the API, into the object that templates expect."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _encode_prompts(request: CompletionRequest, model: ServedModel) -> list[TokenArray]:
    prompt: Any = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    return [
        _encode(model, item, "prompt", special=True) if isinstance(item, str) else _check_ids(item, model)
        for item in prompt
    ]


def _encode(model: ServedModel, text: str, param: str, *, special: bool) -> TokenArray:
    context_length = model.card.context_length
    if len(text) > context_length and (least := model.length_bound.tokens_min(text)) >= context_length:
        raise ContextLengthError(
            f"{param}: {len(text.encode())} bytes are at least {least} tokens and do not fit the model's context of "
            f"{context_length}, which has to hold the answer too; shorten them",
            param=param,
        )
    # The batch calls release the GIL, the plain ones do not; the fast one leaves out character offsets.
    (encoding,) = model.tokenizer.encode_batch_fast([text], add_special_tokens=special)
    return np.array(encoding.ids, dtype=np.int32)


def _check_ids(token_ids: list[int], model: ServedModel) -> TokenArray:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < model.num_token_ids:
            raise RequestError(
                f"prompt: token ids must be >= 0 and < {model.num_token_ids}, got {token_id}", param="prompt"
            )
    return np.array(token_ids, dtype=np.int32)


def _check_context(
    prompt: _Prompt, request: GenerationRequest, limit: int | None, context_length: int
) -> int:
    """Give how many tokens fit after the prompt."""
    size = len(prompt.token_ids)
    if not size:
        raise RequestError(f"{prompt.param}: is empty; expected at least one token", param=prompt.param)
    room = context_length - size
    if room < 1:
        raise ContextLengthError(
            f"{prompt.param}: {size} tokens do not fit the model's context of {context_length}, which has "
            "to hold the answer too; shorten them",
            param=prompt.param,
        )
    if limit is not None and limit > room:
        name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        raise ContextLengthError(
            f"{name}: {size} prompt tokens and {limit} for the answer exceed the model's context of "
            f"{context_length}; at most {room} are left",
            param=name,
        )
    return room


def _sampling(
    request: GenerationRequest, model: ServedModel, *, max_tokens: int, seed: int, logprobs: int | None
) -> SamplingParams:
    defaults = model.defaults
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: must be <= max_tokens, got {min_tokens} > {max_tokens}", param="min_tokens"
        )
    for token_id in request.stop_token_ids or ():
        if not 0 <= token_id < model.num_token_ids:
            raise RequestError(
                f"stop_token_ids: must be >= 0 and < {model.num_token_ids}, got {token_id}",
                param="stop_token_ids",
            )

    def value(name: str, neutral: float) -> float:
        given = getattr(request, name)
        return defaults.get(name, neutral) if given is None else given

    top_k = int(value("top_k", 0))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=top_k if top_k > 0 else None,
        min_p=value("min_p", 0.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        seed=seed,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        logprobs=logprobs,
    )
