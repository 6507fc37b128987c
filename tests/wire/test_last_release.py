"""Processes of the last release and of this version work together: its bytes are understood, and it finds in ours all that it reads.

`release_frames.json` has every message as the last release sent it. It is written once, at a release:
`cp tests/data/golden_frames.json tests/data/release_frames.json`. A message or field that was sent then may be dropped one release later,
together with the wire version's step.
"""

import json
from pathlib import Path

import msgspec
import pytest

from penstock.core.framing import LENGTH_BYTES, UnknownFrame
from tests.wire.test_golden_frames import CASES

RELEASE = Path(__file__).parent.parent / "data" / "release_frames.json"
FRAMES = {name: bytes.fromhex(text) for name, text in json.loads(RELEASE.read_text(encoding="utf-8")).items()}
CODECS = {name: (codec, message) for codec, name, message in CASES}


def lacks(ours, theirs, place=""):
    """Give the first place of an old message that a new one does not have, or has as another type; None where it has all."""
    if isinstance(theirs, dict):
        if not isinstance(ours, dict):
            return place
        found = (lacks(ours.get(key), value, f"{place}.{key}") for key, value in theirs.items())
    elif isinstance(theirs, list):
        if not isinstance(ours, list) or len(ours) < len(theirs):
            return place
        found = (lacks(*pair, f"{place}[]") for pair in zip(ours, theirs, strict=False))
    else:
        return None if type(ours) is type(theirs) else place
    return next((each for each in found if each is not None), None)


def test_no_message_of_the_release_is_gone():
    assert FRAMES.keys() <= CODECS.keys()
    assert len(FRAMES) > 50


@pytest.mark.parametrize("name", FRAMES)
def test_this_version_understands_what_the_release_sends(name):
    codec, message = CODECS[name]
    payload = FRAMES[name][LENGTH_BYTES:]
    read = codec.decode(payload)
    assert not isinstance(read, UnknownFrame)
    assert type(read) is type(message)
    said = msgspec.msgpack.decode(codec.encode(read)[LENGTH_BYTES:])
    assert lacks(said, msgspec.msgpack.decode(payload)) is None


@pytest.mark.parametrize("name", FRAMES)
def test_the_release_finds_all_that_it_reads_in_what_this_version_sends(name):
    codec, message = CODECS[name]
    ours = msgspec.msgpack.decode(codec.encode(message)[LENGTH_BYTES:])
    assert lacks(ours, msgspec.msgpack.decode(FRAMES[name][LENGTH_BYTES:])) is None


def test_a_field_that_is_gone_or_has_another_type_is_found():
    old = {"a": 1, "b": [{"c": b"x"}], "d": None}
    assert lacks(old | {"e": 2}, old) is None
    assert lacks({"b": [{"c": b"x"}], "d": None}, old) == ".a"
    assert lacks(old | {"b": [{"c": "x"}]}, old) == ".b[].c"
    assert lacks(old | {"b": []}, old) == ".b"
