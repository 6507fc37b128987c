"""The model of the servers that the standalone router watches: turns the text of `/route` into the tokens that servers compute."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.core.errors import RequestError
from penstock.core.types.instances import ModelCard
from penstock.core.wire import TokenArray
from penstock.frontend.openai.bodies import Message
from penstock.frontend.requests.encoding import encode_chat, encode_text
from penstock.frontend.text.models import ServedModel, text_files


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
            raise RequestError(f"messages: {error}", param="messages") from error
        for number, message in enumerate(checked):
            for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.type != "text":
                    where = f"messages[{number}].content[{index}]"
                    raise RequestError(
                        f"{where}.type: {part.type!r}: the router cannot tell what a server makes of it, so it routes text only; leave"
                        " it out and route by the text",
                        param="messages",
                    )
        return encode_chat(self._model, checked)
