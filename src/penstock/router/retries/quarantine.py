"""Prompts suspected of killing workers: refused for a while."""

import hashlib
from collections import OrderedDict

from penstock.core.types.requests import Request
from penstock.router.config import RetryConfig


class Quarantine:
    """A bounded set of prompts by hash, each with the time until which it is refused."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def put(self, request: Request, now_s: float) -> None:
        """Refuse this request's content from now on."""
        content = _content(request)
        self._until_s[content] = now_s + self._config.quarantine_s
        self._until_s.move_to_end(content)
        if len(self._until_s) > self._config.quarantined_max:
            self._until_s.popitem(last=False)

    def remaining_s(self, request: Request, now_s: float) -> float | None:
        """Give the seconds that this content is still refused; None if it is not."""
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        if not self._until_s:  # nearly always: nothing to hash
            return None
        until_s = self._until_s.get(_content(request))
        return None if until_s is None else until_s - now_s

    def check(self) -> None:
        assert len(self._until_s) <= self._config.quarantined_max, (
            f"{len(self._until_s)} contents in quarantine"
        )
        ends = list(self._until_s.values())
        assert ends == sorted(ends), "quarantine: the first to be put is the first to be let out"


def _content(request: Request) -> bytes:
    digest = hashlib.blake2b(request.model.encode(), digest_size=16)
    digest.update(b"\0" + request.salt + b"\0" + request.token_ids)
    return digest.digest()
