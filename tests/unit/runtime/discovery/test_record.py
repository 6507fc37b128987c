import msgspec
import pytest

from penstock.core.wire import WIRE_VERSION
from penstock.runtime.discovery.registrations import Record, RecordError, Records
from penstock.runtime.handshake import Identity
from penstock.testing.planes.scripted_worker import scripted_instance

OURS = Records(Identity(secret=b"ours", hash_key=b"k" * 16))
INSTANCE = scripted_instance("tcp://127.0.0.1:1")


def changed(**fields):
    record = msgspec.msgpack.decode(OURS.encode(INSTANCE), type=Record)
    return msgspec.msgpack.encode(msgspec.structs.replace(record, **fields))


def test_a_registration_is_read_back():
    assert OURS.decode(OURS.encode(INSTANCE)) == INSTANCE
    assert OURS.decode(changed(wire_version=WIRE_VERSION + 1)) == INSTANCE, "a neighbour's"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "damaged"),
        (b"\xc1 no registration", "damaged"),
        (changed(wire_version=WIRE_VERSION + 2), "version"),
        (changed(proof=b"guess"), "secret"),
        (changed(instance=b"of somebody"), "secret"),
        (Records(Identity(secret=b"theirs", hash_key=b"k" * 16)).encode(INSTANCE), "secret"),
        (Records(Identity(secret=b"ours", hash_key=b"x" * 16)).encode(INSTANCE), "hash_key"),
    ],
)
def test_what_is_not_ours_is_refused_with_a_reason(data, reason):
    with pytest.raises(RecordError) as refused:
        OURS.decode(data)
    assert refused.value.reason == reason
