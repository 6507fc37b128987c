"""Compiled grammars of one engine.

A grammar is compiled on the thread of `Preparations`, once for all requests with the same constraint. The runner's thread
copies it for each sequence. How much a grammar may cost is bounded by llguidance itself: by its size, and by the work of one
mask. Source of the bounds: docs/decisions/0114.
"""

import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.core.errors import ConfigError, RequestError
from penstock.core.types.requests import Request
from penstock.engine.paged.structured.constraint import llguidance_grammar, plain, refusal

_GRAMMARS_MAX = 512
"""Constraints whose grammar, or whose error, is kept; a grammar takes 10 to 500 kB."""


class Grammars:
    """Compiles constraints and keeps the latest. Methods may be called on any thread."""

    def __init__(self) -> None:
        """Make it; `open` names the tokenizer before the first request."""
        self._tokenizer_file: Path | None = None
        self._vocab_size = 0
        self._eos_token_ids: tuple[int, ...] = ()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher | RequestError] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def open(self, model: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> bool:
        """Use the tokenizer of a checkpoint, which the first constraint loads: that takes a second and 80 MB for 128,000 tokens.

        Returns:
            False if the checkpoint has no tokenizer.json or no end-of-sequence token: then no constraint can be kept.
        """
        file = model / "tokenizer.json"
        if not file.is_file() or not eos_token_ids:
            return False
        self._tokenizer_file, self._vocab_size, self._eos_token_ids = file, vocab_size, eos_token_ids
        return True

    def is_ready(self, request: Request) -> bool:
        """Say whether a request needs no `prepare`."""
        structured = request.sampling.structured
        with self._lock:
            return structured is None or isinstance(self._compiled.get(structured), LLMatcher)

    def prepare(self, request: Request) -> None:
        """Compile the request's grammar; takes up to half a second.

        Raises:
            RequestError: the constraint is malformed or too large, or cannot be kept to.
        """
        assert request.sampling.structured is not None, "there is nothing to prepare"
        self._compile(request.sampling.structured)

    def matcher(self, structured: bytes) -> LLMatcher:
        """Make the matcher of a sequence, before its first token. Compiles only what was dropped since `prepare`.

        Raises:
            RequestError: see `prepare`.
        """
        return self._compile(structured).deep_copy()

    def _compile(self, structured: bytes) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(structured)
            if found is not None:
                self._compiled.move_to_end(structured)
        if found is None:
            try:
                found = self._compiled_now(structured)
            except RequestError as error:
                found = error
            with self._lock:
                self._compiled[structured] = found
                while len(self._compiled) > _GRAMMARS_MAX:
                    self._compiled.popitem(last=False)
        if isinstance(found, RequestError):
            raise RequestError(
                found.message, param=found.param
            )  # not the same again: tracebacks would add up
        return found

    def _compiled_now(self, structured: bytes) -> LLMatcher:
        grammar = llguidance_grammar(structured)
        matcher = LLMatcher(
            self._load_tokenizer(), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        # one step on a copy finds what only shows while matching: rules without an end, rows that are too large
        trial = matcher.deep_copy()
        if not trial.is_error():
            mask = np.frombuffer(trial.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if len(allowed):
                trial.consume_token(int(allowed[0]))
        if trial.is_error():
            raise refusal(f"it cannot be compiled: {plain(trial.get_error())}")
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                assert self._tokenizer_file is not None, "used before open"
                try:
                    text = self._tokenizer_file.read_text()
                    self._tokenizer = LLTokenizer(
                        text, n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids)
                    )
                except (OSError, ValueError) as error:
                    raise ConfigError(
                        f"{self._tokenizer_file}: llguidance cannot read it: {error}; response_format needs it"
                    ) from error
            return self._tokenizer
