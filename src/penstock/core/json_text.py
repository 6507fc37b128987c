"""JSON for clients, who may read it line by line."""

from typing import Any

import msgspec

_LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}
"""Line ends beyond ASCII, which JSON allows in strings, and their escapes: some clients end a line of an event stream at them."""
_encode = msgspec.json.Encoder().encode


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON without line ends."""
    encoded = _encode(value)
    if encoded.isascii():
        return encoded
    for end, escape in _LINE_ENDS.items():
        encoded = encoded.replace(end, escape)
    return encoded
