"""What a gateway says to the router alone, and what it is told: servers, requests, choices, feedback."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from penstock.core.types import InstanceState, Prices
from penstock.core.wire import TokenArray

TOKEN_ID_MAX = 2**31 - 1
"""Token ids are from 0 to this."""


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server, as its gateway describes it.

    `total_blocks` is its KV cache's size in blocks; 0 is unknown. `prices` are what its work takes; without, it is
    taken to be like the others. `adapters` are the LoRA adapters that it serves, each as a model of its own. `host` to
    `region` say where it is, as far as is known.
    """

    url: str
    model: str
    total_blocks: int = 0
    state: InstanceState = InstanceState.READY
    prices: Prices | None = None
    adapters: tuple[str, ...] = ()
    host: str = ""
    rack: str = ""
    zone: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A request that needs a server: its prompt, as token ids (0 to `TOKEN_ID_MAX`) or as text. `exclude` are names not to give.

    `model` may be an adapter's name.
    """

    model: str
    prompt: TokenArray | str
    session: str | None = None
    exclude: tuple[str, ...] = ()
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes. Give `id` with all feedback."""

    id: str
    worker: str
    url: str


class Stage(StrEnum):
    """What a gateway can tell of a request; everything but FINISHED is optional."""

    STARTED = "started"
    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    FINISHED = "finished"
