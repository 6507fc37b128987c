"""Native direct streams beside their Python reference, and native text beside Python's and msgspec's."""

import asyncio
from itertools import product

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.errors import EngineError
from penstock.core.json_text import encode_json
from penstock.core.native import native
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.frontend.text.tokens import ByteDecoder
from penstock.runtime.requests.direct_deltas import DirectDeltas
from penstock.runtime.requests.direct_streams import DirectStreamPython, DirectStreams, DirectStreamsPython
from penstock.runtime.requests.outbox import CODEC, Deltas, Load
from tests.support.direct_client import FakeClient

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")

BYTES = st.one_of(
    st.binary(max_size=4),
    st.sampled_from(
        [b"a", b" b", b'"', b"\\", b"\n", b"\x1f", b"\x7f", "é".encode(), "€".encode(), "😀".encode()]
    ),
    st.sampled_from(
        [bytes([byte]) for byte in (0xC1, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0x80, 0x9F, 0xA0, 0xBF)]
    ),
)
VOCABULARY = st.lists(BYTES, min_size=8, max_size=8)
IDS = st.lists(st.integers(-1, 8), min_size=1, max_size=5)


def lookup(vocabulary):
    return lambda token_id: vocabulary[token_id] if 0 <= token_id < len(vocabulary) else b""


class Table(dict):
    def __init__(self, vocabulary):
        super().__init__()
        self.look_up = lookup(vocabulary)

    def __missing__(self, token_id):
        return self.look_up(token_id)


@given(vocabulary=VOCABULARY, feeds=st.lists(IDS, max_size=8))
def test_a_decoder_gives_pythons_text(vocabulary, feeds) -> None:
    decoder = native.ByteDecoder(native.TokenTable(lookup(vocabulary)))
    reference = ByteDecoder(Table(vocabulary))
    for ids in feeds:
        assert decoder.feed(ids) == reference.feed(ids)
    assert decoder.finish() == reference.finish()
    assert decoder.finish() == ""


def test_every_character_stands_in_json_without_line_ends() -> None:
    characters = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x11000))]
    table = native.TokenTable(lambda token_id: characters[token_id].encode())
    stream = native.DirectStream(native.ByteDecoder(table), b"<", b">", is_chunked=False)
    for number, character in enumerate(characters):
        chunk, _ = stream.chunk(pack_tokens([number]), 0.0)
        assert chunk == b"<" + encode_json(character) + b">"
        assert (len(chunk.decode().splitlines()), msgspec.json.decode(chunk[1:-1])) == (1, character)


def test_ids_beyond_the_table_are_looked_up_each_time() -> None:
    asked: list[int] = []
    table = native.TokenTable(lambda token_id: asked.append(token_id) or b"x")
    decoder = native.ByteDecoder(table)
    assert decoder.feed([5, 5, 2**31 - 1, 2**31 - 1, -7]) == "xxxx"
    assert asked == [5, 2**31 - 1, 2**31 - 1]


NAMES = ["chatcmpl-a-0", "chatcmpl-b-0", "é" * 20, "x" * 300]
DELTAS = st.builds(
    lambda name, ids, kind: Delta(
        request_id=name,
        token_ids=pack_tokens(ids),
        **(
            {},
            {},
            {},
            {"finish_reason": FinishReason.STOP},
            {"cached_tokens": 3},
            {"logprobs": (TokenLogprob(1, -0.5, ((2, -0.7),)),)},
            {"error": EngineError("it broke").to_info()},
            {"embedding": b"\0" * 300},
        )[kind],
    ),
    st.sampled_from(NAMES),
    st.lists(st.integers(-1, 8), max_size=70),
    st.integers(0, 7),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from(NAMES)),
        st.tuples(st.just("close"), st.sampled_from(NAMES)),
        st.tuples(st.just("feed"), st.lists(DELTAS, max_size=20).map(tuple)),
        st.tuples(st.just("feed"), st.lists(DELTAS, max_size=20).map(tuple)),
        st.tuples(st.just("flush"), st.floats(0, 9)),
        st.tuples(st.just("behind"), st.sampled_from(NAMES)),
        st.tuples(st.just("gone"), st.sampled_from(NAMES)),
    ),
    max_size=30,
)


class Side:
    """One implementation with its streams and clients."""

    def __init__(self, vocabulary, *, is_native: bool) -> None:
        self.streams = (DirectStreams if is_native else DirectStreamsPython)(6)
        self.clients = {name: FakeClient() for name in NAMES}
        self.rules = {}
        for name in NAMES:
            is_chunked = name != NAMES[1]
            if is_native:
                decoder = native.ByteDecoder(native.TokenTable(lookup(vocabulary)))
                self.rules[name] = native.DirectStream(decoder, b"{before", b"after}", is_chunked=is_chunked)
            else:
                decoder = ByteDecoder(Table(vocabulary))
                self.rules[name] = DirectStreamPython(decoder, b"{before", b"after}", is_chunked=is_chunked)

    def do(self, step, value):
        streams = self.streams
        if step == "open":
            try:
                streams.open(value, self.rules[value], self.clients[value].client)
            except ValueError as error:
                return str(error)
        elif step == "close":
            return streams.close(value)
        elif step == "feed":
            return streams.feed(value)
        elif step == "flush":
            return streams.flush(value)
        elif step == "behind":
            self.clients[value].transport.unsent_bytes = 101
        else:
            self.clients[value].transport.is_closed = True
        return None

    def state(self):
        rules = [(rule.tokens, rule.last_s, rule.sent_s, rule.gaps_s) for rule in self.rules.values()]
        clients = [(c.transport.chunks, c.gaps_s, c.interrupts) for c in self.clients.values()]
        return len(self.streams), rules, clients


