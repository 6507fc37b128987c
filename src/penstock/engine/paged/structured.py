"""Constrained answers: grammars, their matchers, and token masks of the running sequences."""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, EngineError, PenstockError, RequestError
from penstock.core.types.requests import Request
from penstock.engine.scheduling.sequences import SequenceTable

CONSTRAINT_BYTES_MAX = 1 << 20
GRAMMAR_CHARACTERS_MAX = 1 << 16
"""GBNF is converted in Python, which takes 0.1 s for so much of it."""
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_ERROR_CHARACTERS_MAX = 300
_PLAIN = {
    r"\bNoExtension(Bias)?\b": "no text can match it",
    r"oneOf constraints are not supported\. Enable '\w+' option to approximate oneOf with anyOf": "two options of oneOf may"
    " match the same value, which no grammar can exclude; write anyOf, or give each option a constant of its own",
    r"Unimplemented keys: ": "keys that no grammar can keep to: ",
}
"""Patterns in llguidance's errors, and what is said instead."""
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""A model that has nothing to say must not write white space for ever."""


def llguidance_grammar(structured: bytes) -> str:
    """Translate a constraint, which may still turn out not to compile.

    Args:
        structured: as in `SamplingParams`.

    Raises:
        RequestError: it is malformed, too large, or of a kind that this engine does not have.
    """
    if len(structured) > CONSTRAINT_BYTES_MAX:
        raise refusal(f"{len(structured)} bytes; at most {CONSTRAINT_BYTES_MAX} are allowed")
    try:
        fields = msgspec.json.decode(structured, type=dict[str, Any])
        kind, value = next((kind, value) for kind in _KINDS if (value := fields.get(kind)) is not None)
    except (msgspec.MsgspecError, RecursionError, StopIteration) as error:
        raise refusal(
            f"expected a JSON object with one of {', '.join(_KINDS)}, which is what the engine paged keeps to"
        ) from error
    try:
        return _TRANSLATE[kind](value)
    except (ValueError, TypeError, RecursionError, IndexError, KeyError) as error:
        raise refusal(f"{kind}: {plain(str(error))}") from error


def refusal(why: str) -> RequestError:
    """Make the error for a constraint that this engine cannot keep to."""
    return RequestError(
        f"response_format: {why}; simplify the schema, regex or grammar, or leave it out",
        param="response_format",
    )


def plain(error: str) -> str:
    """Say llguidance's error in one line, without the names of its own options and states."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    for theirs, ours in _PLAIN.items():
        line = re.sub(theirs, ours, line)
    return line[:_ERROR_CHARACTERS_MAX]


def _json(schema: Any) -> str:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return LLMatcher.grammar_from_json_schema(text, defaults=_JSON)  # type: ignore[arg-type]  # every key is optional


def _json_object(_: Any) -> str:
    return _json({"type": "object"})


def _regex(regex: Any) -> str:
    if not isinstance(regex, str):
        raise TypeError(f"must be a string, got {type(regex).__name__}")
    return LLMatcher.grammar_from_regex(regex)


def _choice(choices: Any) -> str:
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(each, str) and each for each in choices)
    ):
        raise TypeError("must be a list of strings, none of them empty")
    options = " | ".join(msgspec.json.encode(each).decode() for each in choices)
    return LLMatcher.grammar_from_lark(f"start: {options}")


def _grammar(grammar: Any) -> str:
    if not isinstance(grammar, str) or len(grammar) > GRAMMAR_CHARACTERS_MAX:
        raise TypeError(f"must be a string of at most {GRAMMAR_CHARACTERS_MAX} characters, in GBNF or Lark")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(grammar))
    except Exception as error:  # the converter raises nothing narrower
        raise ValueError(str(error)) from error


_TRANSLATE = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


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


Bools = NDArray[np.bool_]


class Matchers:
    """One matcher by slot of the `SequenceTable`. One thread owns it.

    A matcher reads the output tokens of its sequence, wherever they were sampled: a sequence that was preempted, or came from
    another worker, goes on as if it had been here from the start.
    """

    def __init__(self, grammars: Grammars, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._running: dict[int, _Running] = {}
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def masks(self, table: SequenceTable, slots: NDArray[np.int32]) -> tuple[Bools, dict[int, PenstockError]]:
        """Give what the sequences may go on with.

        Args:
            table: their tokens.
            slots: (n,) slots of sequences with `SamplingParams.structured`.

        Returns:
            (n, vocabulary) bool, and by index errors of sequences that cannot go on; all of their tokens are allowed.
        """
        masks = np.ones((len(slots), self._vocab_size), dtype=np.bool_)
        errors: dict[int, PenstockError] = {}
        for index, slot in enumerate(slots.tolist()):
            try:
                masks[index] = self._mask(table, slot)
            except PenstockError as error:
                errors[index] = error
                self._running.pop(slot, None)
        return masks, errors

    def _mask(self, table: SequenceTable, slot: int) -> Bools:
        request = table.requests[slot]
        assert request is not None, f"slot {slot} is planned but holds no request"
        running = self._running.get(slot)
        if running is None or running.request is not request:
            assert request.sampling.structured is not None, "asked for the mask of a free sequence"
            running = self._running[slot] = _Running(
                request, self._grammars.matcher(request.sampling.structured)
            )
        start, end = int(table.num_prompt[slot]), int(table.num_tokens[slot])
        running.read(table.token_ids[slot, start:end].tolist())
        matcher = running.matcher
        mask: Bools = np.zeros(self._vocab_size, dtype=np.bool_)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            bits = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
            mask = bits.view(np.bool_)
        if matcher.is_error():
            raise refusal(f"its grammar became too large: {plain(matcher.get_error())}")
        if matcher.is_accepting() or matcher.is_stopped():
            mask[self._eos_token_ids] = True
        return mask


class _Running:
    """The matcher of one sequence, and how many output tokens it has read."""

    def __init__(self, request: Request, matcher: LLMatcher) -> None:
        self.request = request
        self.matcher = matcher
        self._num_read = 0

    def read(self, output: list[int]) -> None:
        """Read what follows.

        Raises:
            EngineError: these tokens do not match the grammar.
        """
        for token_id in output[self._num_read :]:
            if self.matcher.is_stopped():
                break  # only end-of-sequence tokens, below `min_tokens`
            if not self.matcher.consume_token(token_id):
                raise EngineError(
                    f"request {self.request.request_id}: token {token_id} of its output does not match its grammar; was it"
                    " sampled without it?"
                )
        self._num_read = len(output)
