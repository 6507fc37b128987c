"""A token of a text with its log-probability."""

from dataclasses import dataclass

from penstock.core.types.requests import TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token with its log-probability; `start` is its character offset in the choice's text."""

    logprob: TokenLogprob
    start: int
