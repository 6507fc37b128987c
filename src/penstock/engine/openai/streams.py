"""One request at a server: makes deltas of the pieces of its answer."""

import asyncio
from typing import Any

from penstock.core.errors import StepFailed
from penstock.core.types.requests import Delta, FinishReason, Request, TokenLogprob
from penstock.core.wire import num_tokens, pack_tokens
from penstock.engine.openai.apis.api import Piece


class Stream:
    """A request's state. One task feeds it."""

    __slots__ = (
        "_ends", "_finish", "_has_begun", "_held", "_held_logprobs", "_said_cached", "_stops", "asked", "cached_tokens", "extra", "is_background", "is_done", "is_over", "is_taken", "keeps",
        "num_tokens", "rank", "request", "task",
    )  # fmt: skip

    def __init__(self, request: Request, eos_token_ids: tuple[int, ...], extra: dict[str, Any]) -> None:
        """Take a request.

        Args:
            request: as it goes to the server.
            eos_token_ids: of the model; the answer ends at one that its server does not know, and one is added where a server ends
                an answer without saying by which token.
            extra: fields to add to the server's request.
        """
        self.request = request
        self.rank = request.rank or 0
        """The server's data-parallel rank that computes it."""
        self.asked = request
        """What the server is asked for: the rest of the request, where the answer has begun elsewhere."""
        self.extra = extra
        self.task: asyncio.Task[None] | None = None
        self.num_tokens = 0
        """Tokens of the answer so far."""
        self.is_over = False
        """Whether the rest of the answer is not needed."""
        self.keeps = False
        """Whether the server still computes it after its last delta, as SGLang does for a prefill."""
        self.is_background = False
        """Whether its last delta was made."""
        self.is_taken = False
        """Whether that delta was yielded."""
        self.is_done = False
        """Whether its task has ended."""
        self._ends = frozenset(eos_token_ids)
        self._stops = (*eos_token_ids, *request.sampling.stop_token_ids)
        self._finish: FinishReason | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens that the server had cached, once it has said so."""
        self._has_begun = self._said_cached = False
        self._held: tuple[int, ...] = ()  # a stop token, which may be the last one
        self._held_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def has_finished(self) -> bool:
        """Whether the server has said how the answer ends; its cached tokens may still follow."""
        return self._finish is not None

    def feed(self, piece: Piece) -> Delta | None:
        """Take a piece of the answer; a delta where it has tokens. `end` gives the last one."""
        self.note_cached(piece)
        if self._finish is not None:  # tokens after the end do not count
            self.is_over |= piece.is_last or self.cached_tokens is not None or bool(piece.token_ids)
            return None
        left = self.request.sampling.max_tokens - self.request.num_emitted - self.num_tokens
        new = piece.token_ids[:left]
        self._finish = piece.finish_reason
        if len(new) < len(piece.token_ids):  # the server ignores max_tokens
            self._finish = FinishReason.LENGTH
            self.is_over = True
        if (ended := self._up_to_end(new)) is not None:
            self._finish = FinishReason.STOP
            self.is_over |= len(ended) < len(piece.token_ids)  # the server does not know this end
            new = ended
        self.num_tokens += len(new)
        self.is_over |= piece.is_last or (self._finish is not None and self.cached_tokens is not None)
        token_ids = self._held + new
        logprobs = self._held_logprobs + piece.logprobs[: len(new)]
        whole = len(token_ids) - (bool(token_ids) and token_ids[-1] in self._stops)
        self._held, self._held_logprobs = token_ids[whole:], logprobs[whole:]
        if not whole:
            return None
        return Delta(
            request_id=self.request.request_id,
            token_ids=pack_tokens(token_ids[:whole]),
            logprobs=logprobs[:whole],
            cached_tokens=self._tell_cached(),
        )

    def note_cached(self, piece: Piece) -> None:
        """Note how many prompt tokens the server had cached, where a piece of the answer says it."""
        if piece.cached_tokens is not None:
            prompt = num_tokens(self.request.token_ids)
            self.cached_tokens = min(max(piece.cached_tokens, 0), prompt)

    def _up_to_end(self, token_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        """Give the next tokens up to an end of the model's; None if there is none."""
        sampling = self.request.sampling
        if not self._ends or sampling.ignore_eos:
            return None
        least = max(0, sampling.min_tokens - self.request.num_emitted - self.num_tokens)
        found = (at for at, token in enumerate(token_ids) if at >= least and token in self._ends)
        at = next(found, None)
        return None if at is None else token_ids[: at + 1]

    def end(self) -> Delta:
        """Make the last delta, with the stop token where there is one.

        Raises:
            StepFailed: the answer ended without a finish reason.
        """
        if self._finish is None:
            raise StepFailed("the server closed the connection within an answer")
        held = self._held
        room = self.request.sampling.max_tokens - self.request.num_emitted - self.num_tokens
        if self._finish is FinishReason.STOP and not held and room > 0:
            held = (self._stops[0] if self._stops else 0,)
            self.num_tokens += 1
        return Delta(
            request_id=self.request.request_id,
            token_ids=pack_tokens(held),
            finish_reason=self._finish,
            cached_tokens=self._tell_cached(at_end=True),
            logprobs=self._held_logprobs,
        )

    def _tell_cached(self, *, at_end: bool = False) -> int | None:
        """Return the number of cached tokens once: with the first tokens if it is known then, else at the end; None otherwise."""
        is_first, self._has_begun = not self._has_begun, True
        if self._said_cached or not (at_end or is_first):
            return None
        self._said_cached = at_end or self.cached_tokens is not None
        return self.cached_tokens if self.cached_tokens is not None or not at_end else 0
