"""The bytes of what agents of different releases have to understand of each other, besides frames: metadata, grants, layouts.

After an intended change (a new field with a default), run this file as a program to write the bytes anew.
"""

import json
from pathlib import Path

import msgspec
import pytest

from penstock.core.descriptors import MemoryKind, RegionInfo, TransferOp
from penstock.core.errors import ErrorInfo
from penstock.core.types.kv import KvLayout, RankLayout
from penstock.core.wire import encode
from penstock.transfer.link.frames import AgentMetadata
from penstock.transfer.link.grants import Grant, GrantRequest
from penstock.transfer.transports.shm import MappedArena

GOLDEN = Path(__file__).parent.parent / "data" / "golden_transfer.json"
PLAIN = {
    "metadata": AgentMetadata(
        version=1,
        name="owner",
        token=b"t" * 16,
        host=b"h" * 8,
        addresses=("memory", "unix", "tcp://10.0.0.7:5000"),
        contacts={"memory": b"c" * 8},
        regions=(
            RegionInfo(
                region_id=1,
                kind=MemoryKind.SHARED,
                size_bytes=4096,
                read_key=b"k" * 8,
                write_key=b"w" * 8,
                name="kv",
                transport_info={"shm": b"w"},
            ),
        ),
        certificate=b"f" * 32,
    ),
    "grant_request": GrantRequest(transport="shm", keys={TransferOp.READ: {5: b"k" * 8}}, payload=b"p"),
    "grant": Grant(payload=b"p", has_descriptor=True, error=ErrorInfo(code="transfer_refused", message="no", http_status=503)),
    "mapped_arena": MappedArena(size_bytes=4096, writable=True, is_resident=True),
    "kv_layout": KvLayout(
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        dtype="bfloat16",
        element_bytes=2,
        block_size=16,
        planes=1,
        ranks=(
            RankLayout(
                layers=(1, 0),
                heads=(1,),
                num_blocks=9,
                order="layer | kv block head token",
                strides_bytes=(40_960, 4096, 2048, 128),
                offset_bytes=64,
            ),
        ),
    ),
}  # fmt: skip
BYTES = {name: encode(message) for name, message in PLAIN.items()}


def extended(value: object) -> object:
    """Add a field that nobody knows to every map of fields, at every depth."""
    if isinstance(value, dict):
        known = {
            key: item if key in {"contacts", "keys", "transport_info"} else extended(item)
            for key, item in value.items()
        }
        return known | {"from_the_future": [1, {"a": None}]}
    return [extended(item) for item in value] if isinstance(value, list) else value


def test_every_message_has_its_bytes() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {name: data.hex() for name, data in BYTES.items()} == golden, (
        "if this was intended, read the top of this file"
    )


@pytest.mark.parametrize("name", BYTES)
def test_a_newer_agent_may_say_more_and_an_older_one_less(name: str) -> None:
    message = PLAIN[name]
    plain = msgspec.msgpack.decode(BYTES[name])

    def read(fields: object) -> object:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=type(message))

    assert read(extended(plain)) == message
    for field in msgspec.structs.fields(message):
        if not field.required:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            shorter = {key: value for key, value in plain.items() if key != field.encode_name}
            assert read(shorter) == msgspec.structs.replace(message, **{field.name: default})


if __name__ == "__main__":
    golden = {name: data.hex() for name, data in BYTES.items()}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
