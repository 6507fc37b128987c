"""What the two workers of a hand-over say to each other about held blocks, as notifications of their transfer agents."""

import msgspec

from penstock.core.ids import PinId
from penstock.core.wire import Wire


class PinRead(Wire, frozen=True, tag="pin_read"):
    """To a producer: its blocks were read, or are not wanted; it may let them go. `read_id` is the reader's."""

    pin_id: PinId
    read_id: int = 0


class PinHeld(Wire, frozen=True, tag="pin_held"):
    """The answer: whether the blocks had been held until then."""

    pin_id: PinId
    was_held: bool
    read_id: int = 0


PIN_MESSAGES = msgspec.msgpack.Decoder(PinRead | PinHeld)
