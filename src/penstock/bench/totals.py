"""Totals of many exchanges: percentiles, rates, goodput, failures by kind."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.bench.exchange import Exchange

_PERCENTILES = (50, 90, 99)
_SAMPLES_MAX = 10_000
"""Most raw values of one kind in a report; of more, every n-th is kept."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of a good request: TTFT, and mean time per further token."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def met(self, exchange: Exchange) -> bool:
        per_token_s = exchange.time_per_token_s
        return (self.ttft_s is None or exchange.ttft_s <= self.ttft_s) and (
            self.itl_s is None or per_token_s is None or per_token_s <= self.itl_s
        )


@dataclass(slots=True)
class Totals:
    """Sums exchanges as they end. One task owns it."""

    slo: Slo
    requests: int = 0
    good: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    begin_s: float = float("inf")
    end_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    _messages: dict[str, str] = field(default_factory=dict)
    _ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    _itl_s: "array[float]" = field(default_factory=lambda: array("d"))
    _gap_s: "array[float]" = field(default_factory=lambda: array("d"))
    _e2e_s: "array[float]" = field(default_factory=lambda: array("d"))
    _lag_s: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, exchange: Exchange) -> None:
        self.requests += 1
        self.begin_s = min(self.begin_s, exchange.due_s)
        self.end_s = max(self.end_s, exchange.end_s)
        self._lag_s.append(exchange.sent_s - exchange.due_s)
        if exchange.failure is not None:
            self.failures[exchange.failure] += 1
            self._messages.setdefault(exchange.failure, exchange.message)
            return
        self.good += self.slo.met(exchange)
        self.input_tokens += exchange.usage.prompt_tokens if exchange.usage else 0
        self.output_tokens += exchange.output_tokens
        self.chunks += 1 + len(exchange.gaps_s)
        self._ttft_s.append(exchange.ttft_s)
        self._e2e_s.append(exchange.e2e_s)
        if exchange.gaps_s:
            # With several tokens per chunk, the gap belongs to all of them.
            tokens_per_gap = max((exchange.output_tokens - 1) / len(exchange.gaps_s), 1.0)
            self._gap_s.extend(exchange.gaps_s)
            self._itl_s.extend([gap / tokens_per_gap for gap in exchange.gaps_s])

    def figures(self) -> dict[str, float]:
        succeeded = self.requests - self.failures.total()
        duration_s = max(self.end_s - self.begin_s, 1e-9) if self.requests else 0.0
        figures: dict[str, float] = {
            "requests": self.requests,
            "failed_requests": self.failures.total(),
            **{f"failed_{kind}": count for kind, count in self.failures.items()},
            "duration_s": duration_s,
        }
        if not succeeded:
            return figures
        figures |= {
            "requests_per_s": succeeded / duration_s,
            "input_tokens_per_s": self.input_tokens / duration_s,
            "output_tokens_per_s": self.output_tokens / duration_s,
        }
        if self.slo != Slo():
            figures["goodput_requests_per_s"] = self.good / duration_s
            figures["goodput_fraction"] = self.good / self.requests
        for name, seconds in (
            ("ttft", self._ttft_s),
            ("itl", self._itl_s),
            ("chunk_gap", self._gap_s),
            ("e2e", self._e2e_s),
        ):
            figures |= _percentiles_ms(name, seconds)
        return figures | {
            "send_lag_ms_p99": _percentiles_ms("lag", self._lag_s)["lag_ms_p99"],
            "tokens_per_chunk": self.output_tokens / self.chunks,
            "input_tokens_mean": self.input_tokens / succeeded,
            "output_tokens_mean": self.output_tokens / succeeded,
        }

    def samples(self) -> Mapping[str, Sequence[float]]:
        return {
            "ttft_s": _thinned(self._ttft_s),
            "itl_s": _thinned(self._itl_s),
            "e2e_s": _thinned(self._e2e_s),
        }

    def problems(self) -> list[str]:
        """Give one line per kind of failure, with the first message."""
        return [
            f"{count} of {self.requests} requests failed: {kind}: {self._messages[kind]}"
            for kind, count in self.failures.most_common()
        ]


def _percentiles_ms(name: str, seconds: "array[float]") -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.frombuffer(seconds), _PERCENTILES) * 1000
    return {f"{name}_ms_p{p}": float(value) for p, value in zip(_PERCENTILES, values, strict=True)}


def _thinned(seconds: "array[float]") -> list[float]:
    step = -(-len(seconds) // _SAMPLES_MAX) or 1
    return [round(value, 6) for value in seconds[::step]]
