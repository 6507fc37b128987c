"""What the router alone is asked: the body of `/route`, and the tokens of its text by the servers' model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.core.errors import RequestError
from penstock.core.types.instances import ModelCard
from penstock.core.wire import TokenArray
from penstock.frontend.apis.bodies import Message
from penstock.frontend.apis.checks import CACHE_SALT_CHARACTERS_MAX
from penstock.frontend.apis.decoding import decode_body
from penstock.frontend.encoding import encode_chat, encode_text
from penstock.frontend.limits.headers import ITL_MS, TTFT_MS, target_s
from penstock.frontend.text.models import ServedModel, text_files
from penstock.router.gateway import Query, tokens_of


class RouteModel:
    """A model's tokenizer and chat template, and the names by which gateways ask for it. Immutable."""

    def __init__(self, model: ServedModel, directory: str, names: Sequence[str]) -> None:
        """Take the model of a directory."""
        self.directory = directory
        self.names = tuple(names)
        self._model = model

    @classmethod
    def open(cls, directory: str, names: Sequence[str], context_length: int) -> Self:
        """Load the model's files; a large vocabulary takes a second, so call it in a thread.

        Args:
            directory: with tokenizer.json.
            names: of the model, then of its adapters.
            context_length: longest prompt in tokens, and one.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        card = ModelCard(name=names[0], context_length=context_length, block_size=1, salt=b"")
        return cls(ServedModel(card, text_files(Path(directory))), directory, names)

    @property
    def context_length(self) -> int:
        return self._model.card.context_length

    def prompt(self, text: str) -> TokenArray:
        """Tokenize the prompt of a completion.

        Raises:
            RequestError: it is too long.
        """
        return encode_text(self._model, text)

    def chat(self, messages: list[dict[str, Any]]) -> TokenArray:
        """Render messages by the chat template, and tokenize them.

        Raises:
            RequestError: they are no messages, the template refuses them, or there is no template.
        """
        try:
            checked = msgspec.convert(messages, list[Message])
        except msgspec.ValidationError as error:
            raise RequestError(str(error), field="messages") from error
        for number, message in enumerate(checked):
            for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.type != "text":
                    where = f"messages[{number}].content[{index}]"
                    raise RequestError(
                        f"{part.type!r}: the router cannot tell what a server makes of it, so it routes text only; leave"
                        " it out and route by the text",
                        field=f"{where}.type",
                        param="messages",
                    )
        return encode_chat(self._model, checked)


_SESSION_CHARACTERS_MAX = 256


class RouteBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `token_ids`, `prompt` and `messages` is given. Latency targets are in milliseconds.

    Requests of different `cache_salt` share no blocks.
    """

    model: str
    token_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    session: str | None = None
    exclude: tuple[str, ...] = ()
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None


def decode_query(body: bytes, model: RouteModel | None = None) -> Query:
    """Decode and check a body of `/route`; token ids come as an array.

    Args:
        body: JSON.
        model: tokenizes the text of requests for it.

    Raises:
        RequestError: the body is invalid.
    """
    return _query_of(decode_body(body, RouteBody), model)


def _query_of(body: RouteBody, model: RouteModel | None) -> Query:
    """Convert a body to the router's query.

    Raises:
        RequestError: a field has an invalid value.
    """
    given = [name for name in ("token_ids", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(f"give one of token_ids, prompt and messages, got {' and '.join(given) or 'none'}")
    if body.session is not None and len(body.session) > _SESSION_CHARACTERS_MAX:
        raise RequestError(
            f"must have at most {_SESSION_CHARACTERS_MAX} characters, got {len(body.session)}",
            field="session",
        )
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= CACHE_SALT_CHARACTERS_MAX:
        raise RequestError(
            f"must have 1 to {CACHE_SALT_CHARACTERS_MAX} characters, got {len(body.cache_salt)}",
            field="cache_salt",
        )
    ttft_ms, itl_ms = body.slo_ttft_ms, body.slo_itl_ms
    return Query(
        model=body.model,
        prompt=_prompt_of(body, None if model is None or body.model not in model.names else model),
        cache_salt=body.cache_salt,
        session=body.session,
        exclude=body.exclude,
        slo_ttft_s=None if ttft_ms is None else target_s("slo_ttft_ms", ttft_ms, TTFT_MS),
        slo_itl_s=None if itl_ms is None else target_s("slo_itl_ms", itl_ms, ITL_MS),
    )


def _prompt_of(body: RouteBody, model: RouteModel | None) -> TokenArray | str:
    if body.token_ids is not None:
        return tokens_of(body.token_ids)
    if body.prompt is not None:
        return body.prompt if model is None else model.prompt(body.prompt)
    messages = body.messages or []
    return text_of(messages) if model is None else model.chat(messages)


def text_of(messages: list[dict[str, Any]]) -> str:
    """Join messages in order, so that a conversation's text is a prefix of its next request's."""
    return "".join(msgspec.json.encode(message).decode() + "\n" for message in messages)
