"""Measures an endpoint by URL; times include HTTP, queue and tokenizer, as for its users."""

import asyncio
import statistics
from collections.abc import Sequence
from itertools import accumulate, count
from typing import Self

from penstock.bench.exchange import Exchange
from penstock.bench.prompts import text
from penstock.core.errors import Unavailable
from penstock.perf.profile.profile import DecodePoint, PrefillPoint
from penstock.profiling.cells import SETTLING_STEPS, DecodeCell, Limits, PrefillCell
from penstock.profiling.targets.endpoint import Endpoint
from penstock.profiling.targets.target import Description

_STEPS_MIN = 4
_BLOCK_TOKENS = 64
"""Cached prefixes are multiples of this; the server reports how many tokens were cached."""


class EndpointTarget:
    """Requests streams of a known length. Prompts with a timed first token share no prefix with others.

    Decode cells and cached prefixes use a library of prompts, one per sequence of a batch, sent to the server before the
    measurement.
    """

    def __init__(self, endpoint: Endpoint, *, hardware: str, run: str) -> None:
        """Create the target.

        Args:
            endpoint: result of `connect`.
            hardware: hardware name given by the user.
            run: id that makes prompts differ from those of earlier runs, which may be cached.
        """
        self._endpoint = endpoint
        self._run = run
        self._numbers = count()
        self._library_tokens: dict[int, int] = {}  # by row: tokens already sent to the server
        self.limits = Limits(
            context_length=endpoint.context_length,
            block_size=_BLOCK_TOKENS,
            caches=False,
            batches_prompts=False,
        )
        self.description = Description(
            engine=endpoint.url,
            model=endpoint.model,
            engine_version=endpoint.server,
            hardware=hardware,
            machine="",
        )

    async def __aenter__(self) -> Self:
        """Check whether the server reports cached tokens."""
        try:
            for _ in range(2):
                exchange = await self._endpoint.ask(self._library(0, 4 * _BLOCK_TOKENS), 1)
        except BaseException:
            self._endpoint.client.close()
            raise
        if exchange.cached_tokens:
            self.limits = Limits(
                context_length=self.limits.context_length, block_size=_BLOCK_TOKENS, batches_prompts=False
            )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._endpoint.client.close()

    async def prefill(self, cell: PrefillCell) -> PrefillPoint:
        prefix = ""
        if cell.cached_tokens:
            await self._show(1, cell.cached_tokens)
            prefix = self._library(0, cell.cached_tokens) + " "
        overhead = 0.0 if prefix else self._endpoint.scale.overhead_tokens
        words = self._endpoint.scale.words(cell.new_tokens - overhead)
        prompt = prefix + text(f"{self._run}/{next(self._numbers)}", words)
        exchange = await self._endpoint.ask(prompt, 1)
        cached = exchange.cached_tokens or 0
        total = _prompt_tokens(exchange, cell.new_tokens + cell.cached_tokens)
        return PrefillPoint(new_tokens=total - cached, cached_tokens=cached, seconds=exchange.ttft_s)

    async def decode(self, cell: DecodeCell) -> DecodePoint:
        await self._show(cell.batch, cell.prompt_tokens)
        prompts = [self._library(row, cell.prompt_tokens) for row in range(cell.batch)]
        exchanges = await self._ask_all(prompts, cell.generated_tokens)
        times = [list(accumulate(e.gaps_s, initial=e.first_token_s or 0.0)) for e in exchanges]
        begin_s = max(of[min(SETTLING_STEPS, len(of) - 1)] for of in times)
        end_s = min(of[-1] for of in times)
        steps_s, contexts = [], []
        for exchange, of in zip(exchanges, times, strict=True):
            within = [index for index, at_s in enumerate(of) if begin_s <= at_s <= end_s]
            tokens_per_chunk = exchange.output_tokens / len(of)
            if len(within) < _STEPS_MIN:
                raise Unavailable(
                    f"{self._endpoint.url}: only {len(within)} parts of an answer of {exchange.output_tokens} tokens"
                    f" came while all {cell.batch} were streaming; take smaller --batches, or an endpoint that knows"
                    " ignore_eos"
                )
            first, last = within[0], within[-1]
            steps_s.append((of[last] - of[first]) / (last - first) / tokens_per_chunk)
            prompt_tokens = _prompt_tokens(exchange, cell.prompt_tokens)
            contexts.append(prompt_tokens + tokens_per_chunk * (first + last) / 2)
        return DecodePoint(
            batch=cell.batch, context=round(statistics.mean(contexts)), seconds=statistics.median(steps_s)
        )

    def _library(self, row: int, tokens: int) -> str:
        """Make about the first `tokens` tokens of a row's prompt."""
        scale = self._endpoint.scale
        return text(f"{self._run}/library/{row}", scale.words(tokens - scale.overhead_tokens))

    async def _show(self, rows: int, tokens: int) -> None:
        """Send rows not sent yet, so that they are in the server's prefix cache."""
        unseen = [row for row in range(rows) if self._library_tokens.get(row, 0) < tokens]
        await self._ask_all([self._library(row, tokens) for row in unseen], 1)
        for row in unseen:
            self._library_tokens[row] = tokens

    async def _ask_all(self, prompts: Sequence[str], output_tokens: int) -> list[Exchange]:
        """Send all requests at once and wait for all.

        Raises:
            Unavailable: a request failed; the others are cancelled.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._endpoint.ask(prompt, output_tokens)) for prompt in prompts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]


def _prompt_tokens(exchange: Exchange, expected: int) -> int:
    """Give the server's count of prompt tokens, else the expected one."""
    counted = 0 if exchange.usage is None else exchange.usage.prompt_tokens
    return counted or expected
