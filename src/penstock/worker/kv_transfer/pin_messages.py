"""Messages between the two workers of a KV transfer about pinned blocks, sent as notifications of their transfer agents."""

from typing import Annotated

import msgspec

from penstock.core.ids import PinId
from penstock.core.types.requests import TRANSFER_ID_BYTES
from penstock.core.wire import Wire

TransferId = Annotated[bytes, msgspec.Meta(min_length=TRANSFER_ID_BYTES, max_length=TRANSFER_ID_BYTES)]


class PinFollow(Wire, frozen=True, tag="pin_follow"):
    """To a prefill worker: subscribe to the blocks of this transfer's prompt as they are computed."""

    transfer_id: TransferId
    read_id: int


class PinGrown(Wire, frozen=True, tag="pin_grown"):
    """To a subscriber: more blocks of a pin.

    first:       index in the prompt of the first of `block_ids`
    block_ids:   packed little-endian uint32
    is_whole:    no more blocks follow
    tail_tokens: if not 0, the last of `block_ids` is the partial block after the full ones, with so many tokens
    """

    pin_id: PinId
    read_id: int
    first: int
    block_ids: bytes
    is_whole: bool
    tail_tokens: int = 0


class PinCheck(Wire, frozen=True, tag="pin_check"):
    """To a prefill worker: blocks were read; were they pinned until now? `PinHeld` answers."""

    pin_id: PinId
    read_id: int


class PinHeld(Wire, frozen=True, tag="pin_held"):
    """To a decode worker: whether the blocks were pinned until now.

    Sent without a `PinCheck`, and False, when a transfer that is subscribed to has ended.
    """

    pin_id: PinId
    was_held: bool
    read_id: int


class PinRead(Wire, frozen=True, tag="pin_read"):
    """To a prefill worker: unpin the blocks; they were read, or are not needed. No answer."""

    pin_id: PinId


PinMessage = PinFollow | PinGrown | PinCheck | PinHeld | PinRead
PIN_MESSAGES: msgspec.msgpack.Decoder[PinMessage] = msgspec.msgpack.Decoder(PinMessage)
