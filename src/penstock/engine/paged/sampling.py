"""Samples tokens from logits: penalties, masks, temperatures and seeds of all rows at once, and logprobs."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from operator import is_not

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.errors import EngineError, PenstockError, RequestError
from penstock.core.log import get_logger
from penstock.core.types.requests import Request, SamplingParams, TokenLogprob
from penstock.engine.paged.structured import Matchers
from penstock.engine.scheduling.sequences import SequenceTable, mix64, position_keys

Bools = NDArray[np.bool_]


class TokenMasks:
    """Makes the masks of a step. One thread owns it."""

    def __init__(self, vocab_size: int, matchers: Matchers | None = None) -> None:
        """Make it.

        Args:
            vocab_size: of the logits.
            matchers: of constrained requests; None where the engine takes none.
        """
        self._vocab_size = vocab_size
        self._matchers = matchers
        self._limits: dict[int, _Limits] = {}  # by slot, of the rows of the last step

    def masks(self, table: SequenceTable, slots: NDArray[np.int32]) -> tuple[Bools, dict[int, PenstockError]]:
        """Give what sequences may go on with.

        Args:
            table: their tokens.
            slots: (n,) slots of sequences for which `is_masked` holds.

        Returns:
            (n, vocabulary) bool, and by index errors of sequences that cannot go on; all of their tokens are allowed.
        """
        params = [
            request.sampling for slot in slots.tolist() if (request := table.requests[slot]) is not None
        ]
        constrained = np.flatnonzero([each.structured is not None for each in params])
        masks = np.ones((len(slots), self._vocab_size), dtype=np.bool_)
        errors: dict[int, PenstockError] = {}
        if len(constrained):
            assert self._matchers is not None, "a constrained request, and the engine takes none"
            masks[constrained], failed = self._matchers.masks(table, slots[constrained])
            errors = {int(constrained[index]): error for index, error in failed.items()}
        known: dict[int, _Limits] = {}
        for index, (slot, each) in enumerate(zip(slots.tolist(), params, strict=True)):
            if not (each.allowed_token_ids or each.bad_words) or index in errors:
                continue
            limits = self._limits.get(slot)
            if limits is None or limits.sampling is not each:
                limits = _Limits(each, self._vocab_size)
            known[slot] = limits
            limits.apply(masks[index], table.token_ids[slot, table.num_prompt[slot] : table.num_tokens[slot]])
            if not masks[index].any():
                masks[index] = True
                errors[index] = RequestError(
                    "allowed_token_ids: leave no token that bad_words and response_format allow; allow more",
                    param="allowed_token_ids",
                )
        self._limits = known
        return masks, errors


def is_masked(sampling: SamplingParams) -> bool:
    """Say whether some tokens may not be sampled."""
    return bool(sampling.structured is not None or sampling.allowed_token_ids or sampling.bad_words)


class _Limits:
    """A request's `allowed_token_ids` and `bad_words`, read once: a step has to take little time for each row."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self.sampling = sampling
        self._allowed = np.full(vocab_size, not sampling.allowed_token_ids)
        self._allowed[list(sampling.allowed_token_ids)] = True
        self._endings: dict[int, list[tuple[int, ...]]] = {}  # words by their last token but one
        for word in sampling.bad_words:
            if len(word) == 1:
                self._allowed[word[0]] = False
            else:
                self._endings.setdefault(word[-2], []).append(word)

    def apply(self, mask: Bools, output: NDArray[np.int32]) -> None:
        """Take from a (vocabulary,) mask what is not allowed after the output."""
        mask &= self._allowed
        for word in self._endings.get(int(output[-1]), ()) if len(output) else ():
            before = len(word) - 1
            if before <= len(output) and output[len(output) - before :].tolist() == list(word[:-1]):
                mask[word[-1]] = False


_log = get_logger()

