"""What the two workers of a KV transfer say to each other about pinned blocks, as notifications of their transfer agents."""

from typing import Annotated

import msgspec

from penstock.core.ids import PinId
from penstock.core.types.requests import TRANSFER_ID_BYTES
from penstock.core.wire import Wire

TransferId = Annotated[bytes, msgspec.Meta(min_length=TRANSFER_ID_BYTES, max_length=TRANSFER_ID_BYTES)]


class PinFollow(Wire, frozen=True, tag="pin_follow"):
    """To a prefill worker: tell of the blocks of this transfer's prompt as they are computed."""

    transfer_id: TransferId
    read_id: int


class PinGrown(Wire, frozen=True, tag="pin_grown"):
    """To a follower: the pin's blocks from its `first` on, packed little-endian uint32. No more come once it `is_whole`.

    With `tail_tokens`, the last of these blocks is the partial one past the full blocks.
    """

    pin_id: PinId
    read_id: int
    first: int
    block_ids: bytes
    is_whole: bool
    tail_tokens: int = 0


class PinCheck(Wire, frozen=True, tag="pin_check"):
    """To a prefill worker: some of the pin's blocks were read; were they pinned until now? `PinHeld` answers."""

    pin_id: PinId
    read_id: int


class PinHeld(Wire, frozen=True, tag="pin_held"):
    """Whether the blocks were pinned until now. Unasked for, and False: the transfer that is followed has ended."""

    pin_id: PinId
    was_held: bool
    read_id: int


class PinRead(Wire, frozen=True, tag="pin_read"):
    """To a prefill worker: the blocks were read, or are not wanted; it unpins them. No answer."""

    pin_id: PinId


PinMessage = PinFollow | PinGrown | PinCheck | PinHeld | PinRead
PIN_MESSAGES: msgspec.msgpack.Decoder[PinMessage] = msgspec.msgpack.Decoder(PinMessage)
