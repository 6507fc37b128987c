"""Demand from a Prometheus server, for deployments whose processes send no windows: vLLM's own servers, for example."""

import asyncio
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError, ProtocolError, Unavailable
from penstock.planner.config import Series
from penstock.runtime.observations.windows import Digest, RequestWindow, bucket_of

_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 4 << 20
Fetch = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Queries:
    """Names of the series of one kind of server."""

    requests: str
    input_tokens: str
    output_tokens: str
    ttft_s: str
    itl_s: str
    queued: str
    """A gauge, like those after `cached_tokens`; the others grow."""
    cached_tokens: str | None = None
    running: str | None = None
    """Requests in the batch of each instance; None where instances are no workers."""
    kv_usage: str | None = None
    """Share of KV in use, 0 to 1."""


PENSTOCK = Queries(
    requests="penstock_frontend_e2e_seconds_count",
    input_tokens="penstock_frontend_prompt_tokens_total",
    output_tokens="penstock_frontend_output_tokens_total",
    cached_tokens="penstock_frontend_cached_tokens_total",
    ttft_s="penstock_frontend_ttft_seconds_bucket",
    itl_s="penstock_frontend_itl_seconds_bucket",
    queued="penstock_router_queued_requests",
)
VLLM = Queries(
    requests="vllm:request_success_total",
    input_tokens="vllm:prompt_tokens_total",
    output_tokens="vllm:generation_tokens_total",
    ttft_s="vllm:time_to_first_token_seconds_bucket",
    itl_s="vllm:inter_token_latency_seconds_bucket",
    queued="vllm:num_requests_waiting",
    cached_tokens="vllm:prefix_cache_hits_total",
    running="vllm:num_requests_running",
    kv_usage="vllm:kv_cache_usage_perc",
)
SGLANG = Queries(
    requests="sglang:num_requests_total",
    input_tokens="sglang:prompt_tokens_total",
    output_tokens="sglang:generation_tokens_total",
    ttft_s="sglang:time_to_first_token_seconds_bucket",
    itl_s="sglang:inter_token_latency_seconds_bucket",
    queued="sglang:num_queue_reqs",
    cached_tokens="sglang:cached_tokens_total",
    running="sglang:num_running_reqs",
    kv_usage="sglang:token_usage",
)
QUERIES = {Series.PENSTOCK: PENSTOCK, Series.VLLM: VLLM, Series.SGLANG: SGLANG}


@dataclass(frozen=True, slots=True)
class Instance:
    """A server as Prometheus knows it; `age_s` is infinite where nothing tells when it began."""

    running: int
    waiting: int
    kv_usage: float
    age_s: float