_RANDOM, _TOP_K, _TOP_P, _PENALTIES, _MIN_TOKENS, _LOGPROBS = (1 << bit for bit in range(6))
_MASKED, _BIASED = 1 << 6, 1 << 7
_CANDIDATES = 512
"""Most likely tokens sorted first for top-p; the whole vocabulary is sorted only if their probabilities do not reach top-p."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Penalties:
    """The n rows with penalties on tokens that occurred before.

    history: (n, longest) token ids, prompt and output
    lengths: (n,) tokens of prompt and output
    prompts: (n,) tokens of the prompt
    """

    rows: Rows
    history: NDArray[np.int64]
    lengths: NDArray[np.int32]
    prompts: NDArray[np.int32]
    repetition: NDArray[np.float32]
    frequency: NDArray[np.float32]
    presence: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that sample randomly: noise keys of their output positions, and sampling parameters (top_k 0: no limit)."""

    rows: Rows
    keys: NDArray[np.uint64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to sample the rows of a step that is not all greedy.

    draws:         up to three groups: rows without limits, rows with top-k, rows with top-p only
    banned:        (pairs, 2) row and token id that must not be sampled
    biases:        (pairs, 2) row and token id, and (pairs,) what is added to its score
    masked_rows:   rows that may not go on with all tokens
    masks:         (masked rows, vocabulary) bool, what they may go on with
    logprob_rows:  rows that report logprobs, with logprob_counts alternatives each
    """

    draws: tuple[Draws, ...]
    penalties: Penalties | None
    banned: NDArray[np.int64] | None
    logprob_rows: Rows
    logprob_counts: NDArray[np.int64]
    masked_rows: Rows
    masks: NDArray[np.bool_] | None
    biases: tuple[NDArray[np.int64], NDArray[np.float32]] | None


class SamplingColumns:
    """The sampling parameters of the running requests, by slot of the `SequenceTable`. One thread owns it."""

    def __init__(self, eos_token_ids: tuple[int, ...], masks: TokenMasks | None = None) -> None:
        """Make columns.

        Args:
            eos_token_ids: end-of-sequence tokens.
            masks: says what rows may go on with; None where no request limits that.
        """
        self._eos_token_ids = eos_token_ids
        self._token_masks = masks
        self._requests: list[Request | None] = []
        self._allocate(0)
        self.errors: dict[int, PenstockError] = {}
        """By row of the last call of `rows`: requests with unusable parameters. Their rows are sampled greedily."""

    def rows(self, table: SequenceTable, slots: NDArray[np.int32]) -> SamplingRows | None:
        """Describe how to sample `slots`; None if all are greedy without penalties, bans or logprobs."""
        if len(table.requests) > len(self._requests):
            self._allocate(len(table.requests))
        listed = slots.tolist()
        now, seen = map(table.requests.__getitem__, listed), map(self._requests.__getitem__, listed)
        self.errors.clear()
        for row in list(compress(range(len(listed)), map(is_not, now, seen))):
            request = table.requests[listed[row]]
            assert request is not None, f"slot {listed[row]} is planned but holds no request"
            self._try_load(row, listed[row], request)
        flags = self._flags[slots]
        if not flags.any():
            return None
        positions = table.num_tokens[slots] - table.num_prompt[slots]
        reported, masked = _where(flags, _LOGPROBS), _where(flags, _MASKED)
        masks = self._masks(table, slots, masked)
        banned = self._banned(slots, _where(flags, _MIN_TOKENS), positions)
        if banned is not None and masks is not None:
            banned = _leaving_some(banned, masked, masks)
        return SamplingRows(
            draws=self._draws(slots, flags, positions),
            penalties=self._penalties(table, slots, _where(flags, _PENALTIES)),
            banned=banned,
            masked_rows=masked,
            masks=masks,
            biases=self._biases(slots, _where(flags, _BIASED)),
            logprob_rows=reported,
            logprob_counts=self._logprobs[slots[reported]],
        )

    def _allocate(self, num_slots: int) -> None:
        self._requests = [None] * num_slots
        self._flags = np.zeros(num_slots, dtype=np.uint16)
        self._keys = np.zeros(num_slots, dtype=np.uint64)
        self._temperature, self._top_p, self._min_p, self._repetition, self._frequency, self._presence = (
            np.zeros((6, num_slots), dtype=np.float32)
        )
        self._top_k, self._min_tokens, self._logprobs = np.zeros((3, num_slots), dtype=np.int64)
        self._early_stops: list[tuple[int, ...]] = [()] * num_slots

    def _try_load(self, row: int, slot: int, request: Request) -> None:
        try:
            self._load(slot, request)
        except Exception as error:  # noqa: BLE001 - one request must not fail the others
            _log.exception("request_not_prepared", request_id=request.request_id)
            self._requests[slot] = None
            self._flags[slot] = 0
            self.errors[row] = EngineError(
                f"its sampling parameters cannot be used: {type(error).__name__}: {error}"
            )

    def _load(self, slot: int, request: Request) -> None:
        params = request.sampling
        self._requests[slot] = request
        self._temperature[slot] = max(params.temperature, 1e-5)
        self._top_k[slot] = max(params.top_k or 0, 0)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._repetition[slot] = params.repetition_penalty
        self._frequency[slot] = params.frequency_penalty
        self._presence[slot] = params.presence_penalty
        self._min_tokens[slot] = params.min_tokens
        self._logprobs[slot] = params.logprobs or 0
        self._early_stops[slot] = params.stop_token_ids + (() if params.ignore_eos else self._eos_token_ids)
        self._keys[slot] = noise_key(request)
        random = params.temperature > 0
        neutral = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (
            1.0,
            0.0,
            0.0,
        )
        self._flags[slot] = (
            _RANDOM * random
            | _TOP_K * (random and bool(self._top_k[slot]))
            | _TOP_P * (random and params.top_p < 1)
            | _PENALTIES * (not neutral)
            | _MIN_TOKENS * (params.min_tokens > 0 and bool(self._early_stops[slot]))
            | _LOGPROBS * (params.logprobs is not None)
            | _MASKED * is_masked(params)
            | _BIASED * bool(params.logit_bias)
        )

    def _draws(
        self, slots: NDArray[np.int32], flags: NDArray[np.uint16], positions: NDArray[np.int32]
    ) -> tuple[Draws, ...]:
        kinds = flags & (_RANDOM | _TOP_K | _TOP_P)
        groups = (kinds == _RANDOM, (kinds & _TOP_K) > 0, kinds == _RANDOM | _TOP_P)
        draws = []
        for rows in map(np.flatnonzero, groups):
            if len(rows):
                of = slots[rows]
                draws.append(
                    Draws(
                        rows=rows,
                        keys=position_keys(self._keys[of], positions[rows]),
                        temperature=self._temperature[of],
                        top_k=self._top_k[of],
                        top_p=self._top_p[of],
                        min_p=self._min_p[of],
                    )
                )
        return tuple(draws)

    def _penalties(self, table: SequenceTable, slots: NDArray[np.int32], rows: Rows) -> Penalties | None:
        if not len(rows):
            return None
        of = slots[rows]
        lengths = table.num_tokens[of]
        return Penalties(
            rows=rows,
            history=table.token_ids[of, : int(lengths.max())].astype(np.int64),
            lengths=lengths,
            prompts=table.num_prompt[of],
            repetition=self._repetition[of],
            frequency=self._frequency[of],
            presence=self._presence[of],
        )

    def _masks(self, table: SequenceTable, slots: NDArray[np.int32], rows: Rows) -> NDArray[np.bool_] | None:
        if not len(rows):
            return None
        assert self._token_masks is not None, "a limited request, and the engine takes none"
        masks, errors = self._token_masks.masks(table, slots[rows])
        self.errors |= {int(rows[index]): error for index, error in errors.items()}
        return masks

    def _biases(
        self, slots: NDArray[np.int32], rows: Rows
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        found = [
            (row, token_id, bias)
            for row in rows.tolist()
            if (request := self._requests[slots[row]]) is not None
            for token_id, bias in request.sampling.logit_bias
        ]
        if not found:
            return None
        places = np.array([(row, token_id) for row, token_id, _ in found], dtype=np.int64)
        return places, np.array([bias for *_, bias in found], dtype=np.float32)

    def _banned(
        self, slots: NDArray[np.int32], rows: Rows, positions: NDArray[np.int32]
    ) -> NDArray[np.int64] | None:
        rows = rows[positions[rows] < self._min_tokens[slots[rows]]]
        pairs = [(row, token_id) for row in rows.tolist() for token_id in self._early_stops[slots[row]]]
        return np.array(pairs, dtype=np.int64) if pairs else None


class Sampler:
    """Samples tokens on the device of the logits."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocabulary = torch.arange(vocab_size, dtype=torch.int32, device=device)[None]

    def sample(
        self, logits: torch.Tensor, how: SamplingRows | None
    ) -> tuple[NDArray[np.int64], dict[int, TokenLogprob]]:
        """Sample one token per row; may overwrite `logits`.

        Args:
            logits: (rows, vocabulary).
            how: None: greedy for all rows.

        Returns:
            (rows,) token ids, and logprobs by row for rows that report them. Logprobs are of the model's own distribution,
            before temperature and penalties.
        """
        if how is None:
            return logits.argmax(-1).cpu().numpy(), {}
        scores = logits.float()
        reported = (
            torch.log_softmax(scores[self._put(how.logprob_rows)], -1) if len(how.logprob_rows) else None
        )
        if how.penalties is not None:
            rows = self._put(how.penalties.rows)
            scores[rows] = penalise(scores[rows], how.penalties, self._put)
        if how.biases is not None:
            places = self._put(how.biases[0])
            scores[places[:, 0], places[:, 1]] += self._put(how.biases[1])
        if how.banned is not None:
            banned = self._put(how.banned)
            scores[banned[:, 0], banned[:, 1]] = -torch.inf
        if how.masks is not None:
            rows = self._put(how.masked_rows)
            scores[rows] = scores[rows].masked_fill(~self._put(how.masks), -torch.inf)
        token_ids = scores.argmax(-1)
        for draws in how.draws:
            rows = self._put(draws.rows)
            token_ids[rows] = self._draw(scores[rows], draws)
        picked: NDArray[np.int64] = token_ids.cpu().numpy()
        return picked, {} if reported is None else _report(reported, picked, how)

    def _draw(self, scores: torch.Tensor, draws: Draws) -> torch.Tensor:
        scores /= self._put(draws.temperature)[:, None]
        keys = self._put(draws.keys.view(np.int32).reshape(-1, 2))
        if draws.top_k.any() or (draws.top_p < 1).any():
            values, token_ids = self._candidates(scores, draws)
        else:
            values, token_ids = scores, self._vocabulary
            if draws.min_p.any():
                least = values.amax(-1, keepdim=True) + self._put(draws.min_p)[:, None].log()
                values = values.masked_fill(values < least, -torch.inf)
        best = (values + gumbel_noise(keys, token_ids)).argmax(-1, keepdim=True)
        return (best if token_ids is self._vocabulary else token_ids.gather(1, best))[:, 0].long()

    def _candidates(self, scores: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort the most likely tokens of each row and mask those outside of top-k, then top-p, then min-p."""
        vocab_size = scores.shape[-1]
        top_k = self._put(draws.top_k)[:, None]
        top_p = self._put(draws.top_p)[:, None]
        with_k = bool(draws.top_k.all())
        width = min(int(draws.top_k.max()) if with_k else _CANDIDATES, vocab_size)
        while True:
            values, token_ids = scores.topk(width)
            if with_k:
                values = values.masked_fill(torch.arange(width, device=self._device) >= top_k, -torch.inf)
            total = (values if with_k else scores).logsumexp(-1, keepdim=True)
            mass = (values - total).exp()
            before = mass.cumsum(-1) - mass
            if with_k or width == vocab_size or bool((before[:, -1:] >= top_p).all()):
                break
            width = vocab_size
        least = values[:, :1] + self._put(draws.min_p)[:, None].log()
        outside = (before >= top_p) | (values < least)
        outside[:, 0] = False
        return values.masked_fill(outside, -torch.inf), token_ids.int()

    def _put(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def penalise(
    scores: torch.Tensor, penalties: Penalties, put: Callable[[NDArray[np.generic]], torch.Tensor]
) -> torch.Tensor:
    """Lower the scores of tokens that occurred: repetition counts prompt and output, frequency and presence the output."""
    history, lengths, prompts = put(penalties.history), put(penalties.lengths), put(penalties.prompts)
    at = torch.arange(history.shape[1], device=scores.device)
    known = (at < lengths[:, None]).float()
    generated = known * (at >= prompts[:, None])
    seen = torch.zeros_like(scores).scatter_add_(1, history, known) > 0
    counts = torch.zeros_like(scores).scatter_add_(1, history, generated)
    repetition = put(penalties.repetition)[:, None]
    scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    scores -= put(penalties.frequency)[:, None] * counts
    return scores - put(penalties.presence)[:, None] * (counts > 0)


def noise_key(request: Request) -> int:
    """Return the 64-bit key of a request's noise, from its seed or, without one, its request id."""
    seed = request.sampling.seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(request.request_id.encode(), digest_size=8).digest(), "little")
    seeds = np.array([seed & (1 << 64) - 1], dtype=np.uint64)
    return int(position_keys(mix64(seeds), np.array([request.choice]))[0])


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Hash token ids into standard Gumbel noise.

    Args:
        keys: (rows, 2) int32, the halves of each row's 64-bit key.
        token_ids: (rows or 1, n) int32.

    Returns:
        (rows, n) float32.
    """
    x = token_ids * _signed(0x9E3779B1) + keys[:, :1]
    x ^= (x >> 16) & 0xFFFF  # `>>` copies the sign
    x *= _signed(0x85EBCA6B)
    x ^= keys[:, 1:]
    x ^= (x >> 13) & 0x7FFFF
    x *= _signed(0xC2B2AE35)
    x ^= (x >> 16) & 0xFFFF
    # 31 bits, so that small values, which give the largest noise, keep their full precision as float32.
    uniform = (x & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _where(flags: NDArray[np.uint16], flag: int) -> Rows:
    return np.flatnonzero(flags & flag)


def _leaving_some(
    banned: NDArray[np.int64], rows: Rows, masks: NDArray[np.bool_]
) -> NDArray[np.int64] | None:
    """Drop the bans of constrained rows that can only go on with banned tokens: their text is complete before `min_tokens`."""
    left = masks.copy()
    for index, row in enumerate(rows.tolist()):
        left[index, banned[banned[:, 0] == row, 1]] = False
    kept = banned[~np.isin(banned[:, 0], rows[~left.any(1)])]
    return kept if len(kept) else None


def _report(logprobs: torch.Tensor, picked: NDArray[np.int64], how: SamplingRows) -> dict[int, TokenLogprob]:
    """Convert the (reported rows, vocabulary) logprobs to messages."""
    chosen_ids = picked[how.logprob_rows]
    index = torch.from_numpy(chosen_ids).to(logprobs.device)[:, None]
    chosen = logprobs.gather(1, index)[:, 0].tolist()
    most = min(int(how.logprob_counts.max()), logprobs.shape[1])
    top_values, top_ids = (top.tolist() for top in logprobs.topk(most))
    report = {}
    for line, row in enumerate(how.logprob_rows.tolist()):
        count = int(how.logprob_counts[line])
        top = tuple(zip(top_ids[line][:count], top_values[line][:count], strict=True))
        report[row] = TokenLogprob(token_id=int(chosen_ids[line]), logprob=chosen[line], top=top)
    return report