def payload(deltas) -> bytes:
    return CODEC.encode(Deltas(deltas=deltas))[4:]


@given(vocabulary=VOCABULARY, steps=STEPS)
@example(
    vocabulary=[b"a"] * 8,
    steps=[
        ("open", NAMES[0]),
        (
            "feed",
            (
                Delta(request_id=NAMES[0], cached_tokens=1),
                Delta(request_id=NAMES[0], token_ids=pack_tokens([1])),
            ),
        ),
    ],
)
def test_frames_are_taken_as_the_reference_takes_them(vocabulary, steps) -> None:
    ours, reference = Side(vocabulary, is_native=True), Side(vocabulary, is_native=False)
    for step, value in steps:
        given_value = payload(value) if step == "feed" else value
        assert ours.do(step, given_value) == reference.do(step, given_value)
        assert ours.state() == reference.state()


@given(
    deltas=st.lists(DELTAS, max_size=6).map(tuple),
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 400) | st.none(),
)
def test_bytes_that_are_no_frame_are_left_alone(deltas, edits, cut) -> None:
    content = bytearray(payload(deltas))
    for at, byte in edits:
        if at < len(content):
            content[at] = byte
    broken = bytes(content[:cut])
    ours, reference = Side([b"a"] * 8, is_native=True), Side([b"a"] * 8, is_native=False)
    for side in (ours, reference):
        side.do("open", NAMES[0])
    rest = ours.do("feed", broken)
    try:
        msgspec.msgpack.decode(broken, type=Deltas)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert rest == reference.do("feed", broken)
    assert ours.do("flush", 1.0) == reference.do("flush", 1.0)
    assert ours.state() == reference.state()


def test_other_frames_are_left_alone() -> None:
    side = Side([b"a"] * 8, is_native=True)
    side.do("open", NAMES[0])
    assert side.do("feed", CODEC.encode(Load(load=WorkerLoad()))[4:]) is None
    assert side.do("feed", b"") is None


def test_a_client_may_close_others_while_it_is_told() -> None:
    side = Side([b"a"] * 8, is_native=True)
    for name in NAMES[:2]:
        side.do("open", name)
    one, two = (side.clients[name] for name in NAMES[:2])
    closed = []
    client = one.client._replace(interrupted=lambda _: closed.append(side.streams.close(NAMES[1])))
    side.streams.close(NAMES[0])
    side.streams.open(NAMES[0], side.rules[NAMES[0]], client)
    one.transport.unsent_bytes = 101
    side.do("feed", payload(tuple(Delta(request_id=name, token_ids=pack_tokens([1])) for name in NAMES[:2])))
    assert side.do("flush", 1.0) == (2, [], None)
    assert closed == [(pack_tokens([1]), b"", 1)]
    assert two.transport.chunks


@pytest.mark.parametrize("raising", ["write", "is_closing", "get_write_buffer_size", "passed"])
@pytest.mark.parametrize("is_native", [True, False])
def test_what_a_client_raises_takes_nothing_from_the_others(raising, is_native) -> None:
    side = Side([b"a"] * 8, is_native=is_native)
    broken = side.clients[NAMES[0]]

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of the client's")

    if raising == "passed":
        broken.client = broken.client._replace(passed=fail)
    else:
        setattr(broken.transport, raising, fail)
    for name in NAMES[:2]:
        side.do("open", name)
    ids = pack_tokens([1] * 6)
    side.do("feed", payload(tuple(Delta(request_id=name, token_ids=ids) for name in NAMES[:2])))
    tokens, grants, failure = side.do("flush", 1.0)
    assert (tokens, grants) == (12, [(NAMES[0], 6), (NAMES[1], 6)])
    assert repr(failure) == repr(RuntimeError("a fault of the client's"))
    assert failure.__traceback__ is not None
    other = side.clients[NAMES[1]]
    assert (len(other.transport.chunks), other.gaps_s) == (1, [1.0 / 6])


async def test_grants_are_sent_beside_what_a_client_raises() -> None:
    side, written, raised = Side([b"a"] * 8, is_native=True), [], []

    def fail(_gap_s: float) -> None:
        raise RuntimeError("a fault of the client's")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
    deltas = DirectDeltas(6, lambda *told: written.append(told))
    deltas.open(NAMES[0], side.rules[NAMES[0]], side.clients[NAMES[0]].client._replace(passed=fail))
    deltas.decode(payload((Delta(request_id=NAMES[0], token_ids=pack_tokens([1] * 6)),)))
    await asyncio.sleep(0)
    assert written == [(6, [(NAMES[0], 6)])]
    assert [str(error) for error in raised] == ["a fault of the client's"]


def test_every_short_run_of_awkward_bytes_gives_pythons_text() -> None:
    awkward = bytes.fromhex("41 80 8f 90 9f a0 bf c1 c2 e0 e1 ed ef f0 f1 f4 f5")
    for size in (1, 2, 3):
        for run in product(awkward, repeat=size):
            decoder = native.ByteDecoder(native.TokenTable(lambda _, run=run: bytes(run)))
            reference = ByteDecoder({0: bytes(run)})
            assert (decoder.feed([0]), decoder.finish()) == (reference.feed([0]), reference.finish()), run
