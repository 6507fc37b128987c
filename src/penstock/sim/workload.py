"""Workloads as sessions: from a trace, or synthetic from a few numbers and a seed."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError
from penstock.core.native import native
from penstock.core.types.requests import Request
from penstock.core.wire import HashArray
from penstock.sim.trace import PREFIX_BLOCK_TOKENS, SPAN_MAX_S, TOKENS_MAX, TraceRow

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_OTHER_HALF = np.uint64(0xD1B54A32D192ED03)
_MASK = 0xFFFF_FFFF_FFFF_FFFF


class SimStream(Protocol):
    """Gives the block hashes of one request, prompt and output."""

    def block_hashes(self, block_size: int, start: int, end: int) -> HashArray: ...


StreamOf = Callable[[Request], SimStream]


@dataclass(frozen=True, slots=True, eq=False)
class SimPrompt:
    """A token stream with a shared prefix in units, followed by its own tokens.

    shared:      (n,) uint64 names of the prefix units; each name covers its unit and all before it
    own:         name of the rest; streams with equal `own` are equal
    unit_tokens: tokens in a unit
    """

    own: int
    shared: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    unit_tokens: int = 16

    def block_hashes(self, block_size: int, start: int, end: int) -> HashArray:
        """Give the hashes of blocks `start` to `end`, in prompt or output.

        Returns:
            (end - start, 2) uint64: equal if all tokens up to the block's end are equal.
        """
        derive = derived_hashes_python if native is None else native.derived_hashes
        hashes: HashArray = derive(self.own, self.shared, self.unit_tokens, block_size, (start, end))
        return hashes


def derived_hashes_python(
    own: int, shared: NDArray[np.uint64], unit_tokens: int, block_size: int, blocks: tuple[int, int]
) -> HashArray:
    """Reference of the native `derived_hashes`; 200 blocks take 33 us, native 1.5 us."""
    start, end = blocks
    ends = np.arange(start + 1, end + 1, dtype=np.uint64) * np.uint64(block_size)
    units = (ends - np.uint64(1)) // np.uint64(unit_tokens)
    names = mix(np.uint64(own) + units * _GOLDEN)
    num_shared = int(np.searchsorted(units, len(shared)))
    if num_shared:
        names[:num_shared] = shared[units[:num_shared].astype(np.int64)]
    hashes = np.empty((end - start, 2), dtype=np.uint64)
    hashes[:, 0] = mix(mix(names) + ends)
    hashes[:, 1] = mix(hashes[:, 0] ^ names * _OTHER_HALF)
    return hashes


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash numbers to 64 bits.

    Source: SplitMix64's finaliser; Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def named(*parts: int) -> int:
    """Make a 64-bit name from a few numbers with `mix`."""
    golden, other_half = int(_GOLDEN), int(_OTHER_HALF)
    x = 0
    for part in parts:
        x = (x * golden + part + other_half) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return x


def named_units(group: int, count: int) -> NDArray[np.uint64]:
    """Name the units of the prefix shared by `group`."""
    return mix(np.uint64(group) + np.arange(count, dtype=np.uint64) * _GOLDEN)


_SHARED_UNIT_TOKENS = 16
_RATE_MAX = 1e6
_PREFIX_TOKENS_MAX = 1_000_000_000  # over all groups: 500 MB of names
_DAY_S = 86_400.0
_TENANTS_MAX = 100  # each adds rows to the report
_TENANT_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: `input_tokens` is the whole prompt, including the conversation so far."""

    input_tokens: int
    output_tokens: int
    think_s: float = 0.0
    """Seconds from the end of the previous turn until it is sent."""


@dataclass(frozen=True, slots=True)
class SimSession:
    """One conversation: consecutive turns, each a longer prefix of the same token stream."""

    at_s: float
    turns: tuple[Turn, ...]
    prompt: SimPrompt
    adapter: int | None = None
    """Index of the LoRA adapter it requests; None for the model itself."""
    slo_ttft_s: float | None = None
    """TTFT target of each request; None for none."""
    slo_itl_s: float | None = None
    """ITL target of each request; None for none."""
    tenant: str = ""
    """Tenant; empty for none."""