class PrometheusSource:
    """Reads windows by Prometheus' HTTP API. One task owns it.

    Prometheus has ended requests, not arrivals, and of lengths the mean alone; both lag by its scrape interval.
    """

    def __init__(
        self, url: str, queries: Queries = PENSTOCK, *, selector: str = "", fetch: Fetch | None = None
    ) -> None:
        """Ask nothing yet.

        Args:
            url: the server, such as http://127.0.0.1:9090.
            queries: names of the metrics.
            selector: label matchers of every query, such as `namespace="chat"`.
            fetch: gets a URL; None is an HTTP GET.

        Raises:
            ConfigError: `url` is no URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise ConfigError(f"prometheus: {url!r}: expected a URL such as http://127.0.0.1:9090")
        self._url = url.rstrip("/")
        self._queries = queries
        self._selector = f"{{{selector}}}" if selector else ""
        self._fetch = fetch or _get

    async def read(self, seconds: float) -> RequestWindow:
        """Read the last `seconds` as one window; they must span two scrapes at least.

        Raises:
            Unavailable: the server does not answer, or refuses the query.
            ProtocolError: its answer is none of Prometheus' API.
        """
        names = self._queries
        requests = await self._increase(names.requests, seconds)
        tokens = [await self._increase(name, seconds) for name in (names.input_tokens, names.output_tokens)]
        cached = await self._increase(names.cached_tokens, seconds) if names.cached_tokens else 0.0
        return RequestWindow(
            seconds=seconds,
            arrivals=round(requests),
            finished=round(requests),
            input_tokens=_mean_only(requests, tokens[0]),
            cached_tokens=round(cached),
            output_tokens=_mean_only(requests, tokens[1]),
            ttft_s=await self._histogram(names.ttft_s, seconds),
            itl_s=await self._histogram(names.itl_s, seconds),
            queued=round(_sum(await self._ask(f"sum({names.queued}{self._selector})"))),
        )

    async def is_scraped(self) -> bool:
        """Tell whether Prometheus has any of these series now; raises as `read`."""
        return bool(await self._ask(f"{self._queries.queued}{self._selector}"))

    async def instances(self) -> dict[str, Instance]:
        """Give the present state of each instance whose series are a worker's; raises as `read`."""
        names = self._queries
        if names.running is None:
            return {}
        gauges = [
            await self._by_instance(f"{name}{self._selector}") if name else {}
            for name in (names.running, names.queued, names.kv_usage)
        ]
        ages_s = await self._by_instance(f"time() - process_start_time_seconds{self._selector}")
        running, waiting, usage = gauges
        return {
            name: Instance(
                running=round(count),
                waiting=round(waiting.get(name, 0.0)),
                kv_usage=min(1.0, usage.get(name, 0.0)),
                age_s=ages_s.get(name, math.inf),
            )
            for name, count in sorted(running.items())
        }

    async def _by_instance(self, query: str) -> dict[str, float]:
        found = await self._ask(f"sum by (instance) ({query})")
        return {labels.get("instance", ""): max(0.0, value) for labels, value in found}

    async def _increase(self, name: str, seconds: float) -> float:
        return _sum(await self._ask(f"sum(increase({name}{self._selector}[{self._range(seconds)}]))"))

    async def _histogram(self, name: str, seconds: float) -> Digest:
        query = f"sum by (le) (increase({name}{self._selector}[{self._range(seconds)}]))"
        bounds = {}
        for labels, value in await self._ask(query):
            try:
                bounds[float(labels.get("le", "nan"))] = value
            except ValueError as error:
                raise ProtocolError(f"{self._url}: {name}: le {labels.get('le')!r} is no number") from error
        return _digest(bounds)

    @staticmethod
    def _range(seconds: float) -> str:
        return f"{max(1, math.ceil(seconds))}s"

    async def _ask(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """Give (labels, value) of each series of an instant query; values that are no numbers count as 0."""
        address = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            answer = json.loads(await asyncio.to_thread(self._fetch, address))
            if answer["status"] != "success":
                raise Unavailable(f"{self._url}: refuses {query}: {answer.get('error', answer['status'])}")
            return [(series["metric"], _number(series["value"][1])) for series in answer["data"]["result"]]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ProtocolError(
                f"{self._url}: the answer is none of Prometheus' HTTP API; is this the server's address?"
            ) from error


def _get(address: str) -> bytes:
    """Get a URL; Prometheus explains refused queries in the body of an error.

    Raises:
        Unavailable: nobody answers.
    """
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - checked
            content: bytes = answer.read(_ANSWER_BYTES_MAX)
            return content
    except urllib.error.HTTPError as error:
        return error.read(_ANSWER_BYTES_MAX)
    except OSError as error:
        raise Unavailable(
            f"{address.partition('/api/')[0]}: nobody answers ({error}); is it started?"
        ) from error


def _number(text: Any) -> float:
    value = float(text)
    return value if math.isfinite(value) else 0.0


def _sum(series: list[tuple[Mapping[str, str], float]]) -> float:
    return sum(max(0.0, value) for _, value in series)


def _mean_only(count: float, total: float) -> Digest:
    """Make a digest of values that are known by their sum alone."""
    number = round(count)
    if number <= 0:
        return Digest()
    return Digest(count=number, total=total, buckets={bucket_of(total / number): number})


def _digest(bounds: Mapping[float, float]) -> Digest:
    """Make a digest of a histogram's cumulative counts by upper bound; a bucket's values count as the middle of its ends."""
    count, total, buckets = 0, 0.0, dict[int, int]()
    lower, seen = 0.0, 0.0
    for upper in sorted(bound for bound in bounds if not math.isnan(bound)):
        number = round(max(0.0, bounds[upper] - seen))
        seen = max(seen, bounds[upper])
        value = lower if math.isinf(upper) else (lower + upper) / 2
        if number:
            count += number
            total += number * value
            bucket = bucket_of(value)
            buckets[bucket] = buckets.get(bucket, 0) + number
        lower = upper
    return Digest(count=count, total=total, buckets=buckets)
