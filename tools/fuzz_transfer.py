"""Feeds parsers of the transfer library with what libFuzzer makes up: `python tools/fuzz_transfer.py TARGET [-runs=N]`.

TARGET is one of those in tests.support.wire_targets. It runs until it is stopped, or finds something.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.support

try:
    import atheris
except ModuleNotFoundError:
    sys.exit("atheris is not installed: `make fuzz-wire` installs it")

from penstock.core.descriptors import TransferOp
from penstock.core.wire import encode
from penstock.transfer.link.grants import GrantRequest
from penstock.transfer.link.metadata import TRANSFER_VERSION, AgentMetadata, encode_metadata
from penstock.transfer.transports.tcp.frames import Get, PackedRanges, Push, Put, encode_frame
from tests.support.wire_targets import TARGETS


def _seeds(target: str) -> list[bytes]:
    """Give what is right, so that the fuzzer begins behind the first checks."""
    ranges = PackedRanges(regions=(1,), keys=(b"k" * 8,), offsets=bytes(8), lengths=b"\1" + bytes(7))
    frames = [
        Put(exchange=1, ranges=ranges, payload=b"x"),
        Get(exchange=1, ranges=ranges),
        Push(exchange=1, stream=1, op=TransferOp.WRITE, ranges=ranges),
    ]
    if target == "tcp_owner":
        return [len(data := encode_frame(frame)).to_bytes(2, "little") + data for frame in frames]
    if target == "grants":
        ask = encode(GrantRequest(transport="shm", keys={TransferOp.READ: {1: b"k" * 8}}))
        return [len(ask).to_bytes(4, "little") + ask]
    metadata = AgentMetadata(version=TRANSFER_VERSION, name="a", token=b"t" * 16, host=b"h" * 8)
    return [encode_metadata(metadata)]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: fuzz_transfer.py {{{','.join(TARGETS)}}} [libFuzzer's options]")
    target = sys.argv.pop(1)
    for seed in _seeds(target):
        TARGETS[target](seed)
    seeds = _seeds(target)

    def one(data: bytes) -> None:
        """Feed the bytes, and a right message that they change: its place is in the first byte."""
        TARGETS[target](data)
        if data:
            right = seeds[data[0] % len(seeds)]
            at = data[0] % len(right)
            TARGETS[target](right[:at] + data[1:] + right[at + len(data) - 1 :])

    # `instrument_imports` counts nothing in modules of an editable install, whose loader is another.
    atheris.instrument_all()
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
