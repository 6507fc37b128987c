"""Prompts suspected of killing workers: refused for a while."""

import hashlib
from collections import OrderedDict

from penstock.core.types.requests import Request
from penstock.router.config import RetryConfig


class PromptQuarantine:
    """A bounded set of prompts by hash, each with the time until which it is refused, and why."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refused)

    def put(self, request: Request, now_s: float, reason: str) -> None:
        """Refuse this request's content from now on."""
        content = _content(request)
        self._refused[content] = now_s + self._config.quarantine_s, reason
        self._refused.move_to_end(content)
        if len(self._refused) > self._config.quarantined_max:
            self._refused.popitem(last=False)

    def refusal(self, request: Request, now_s: float) -> tuple[float, str] | None:
        """Give the seconds that this content is still refused, and why; None if it is not."""
        while self._refused and next(iter(self._refused.values()))[0] <= now_s:
            self._refused.popitem(last=False)
        if not self._refused:  # nearly always: nothing to hash
            return None
        until_s, reason = self._refused.get(_content(request), (now_s, ""))
        return None if until_s == now_s else (until_s - now_s, reason)

    def check(self) -> None:
        assert len(self._refused) <= self._config.quarantined_max, (
            f"{len(self._refused)} contents in quarantine"
        )
        ends = [until_s for until_s, _ in self._refused.values()]
        assert ends == sorted(ends), "quarantine: the first to be put is the first to be let out"


def _content(request: Request) -> bytes:
    digest = hashlib.blake2b(request.model.encode(), digest_size=16)
    digest.update(b"\0" + request.salt + b"\0" + request.token_ids)
    return digest.digest()
