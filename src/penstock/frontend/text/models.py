"""Served models with their tokenizer, chat template and limits.

A model card's files are fetched from its workers once, by content hash, and cached.
"""

import asyncio
import copy
from collections import OrderedDict
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import ADDITIONAL_TEMPLATES, TEXT_FILES, ModelCard
from penstock.frontend.errors import UnknownModelError
from penstock.frontend.text.parser import UNKNOWN, OutputFormat, format_of, known_format
from penstock.frontend.text.template import ChatTemplates
from penstock.frontend.text.tokens import Detokenizer, LengthBound, WordTokens
from penstock.seams import RequestDispatcher

TOKENIZER = "tokenizer.json"
MODELS_MAX = 16
"""Models of a process whose tokenizer and chat template stay in memory; as many LoRA adapters are remembered after their last worker left."""

_log = get_logger()


class ServedModel:
    """One model card with its parsed files. Immutable; its tokenizer may be used in threads."""

    def __init__(self, card: ModelCard, files: dict[str, bytes]) -> None:
        """Load the files; a large vocabulary takes a second, so call it in a thread.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        if TOKENIZER not in files:
            raise ConfigError(f"model {card.name}: has no {TOKENIZER}; its worker must publish one")
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
            self.detokenizer = Detokenizer(self.tokenizer, files[TOKENIZER])
            self.length_bound = LengthBound(self.tokenizer, files[TOKENIZER])
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"model {card.name}: {TOKENIZER}: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.words = WordTokens(self.tokenizer, files[TOKENIZER])
        """Tokenizes texts, with the tokens of words cached."""
        self.templates = ChatTemplates.load(files)
        """Chat templates; None if the model has none."""
        self.format = self._format()
        """How the model writes reasoning and tool calls."""
        marked = Detokenizer(self.tokenizer, files[TOKENIZER], self.format.markers)
        self.marked_detokenizer = marked if marked.shows_more else self.detokenizer
        """Shows the special tokens that parsers of the model's format read."""
        self.card = card
        self.source = card
        """Card whose files are loaded; an adapter has its base model's."""
        self.defaults = dict(card.default_sampling)
        self.num_token_ids = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _format(self) -> OutputFormat:
        if self.templates is None:
            return format_of("")
        special = self._special_tokens()
        return known_format(format_of(self.templates.source), self.templates.tool_use.history, special)

    def _special_tokens(self) -> dict[str, int]:
        """Give the ids of the tokenizer's special tokens."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def has_short_call_ids(self) -> bool:
        """Whether the chat template takes only ids of calls of nine letters or digits."""
        return self.templates is not None and not self.templates.tool_use.rules.long_call_ids

    def turn_end(self) -> int | None:
        """Give the special token with which the chat template ends an assistant's turn; None if no single one does."""
        if self.templates is None:
            return None
        ids = self._special_tokens()
        end = self.templates.default.turn_end(ids)
        return None if end is None else ids[end]

    def adapted(self, card: ModelCard) -> "ServedModel":
        """Copy the model for a LoRA adapter or a tenant: another card, everything else shared."""
        model = copy.copy(self)
        model.card = card
        return model


class ModelCache:
    """Caches served models: loads on first use, keeps the most recent. One event loop owns it.

    Hosts that serve the same files give cards that differ in their date alone, so the date is no part of a model's key.
    """

    def __init__(self, dispatcher: RequestDispatcher, models_max: int = MODELS_MAX) -> None:
        self._dispatcher = dispatcher
        self._models_max = models_max
        self._models: OrderedDict[ModelCard, ServedModel] = OrderedDict()
        self._adapters: OrderedDict[str, ModelCard] = OrderedDict()
        self._loading = asyncio.Lock()

    async def get(self, name: str, cache_salt: str = "") -> ServedModel:
        """Get a model, loading it on first use; with a tenant's `cache_salt` its prompts share no blocks with others'.

        A cached model without workers is returned too: the dispatcher waits for its workers to return.

        Raises:
            UnknownModelError: no worker serves it; the text lists the served models.
            Unavailable: no worker is ready, the model's workers take no requests now, or its files cannot be fetched now.
            ConfigError: a file is missing or malformed.
        """
        if cache_salt:
            shared = await self.get(name)
            return shared.adapted(shared.card.salted(cache_salt))
        card = self._dispatcher.models().get(name) or self._remembered(name) or self.card(name)
        if card.parent is not None:
            parent = await self.get(card.parent)
            self._remember_adapter(card)
            return parent.adapted(card)
        key = _undated(card)
        model = self._models.get(key)
        if model is None:
            async with self._loading:  # others wait, then find it cached
                model = self._models.get(key) or await self._load(card)
        if key in self._models:
            self._models.move_to_end(key)
        return model

    async def files(self, card: ModelCard) -> dict[str, bytes]:
        """Fetch the files of a `ServedModel`, by name.

        Raises:
            PenstockError: the workers cannot send them now.
        """
        return {
            file.name: await self._dispatcher.fetch_file(card, file) for file in card.files if file.makes_text
        }

    def card(self, name: str) -> ModelCard:
        """Get the card of a model that is served now.

        Raises:
            UnknownModelError: no worker serves it.
            Unavailable: no worker is ready, or the model's workers take no requests now.
        """
        cards = self._dispatcher.models()
        if not cards:
            raise Unavailable("no worker is ready; try again in a moment", retry_after_s=1.0)
        if name not in cards:
            if self._dispatcher.expects(name):
                raise Unavailable(
                    f"model: {name!r} has workers, but none can take requests now; try again in a moment",
                    retry_after_s=1.0,
                )
            present = ", ".join(sorted(cards))
            raise UnknownModelError(f"{name!r} does not exist here; models: {present}", field="model")
        return cards[name]

    def _remembered(self, name: str) -> ModelCard | None:
        adapter = self._adapters.get(name)
        return adapter or next((card for card in reversed(self._models) if card.name == name), None)

    def _remember_adapter(self, card: ModelCard) -> None:
        self._adapters[card.name] = card
        self._adapters.move_to_end(card.name)
        if len(self._adapters) > self._models_max:
            self._adapters.popitem(last=False)

    async def _load(self, card: ModelCard) -> ServedModel:
        files = await self.files(card)
        model = self._models[_undated(card)] = await asyncio.to_thread(ServedModel, card, files)
        while len(self._models) > self._models_max:
            self._models.popitem(last=False)
        adapts = [] if model.templates is None else model.templates.default.rules.lacking
        if model.format.family == UNKNOWN:
            fix = "no grammar reads the template's tool calls: answers have them as text, and with tool_choice 'required' as calls"
            _log.warning("tool_calls_unknown", model=card.name, shown=list(model.format.markers), effect=fix)
        _log.info("model_loaded", model=card.name, context_tokens=card.context_length, template_lacks=adapts)
        return model


def text_files(directory: Path) -> dict[str, bytes]:
    """Read the files of a model on which its texts depend (`CardFile.makes_text`), by name.

    Raises:
        ConfigError: one cannot be read.
    """
    additional = sorted((directory / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    files = {}
    for name in (*TEXT_FILES, *(ADDITIONAL_TEMPLATES + path.name for path in additional)):
        try:
            files[name] = (directory / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{directory / name}: {error.strerror}") from error
    return files


def _undated(card: ModelCard) -> ModelCard:
    return msgspec.structs.replace(card, created_s=0)