class WorkloadConfig(Config):
    """A synthetic workload. Lengths and gaps are means of random draws."""

    not_here: ClassVar[dict[str, str]] = {"spread": "the spread of lengths is length_sigma"}

    requests: int = Field(default=1000, ge=1, le=1_000_000)
    """Requests of all sessions, rounded up to whole sessions."""
    rate_per_s: float = Field(gt=0, le=_RATE_MAX)
    """Sessions that start per second."""
    burstiness: float = Field(default=1.0, gt=0, le=1000)
    """Variance / squared mean of the gaps between sessions: 1 is Poisson, more is bursty (Gamma)."""
    input_tokens: int = Field(default=1024, ge=1, le=TOKENS_MAX)
    """New prompt tokens of each turn, without the shared prefix."""
    output_tokens: int = Field(default=256, ge=1, le=1_000_000)
    """Tokens of each answer."""
    length_sigma: float = Field(default=0.0, ge=0, le=3)
    """Standard deviation of the logarithm of input and output lengths, which are log-normal; 0 makes them equal."""
    turns: int = Field(default=1, ge=1, le=1000)
    """Requests per conversation."""
    think_s: float = Field(default=10.0, ge=0, le=_DAY_S)
    """Mean seconds between an answer's end and the next turn, exponential."""
    shared_prefix_tokens: int = Field(default=0, ge=0, le=1_000_000)
    """Prompt tokens shared by all sessions of a group."""
    prefix_groups: int = Field(default=1, ge=1, le=1_000_000)
    """Number of groups, equally likely."""
    adapters: int = Field(default=0, ge=0, le=10_000)
    """Number of LoRA adapters that sessions request, equally likely: the first ones in the graph's role. 0: the model itself."""

    slo_ttft_s: float | None = Field(default=None, ge=0.001, le=3600)
    """TTFT target of each request in seconds, as if sent by clients; None sends none."""
    slo_itl_s: float | None = Field(default=None, ge=0.0001, le=60)
    """ITL target of each request in seconds; None sends none."""
    tenants: dict[str, Annotated[float, Field(gt=0)]] = Field(default={}, max_length=_TENANTS_MAX)
    """Tenants by name, with their relative share of sessions; empty: no tenants."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: object) -> object:
        for number in value.values() if isinstance(value, dict) else (value,):
            if isinstance(number, bool):
                raise wrong(f"must be a number, got {number}")
        return value

    @field_validator("tenants")
    @classmethod
    def _check_tenants(cls, tenants: dict[str, float]) -> dict[str, float]:
        for name in tenants:
            if not (0 < len(name) <= _TENANT_CHARACTERS_MAX and name.isprintable()):
                raise wrong(
                    f"names must have 1 to {_TENANT_CHARACTERS_MAX} printable characters, got {name[:40]!r}"
                )
        return tenants

    @model_validator(mode="after")
    def _check_extent(self) -> Self:
        span_s = self.requests / self.turns / self.rate_per_s + (self.turns - 1) * self.think_s
        if span_s > SPAN_MAX_S:
            raise wrong(
                f"rate_per_s: {self.requests:,} requests in conversations of {self.turns} at {self.rate_per_s:g}"
                f" a second would take {span_s / _DAY_S:,.3g} days, must be <= {SPAN_MAX_S / _DAY_S:.0f};"
                " raise rate_per_s, or lower requests or think_s"
            )
        prefix_tokens = self.shared_prefix_tokens * self.prefix_groups * max(self.adapters, 1)
        if prefix_tokens > _PREFIX_TOKENS_MAX:
            raise wrong(
                f"prefix_groups: {self.prefix_groups:,} prefixes of {self.shared_prefix_tokens:,} tokens are"
                f" {prefix_tokens:,} tokens, must be <= {_PREFIX_TOKENS_MAX:,}; lower one of them"
            )
        return self


def make_sessions(config: WorkloadConfig, rng: random.Random) -> Iterator[SimSession]:
    """Generate a synthetic workload, sorted by time."""
    at_s = 0.0
    shape = 1.0 / config.burstiness
    unit = _SHARED_UNIT_TOKENS
    prefix_tokens = config.shared_prefix_tokens // unit * unit
    groups: dict[tuple[int, ...], np.ndarray] = {}
    run = rng.getrandbits(62)
    names, parts = list(config.tenants), list(accumulate(config.tenants.values()))
    for number in range(math.ceil(config.requests / config.turns)):
        adapter = rng.randrange(config.adapters) if config.adapters else None
        # Equal text has different KV, hence different names, under another adapter.
        group = (rng.randrange(config.prefix_groups), *(() if adapter is None else (adapter,)))
        if prefix_tokens and group not in groups:
            groups[group] = named_units(named(run, 1, *group), prefix_tokens // unit)
        own = named(run, 2, number)
        prompt = SimPrompt(own, groups[group], unit) if prefix_tokens else SimPrompt(own)
        turns = tuple(_make_turns(config, rng))
        tenant = rng.choices(names, cum_weights=parts)[0] if names else ""
        yield SimSession(at_s, turns, prompt, adapter, config.slo_ttft_s, config.slo_itl_s, tenant)
        at_s += rng.gammavariate(shape, 1.0 / (shape * config.rate_per_s))


def trace_sessions(
    rows: Sequence[TraceRow], *, seed: int, hit_ratio: float = 0.0, block_size: int = _SHARED_UNIT_TOKENS
) -> Iterator[SimSession]:
    """Convert each row of a trace to a session of one turn.

    Args:
        rows: in order of time.
        seed: names the tokens that requests do not share.
        hit_ratio: for rows without prefix ids: fraction of all prompt tokens that an infinite cache would hit. Each prompt
            then starts with a prefix of one of a few common streams.
        block_size: shared prefixes are whole blocks of this many tokens.

    Raises:
        ConfigError: hit_ratio is not in [0, 1).
    """
    if not 0 <= hit_ratio < 1:
        raise ConfigError(f"--hit-ratio: must be >= 0 and < 1, got {hit_ratio:g}")
    rng = random.Random(seed)
    run = rng.getrandbits(62)
    common = _CommonStreams(run, rows, hit_ratio, block_size) if hit_ratio else None
    for number, row in enumerate(rows):
        own = named(run, 2, number)
        if row.prefix_ids:
            whole = row.prefix_ids[: row.input_tokens // PREFIX_BLOCK_TOKENS + 1]
            prompt = SimPrompt(own, np.array(whole, dtype=np.uint64), PREFIX_BLOCK_TOKENS)
        elif common is not None:
            prompt = SimPrompt(own, common.share(row.input_tokens, rng), block_size)
        else:
            prompt = SimPrompt(own)
        yield SimSession(row.at_s, (Turn(max(row.input_tokens, 1), max(row.output_tokens, 1)),), prompt)


class _CommonStreams:
    """Shared prefixes of prompts that give a set cache hit ratio in sum.

    The first prompt with a prefix gets no hit, and short prompts have no whole block to share: the deficit is carried over to
    the next prompts.
    """

    _COUNT = 32

    def __init__(self, run: int, rows: Sequence[TraceRow], hit_ratio: float, block_size: int) -> None:
        longest = max((row.input_tokens for row in rows), default=0)
        self._streams = [named_units(named(run, 1, n), longest // block_size) for n in range(self._COUNT)]
        self._seen_blocks = [0] * self._COUNT
        self._hit_ratio = hit_ratio
        self._block_size = block_size
        self._owed_tokens = 0.0

    def share(self, input_tokens: int, rng: random.Random) -> NDArray[np.uint64]:
        """Choose the shared prefix of one prompt; at least one token stays its own."""
        self._owed_tokens += self._hit_ratio * input_tokens
        stream = rng.randrange(self._COUNT)
        room = max(input_tokens - 1, 0) // self._block_size
        blocks = min(round(self._owed_tokens / self._block_size), room)
        self._owed_tokens -= min(blocks, self._seen_blocks[stream]) * self._block_size
        self._seen_blocks[stream] = max(blocks, self._seen_blocks[stream])
        return self._streams[stream][:blocks]


def rescaled(
    rows: Sequence[TraceRow], *, speed: float | None = None, rate_per_s: float | None = None
) -> list[TraceRow]:
    """Rescale the times of a trace.

    Args:
        rows: sorted by time, from 0.
        speed: factor on the request rate.
        rate_per_s: mean requests per second, instead of `speed`.

    Raises:
        ConfigError: both are given, or one is out of range.
    """
    if speed is not None and rate_per_s is not None:
        raise ConfigError(f"--speed {speed:g} and --rate {rate_per_s:g}: give one of them")
    for name, value in (("--speed", speed), ("--rate", rate_per_s)):
        if value is not None and not 0 < value <= _RATE_MAX:
            raise ConfigError(f"{name}: must be > 0 and <= {_RATE_MAX:g}, got {value:g}")
    span_s = rows[-1].at_s
    if rate_per_s is not None and not span_s and len(rows) > 1:
        raise ConfigError(
            f"--rate {rate_per_s:g}: all {len(rows):,} requests come at once; there is no rate to change"
        )
    name, asked = ("--speed", speed or 1.0) if rate_per_s is None else ("--rate", rate_per_s)
    factor = asked if rate_per_s is None else rate_per_s * span_s / len(rows)
    if not span_s:
        return list(rows)
    if span_s > factor * SPAN_MAX_S:
        raise ConfigError(
            f"{name} {asked:g}: the trace would take {span_s / factor / _DAY_S if factor else math.inf:,.3g} days, must be <="
            f" {SPAN_MAX_S / _DAY_S:.0f}; raise it"
        )
    return [replace(row, at_s=row.at_s / factor) for row in rows]


def _make_turns(config: WorkloadConfig, rng: random.Random) -> Iterator[Turn]:
    so_far = config.shared_prefix_tokens
    for number in range(config.turns):
        think_s = rng.expovariate(1.0 / config.think_s) if number and config.think_s else 0.0
        so_far += _length(config.input_tokens, config.length_sigma, rng)
        output_tokens = _length(config.output_tokens, config.length_sigma, rng)
        yield Turn(so_far, output_tokens, think_s)
        so_far += output_tokens


def _length(mean: int, sigma: float, rng: random.Random) -> int:
    """Draw a log-normal length with this mean."""
    if not sigma:
        return mean
    return max(1, round(mean * math.exp(rng.gauss(-sigma * sigma / 2, sigma))))
