"""Computes the prompts of next turns ahead: what an agent's next request begins with, while its tool runs.

After an answer with `agent_hints.speculative_prefill` the chat is rendered again with the answer in it and a message after it.
What does not depend on that message's content is sent to the answer's worker as a background request, which runs only while
that worker has no other.
"""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import Overloaded, PenstockError, RequestError
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId
from penstock.core.log import get_logger
from penstock.core.types.requests import FinishReason, Request, SamplingParams, SessionAction
from penstock.core.wire import (
    num_tokens,
    pack_hashes,
    pack_tokens,
    unpack_tokens,
)
from penstock.frontend.metrics import FrontendMetrics, NextTurn
from penstock.frontend.openai.bodies import ChatRequest, Message, parse_chat
from penstock.frontend.requests.encoding import encode_chat, template_arguments
from penstock.frontend.requests.preprocess import PreparedRequest
from penstock.seams import RequestDispatcher, RequestStream

_KEPT_BYTES_MAX = 64 << 20
"""Bytes of the bodies that are kept until their answers end; requests past it get no next turn computed."""
_PRIORITY = -1000
_FIRST_WAIT_S, _WAIT_MAX_S = 0.05, 1.0
"""A busy worker is asked again so much later, then twice as late each time."""
_TOOL_CALLS = ("<tool_call", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
"""What models begin tool calls with; templates write an answer otherwise where a tool's result follows."""
_CONTENTS = ("A", "1")

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, its tokens, and the stream that it came by."""

    text: str
    token_ids: Sequence[int]
    stream: RequestStream


OnAnswer = Callable[[Answer], None]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Turn:
    """An answered request, until its next turn was computed or has come."""

    request: Request
    body: Sequence[bytes] | ChatRequest
    prepared: PreparedRequest
    answer: Answer | None = None
    task: asyncio.Task[None] | None = None
    is_given_up: bool = False
    outcome: NextTurn = NextTurn.ARRIVED

    def continued_by(self, request: Request) -> bool:
        """Say whether another request is a next turn of this one, or at least one of its session."""
        if self.request.tenant != request.tenant:
            return False
        if self.request.session is not None and request.session is not None:
            return self.request.session == request.session
        own = self.request.block_hashes
        return (
            len(own) > 0
            and len(request.block_hashes) >= len(own)
            and request.block_hashes[len(own) - 16 : len(own)] == own[-16:]
        )


class NextTurns:
    """The next turns of one frontend that are computed ahead. One event loop owns it."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        metrics: FrontendMetrics,
        *,
        hash_key: bytes,
        new_id: Callable[[], str],
        turns_max: int,
        within_s: float,
    ) -> None:
        """Make it without turns.

        Args:
            dispatcher: sends the background requests.
            metrics: count them.
            hash_key: the deployment's key of block hashes.
            new_id: makes ids of requests.
            turns_max: at once; 0 for none.
            within_s: a turn is given up if its worker was busy for so long.
        """
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._hash_key = hash_key
        self._new_id = new_id
        self._turns_max = turns_max
        self._within_s = within_s
        self._turns: list[_Turn] = []
        self._kept_bytes = 0

    def arrived(self, prepared: PreparedRequest) -> None:
        """Give up what is computed ahead for a request that is here now."""
        self._give_up(prepared.requests[0])

    def follow(
        self, body: Sequence[bytes] | ChatRequest, prepared: PreparedRequest, size_bytes: int
    ) -> OnAnswer | None:
        """Return what to call with the request's answer to compute the next turn's prefix ahead.

        Args:
            body: the chat's body with its messages, as it came or decoded.
            prepared: the request.
            size_bytes: size of the body.

        Returns:
            None if the request asks for no such work, or there is no room for its body.
        """
        request = prepared.requests[0]
        control = request.session_control
        is_last = control is not None and control.action is SessionAction.CLOSE
        is_single = len(prepared.requests) == 1 and request.media is None
        if not request.speculative_prefill or not is_single or is_last or not self._turns_max:
            return None
        if self._kept_bytes + size_bytes > _KEPT_BYTES_MAX:
            self._metrics.next_turn(NextTurn.DROPPED)
            return None
        turn = _Turn(request, body, prepared)
        self._kept_bytes += size_bytes
        weakref.finalize(turn, self._release, size_bytes).atexit = False

        def on_answer(answer: Answer) -> None:
            turn.answer = answer
            self._begin(turn)

        return on_answer

    def _release(self, size_bytes: int) -> None:
        self._kept_bytes -= size_bytes

    def _give_up(self, request: Request) -> None:
        """Give up the turns that a request continues."""
        for turn in self._turns:
            if turn.task is not None and not turn.is_given_up and turn.continued_by(request):
                turn.is_given_up = True
                turn.task.cancel()

    async def close(self) -> None:
        """Give up all turns. Safe twice."""
        tasks = [turn.task for turn in self._turns if turn.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, turn: _Turn) -> None:
        self._give_up(turn.request)  # one a session
        if sum(not each.is_given_up for each in self._turns) >= self._turns_max:
            self._metrics.next_turn(NextTurn.DROPPED)
            return
        self._turns.append(turn)
        turn.task = asyncio.get_running_loop().create_task(self._run(turn), name="next turn")
        turn.task.add_done_callback(lambda _: self._end(turn))

    def _end(self, turn: _Turn) -> None:
        self._turns.remove(turn)
        self._metrics.next_turn(turn.outcome)

    async def _run(self, turn: _Turn) -> None:
        """Compute a turn's prompt as soon as its worker has nothing else to do."""
        try:
            assert turn.answer is not None, "begun with it"
            prompt = await asyncio.to_thread(self._prompt, turn, turn.answer)
            turn.outcome = NextTurn.HELD if prompt is None else await self._compute(turn.answer, prompt)
        except RequestError as error:  # the template refuses the chat with its answer, or that is too long
            get_logger().debug("next_turn_refused", request_id=turn.request.request_id, error=str(error))
            turn.outcome = NextTurn.REFUSED
        except PenstockError as error:
            get_logger().debug("next_turn_failed", request_id=turn.request.request_id, error=str(error))
            turn.outcome = NextTurn.FAILED
        except Exception:  # noqa: BLE001 - whatever a template or tokenizer raises, the answer was given
            get_logger().exception("next_turn_failed", request_id=turn.request.request_id)
            turn.outcome = NextTurn.FAILED

    async def _compute(self, answer: Answer, prompt: Request) -> NextTurn:
        loop = asyncio.get_running_loop()
        until_s, wait_s = loop.time() + self._within_s, _FIRST_WAIT_S
        while not await self._try(answer, prompt):
            if loop.time() + wait_s > until_s:
                return NextTurn.BUSY
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _WAIT_MAX_S)
        return NextTurn.COMPUTED

    async def _try(self, answer: Answer, prompt: Request) -> bool:
        """Send the prompt; False if its worker has other requests, or got one meanwhile."""
        request = msgspec.structs.replace(prompt, request_id=RequestId(f"next-{self._new_id()}"))
        cached = 0
        try:
            async with self._dispatcher.open(request, beside=answer.stream) as stream:
                async for delta in stream:
                    if delta.finish_reason is FinishReason.CANCELLED:
                        return False
                    cached = delta.cached_tokens if delta.cached_tokens is not None else cached
        except Overloaded:
            return False
        self._metrics.next_turn_tokens.inc(num_tokens(request.token_ids) - cached)
        return True

    def _prompt(self, turn: _Turn, answer: Answer) -> Request | None:
        """Make the request for the full blocks that a next turn begins with; None if the worker has computed them already."""
        model, answered = turn.prepared.model, turn.request
        size = model.card.block_size
        prefix = self._prefix(turn, answer.text)
        prefix = prefix[: len(prefix) // size * size]
        if not len(prefix) or len(prefix) >= model.card.context_length:
            return None
        hashes = block_hashes(prefix, size, answered.salt, key=self._hash_key)
        known = np.concatenate([unpack_tokens(answered.token_ids), np.array(answer.token_ids[:-1], np.int32)])
        held = block_hashes(known[: len(known) // size * size], size, answered.salt, key=self._hash_key)
        if len(held) >= len(hashes) and (held[len(hashes) - 1] == hashes[-1]).all():
            return None
        return msgspec.structs.replace(
            answered,
            token_ids=pack_tokens(prefix),
            block_hashes=pack_hashes(hashes),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            deadline_s=self._within_s,
            priority=_PRIORITY,
            session_control=None,
            expected_output_tokens=1,
            slo_ttft_s=None,
            slo_itl_s=None,
            is_background=True,
        )

    def _prefix(self, turn: _Turn, text: str) -> Tokens:
        """Tokenize what every next turn begins with."""
        body = turn.body
        request = body if isinstance(body, ChatRequest) else parse_chat(b"".join(body))
        said = [*request.messages, Message(role="assistant", content=text)]
        calls_tool = any(mark in text for mark in _TOOL_CALLS)
        roles = ("tool", "user") if calls_tool else ("user",)
        for role in roles:
            try:
                first, second = (
                    encode_chat(
                        turn.prepared.model,
                        [
                            *said,
                            Message(role=role, content=content, tool_call_id="0" if role == "tool" else None),
                        ],
                        template_arguments(request, turn.prepared.model),
                    )
                    for content in _CONTENTS
                )
            except RequestError:  # a template without tools
                if role == roles[-1]:
                    raise
                continue
            break
        least = min(len(first), len(second))
        differs = np.flatnonzero(first[:least] != second[:least])
        return first[: int(differs[0]) if len(differs) else least]
