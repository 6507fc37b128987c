"""A request at another region that can go on at another of its frontends."""

import msgspec

from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import PackedHashes, PackedTokens, pack_tokens, unpack_tokens
from penstock.engine.openai.apis.api import Piece
from penstock.engine.openai.streams import Stream


class MovableStream(Stream):
    """Keeps the answer so far. One task feeds it."""

    __slots__ = ("_passed", "failed_in_a_row")

    def __init__(self, request: Request, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(request, eos_token_ids, {})
        self._passed: list[int] = []
        self.failed_in_a_row = 0
        """Frontends that have broken the answer since its last token."""

    def feed(self, piece: Piece) -> Delta | None:
        delta = super().feed(piece)
        if delta is not None and delta.token_ids:
            self._passed += unpack_tokens(delta.token_ids).tolist()
            self.failed_in_a_row = 0
        return delta

    def move(self) -> bool:
        """Have the next frontend go on after the tokens that were passed on; a stop token that was held back is computed again.

        Returns:
            False where only the end of the answer was lost: it ends.
        """
        request = self.request
        self.num_tokens = len(self._passed)
        self._held, self._held_logprobs = (), ()
        emitted = request.num_emitted + self.num_tokens
        if emitted >= request.sampling.max_tokens:  # only the end of the answer was lost
            self._finish, self.is_over = FinishReason.LENGTH, True
            return False
        self.asked = msgspec.structs.replace(
            request,
            token_ids=PackedTokens(request.token_ids + pack_tokens(self._passed)),
            num_emitted=emitted,
            block_hashes=PackedHashes(b""),
        )
        return True
