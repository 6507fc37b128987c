"""What the two workers of a hand-over say to each other about held blocks, as notifications of their transfer agents."""

import msgspec

from penstock.core.ids import PinId
from penstock.core.wire import Wire


class PinRead(Wire, frozen=True, tag="pin_read"):
    """To a producer: its blocks were read, or are not wanted; it may let them go. `read_id` is the reader's."""

    pin_id: PinId
    read_id: int = 0


class PinCheck(Wire, frozen=True, tag="pin_check"):
    """To a producer: some of its blocks were read. It still holds them all."""

    pin_id: PinId
    read_id: int = 0


class PinHeld(Wire, frozen=True, tag="pin_held"):
    """The answer to both: whether the blocks had been held until then. Also to who follows a pin that has ended."""

    pin_id: PinId
    was_held: bool
    read_id: int = 0


class PinFollow(Wire, frozen=True, tag="pin_follow"):
    """To a producer: say which blocks there are, and again whenever there are more of them."""

    pin_id: PinId
    read_id: int


class PinGrown(Wire, frozen=True, tag="pin_grown"):
    """The answers: the pin's blocks from its `first` on, packed little-endian uint32. No more come once it `is_whole`.

    Then one more follows these if there are `tail_tokens`, past the full blocks.
    """

    pin_id: PinId
    read_id: int
    first: int
    block_ids: bytes
    is_whole: bool
    tail_tokens: int = 0


PinMessage = PinRead | PinCheck | PinHeld | PinFollow | PinGrown
PIN_MESSAGES: msgspec.msgpack.Decoder[PinMessage] = msgspec.msgpack.Decoder(PinMessage)
