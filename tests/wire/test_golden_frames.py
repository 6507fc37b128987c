"""The bytes of every message, as they are on the wire: what was sent yesterday must be understood tomorrow.

`golden_messages.json` has what each message says, `golden_frames.json` its bytes. After an intended change (a new field with a default), change
the first and run this file as a program to write the second anew.
"""

import contextlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import framing
from penstock.core import framing as secrets
from penstock.core.errors import ProtocolError
from penstock.core.framing import LENGTH_BYTES, FrameReader, UnknownFrame
from penstock.runtime import handshake
from penstock.runtime.discovery import local
from penstock.runtime.requests import outbox
from penstock.transfer.link import frames as links
from penstock.transfer.transports import tcp_frames

DATA = Path(__file__).parent.parent / "data"
GOLDEN = DATA / "golden_frames.json"
PLANES = {
    "hub_": (local.CODEC, local),
    "link_": (links.link_codec(), links),
    "tcp_": (tcp_frames.TCP_CODEC, tcp_frames),
    "": (outbox.CODEC, outbox),
}
"""Each plane's codec and the module of its messages, by how the names of its messages begin."""


def case_of(name, says):
    """Give the codec, the name and the message."""
    codec, module = next(plane for prefix, plane in PLANES.items() if name.startswith(prefix))
    known = [kind for where in (module, framing, secrets, handshake) for kind in vars(where).values()]
    kinds = [kind for kind in known if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    kind = next(kind for kind in kinds if kind.__struct_config__.tag == says["type"])
    return codec, name, msgspec.convert(says, kind)


SAID = json.loads((DATA / "golden_messages.json").read_text(encoding="utf-8"))
CASES = [case_of(name, says) for name, says in SAID.items()]
MESSAGES = {name: message for _, name, message in CASES}
each_message = pytest.mark.parametrize(
    ("codec", "name", "message"), CASES, ids=[name for _, name, _ in CASES]
)


def payload_of(codec, message):
    return codec.encode(message)[LENGTH_BYTES:]


@each_message
def test_the_bytes_are_what_they_were(codec, name, message):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert codec.encode(message).hex() == golden[name], "if this was intended, read the top of this file"
    assert codec.decode(bytes.fromhex(golden[name])[LENGTH_BYTES:]) == message


def test_every_message_has_its_bytes():
    assert json.loads(GOLDEN.read_text(encoding="utf-8")).keys() == {name for _, name, _ in CASES}
    for codec, _ in PLANES.values():
        assert codec.tags == {says.__struct_config__.tag for other, _, says in CASES if other is codec}


@each_message
def test_a_newer_peer_may_say_more(codec, name, message):
    plain = msgspec.msgpack.decode(payload_of(codec, message))
    assert codec.decode(msgspec.msgpack.encode(extended(plain))) == message


def extended(value):
    """Add a field that nobody knows to every map, at every depth."""
    if isinstance(value, dict):
        return {key: extended(item) for key, item in value.items()} | {"from_the_future": [1, {"a": None}]}
    if isinstance(value, list):
        return [extended(item) for item in value]
    return value


@each_message
def test_an_older_peer_may_say_less(codec, name, message):
    plain = msgspec.msgpack.decode(payload_of(codec, message))
    for field in msgspec.structs.fields(message):
        if not field.required:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            shorter = {key: value for key, value in plain.items() if key != field.encode_name}
            expected = msgspec.structs.replace(message, **{field.name: default})
            assert codec.decode(msgspec.msgpack.encode(shorter)) == expected


def test_deltas_are_arrays_that_may_grow_and_shrink():
    plain = msgspec.msgpack.decode(payload_of(outbox.CODEC, MESSAGES["deltas"]))
    plain["deltas"] = [[*plain["deltas"][0], "from the future"], ["r-1"]]
    assert outbox.CODEC.decode(msgspec.msgpack.encode(plain)) == MESSAGES["deltas"]


def test_an_unknown_message_is_reported_and_not_an_error():
    payload = msgspec.msgpack.encode({"type": "from_the_future", "value": 1})
    assert outbox.CODEC.decode(payload) == UnknownFrame("from_the_future")


def test_an_unknown_event_makes_the_frame_unknown():
    plain = msgspec.msgpack.decode(payload_of(outbox.CODEC, MESSAGES["event_batch"]))
    plain["message"]["events"].append({"type": "moved"})
    assert outbox.CODEC.decode(msgspec.msgpack.encode(plain)) == UnknownFrame("event")


def test_a_known_message_with_impossible_content_is_an_error():
    payload = msgspec.msgpack.encode({"type": "abort", "request_id": 5})
    with pytest.raises(ProtocolError, match=r"tag abort: .*request_id"):
        outbox.CODEC.decode(payload)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
tagged = st.builds(
    lambda tag, fields: msgspec.msgpack.encode({"type": tag} | fields),
    st.sampled_from(sorted(outbox.CODEC.tags)),
    st.dictionaries(
        st.sampled_from(["request", "request_id", "grants", "deltas", "message", "load", "fetch_id", "data"]),
        anything,
    ),
)


@given(st.binary(max_size=200) | anything.map(msgspec.msgpack.encode) | tagged)
def test_no_bytes_crash_the_decoder(payload):
    for codec in (outbox.CODEC, local.CODEC):
        with contextlib.suppress(ProtocolError):
            codec.decode(payload)


@given(st.sampled_from(CASES), st.data())
def test_no_damage_crashes_the_decoder(case, data):
    codec, _, message = case
    payload = bytearray(payload_of(codec, message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        codec.decode(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


def test_deep_nesting_is_no_crash():
    for payload in (
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\x82\xa4type\xa5event\xa7message" + b"\x91" * 100_000,
    ):
        with pytest.raises(ProtocolError):
            outbox.CODEC.decode(payload)


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=8))
def test_no_stream_crashes_the_reader(stream, cuts):
    reader = FrameReader(frame_bytes_max=64)
    last = 0
    with contextlib.suppress(ProtocolError):
        for cut in [*sorted(cuts), len(stream)]:
            for frame in reader.feed(stream[last:cut]):
                assert len(frame) <= 64
            last = max(last, cut)
            assert reader.buffered_bytes < 64 + LENGTH_BYTES


@given(st.lists(st.binary(max_size=50), max_size=20), st.lists(st.integers(0, 1200), max_size=30))
def test_frames_come_out_as_they_went_in_however_they_are_cut(payloads, cuts):
    stream = b"".join(len(payload).to_bytes(LENGTH_BYTES, "little") + payload for payload in payloads)
    reader = FrameReader(frame_bytes_max=50)
    out, last = [], 0
    for cut in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        out += reader.feed(stream[last:cut])
        last = cut
    assert out == payloads
    assert reader.buffered_bytes == 0


if __name__ == "__main__":
    golden = {name: codec.encode(message).hex() for codec, name, message in CASES}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
