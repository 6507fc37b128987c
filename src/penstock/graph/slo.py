"""Latency targets (SLO) of a deployment."""

import pydantic

from penstock.core.config import Config


class Slo(Config):
    """Latency targets: `percentile` % of requests must meet both."""

    ttft_s: float = pydantic.Field(default=2.0, gt=0)
    """Seconds from a request's arrival to its first token."""
    itl_s: float = pydantic.Field(default=0.1, gt=0)
    """Mean seconds between two tokens of a stream."""
    percentile: float = pydantic.Field(default=90.0, gt=0, lt=100)
    """Share of requests that must meet the targets, in percent."""
