"""A dispatcher that replays scripts instead of calling workers, for tests of frontends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Self, cast

from penstock.core.errors import RequestError
from penstock.core.types.instances import CardFile, ModelCard, Role
from penstock.core.types.kv import KvAction, PrefixSummary
from penstock.core.types.load import ModelLoad
from penstock.core.types.requests import Delta, ExpandedPrompt, FinishReason, MediaPrompt, Request
from penstock.core.wire import pack_hashes, pack_tokens, unpack_tokens
from penstock.seams import DeltaSink, DirectSink, RequestStream
from tests.support.tokenizer import tiny_card, tiny_model_files

Script = Callable[[Request], AsyncIterator[Delta]]


class ScriptedDispatcher:
    """Implements `RequestDispatcher`. Counts opened streams, and streams left before their end."""

    def __init__(
        self,
        script: Script,
        cards: Sequence[ModelCard] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Serve the models of `cards` (None: one tiny model); `files` has their files by name."""
        self.script = script
        self.cards = {card.name: card for card in (cards if cards is not None else [tiny_card()])}
        self.files = dict(files if files is not None else tiny_model_files())
        self.opened: list[Request] = []
        self.beside: list[str | None] = []
        """For each stream, in order of `open`: the request of its `beside` stream."""
        self.open_streams = 0
        self.cancelled = 0
        self.fetches = 0
        self.busy_s = 1.0
        self.away: set[str] = set()
        self.expanded: list[MediaPrompt] = []
        self.asked_summaries: list[tuple[str, dict[int, int], float]] = []
        self.acted: list[tuple[KvAction, str | None]] = []

    def open(self, request: Request, *, beside: RequestStream | None = None) -> "ScriptedStream":
        self.beside.append(None if beside is None else cast("ScriptedStream", beside).request_id)
        return ScriptedStream(self, request)

    def models(self) -> Mapping[str, ModelCard]:
        return self.cards

    def expects(self, name: str) -> bool:
        return name in self.away

    def load(self, model: str) -> ModelLoad | None:
        return ModelLoad(workers=1, block_size=16) if model in self.models() else None

    def prefix_summary(
        self, model: str, cache_salt: str, after: Mapping[int, int], interval_s: float
    ) -> PrefixSummary | None:
        """Tell of one chunk, which nobody has."""
        self.asked_summaries.append((cache_salt, dict(after), interval_s))
        if model not in self.models():
            return None
        return PrefixSummary(
            origin=7, root=bytes(16), chunk_tokens=256, since=0, version=1, added=pack_hashes([42])
        )

    def retry_after_s(self) -> float:
        return self.busy_s

    async def fetch_file(self, card: ModelCard, file: CardFile) -> bytes:
        self.fetches += 1
        if file.name not in self.files:
            raise RequestError(f"{card.name}: no file {file.name}", http_status=404)
        return self.files[file.name]

    async def expand_media(self, card: ModelCard, prompt: MediaPrompt) -> ExpandedPrompt:
        """Append ten tokens for each item to the prompt."""
        self.expanded.append(prompt)
        token_ids = unpack_tokens(prompt.token_ids).tolist()
        positions = tuple(len(token_ids) + 10 * index for index in range(len(prompt.items)))
        return ExpandedPrompt(
            token_ids=pack_tokens(token_ids + [7] * 10 * len(prompt.items)), positions=positions
        )

    async def act_on_kv(self, action: KvAction, worker: str | None) -> Sequence[object]:
        self.acted.append((action, worker))
        return [{"worker": worker or "worker-1", "blocks": 3}]

    def workers(self) -> Sequence[object]:
        return [{"name": "scripted", "models": sorted(self.cards)}]

    def explain(self, request_id: str) -> Sequence[object]:
        return [{"request_id": r.request_id} for r in self.opened if r.request_id.startswith(request_id)]

    def latest_decisions(self, most: int) -> Sequence[object]:
        return [{"request_id": request.request_id} for request in self.opened[-most:]]

    def journeys(self, answer_id: str) -> Sequence[object]:
        return self.explain(answer_id)

    def latest_journeys(self, most: int) -> Sequence[object]:
        return self.latest_decisions(most)[::-1]

    def queued(self) -> tuple[int, float]:
        return 0, 0.0

    async def change_role(self, worker: str, role: Role) -> object:
        if worker != "scripted":
            raise RequestError(
                f"there is no worker {worker!r}; known: scripted", http_status=404, param="worker"
            )
        return {"worker": worker, "role": role}

    async def sleep(self, worker: str, level: int) -> object:
        return {"worker": worker, "state": "asleep", "level": level}

    async def wake_up(self, worker: str) -> object:
        return {"worker": worker, "state": "ready"}


class ScriptedStream:
    def __init__(self, dispatcher: ScriptedDispatcher, request: Request) -> None:
        self.request_id = request.request_id
        self._dispatcher = dispatcher
        self._request = request
        self._deltas = dispatcher.script(request)
        self._finished = False
        self.waited_for_decode = False
        self._stopped = False

    async def __aenter__(self) -> Self:
        self._dispatcher.opened.append(self._request)
        self._dispatcher.open_streams += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._dispatcher.open_streams -= 1
        self._dispatcher.cancelled += not self._finished
        close = getattr(self._deltas, "aclose", None)
        if close is not None:
            await close()

    async def run(self, sink: DeltaSink, direct: DirectSink | None = None) -> None:
        async for delta in self:
            if (hold := sink(delta)) is not None:
                await hold()
            if self._stopped:
                return

    def stop(self) -> None:
        self._stopped = True

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for delta in self._deltas:
            self._finished = delta.finish_reason is not None
            yield delta


def speak(
    token_ids: Sequence[int],
    *,
    at_once: int = 1,
    pause_s: float = 0.0,
    finish: FinishReason = FinishReason.LENGTH,
) -> Script:
    """Make a script that answers every request with the same tokens.

    Args:
        token_ids: the output, including a stop token if `finish` is STOP.
        at_once: tokens in one delta.
        pause_s: pause before each delta.
        finish: finish reason of the last delta.
    """

    async def script(request: Request) -> AsyncIterator[Delta]:
        for start in range(0, max(len(token_ids), 1), at_once):
            await asyncio.sleep(pause_s)
            yield Delta(
                request_id=request.request_id,
                token_ids=pack_tokens(token_ids[start : start + at_once]),
                finish_reason=finish if start + at_once >= len(token_ids) else None,
                cached_tokens=0 if start == 0 else None,
            )

    return script
