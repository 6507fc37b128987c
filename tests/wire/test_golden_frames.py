"""The bytes of every message, as they are on the wire: what was sent yesterday must be understood tomorrow.

After an intended change (a new field with a default), run this file as a program to write the bytes anew.
"""

import contextlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.descriptors import TransferOp
from penstock.core.errors import ErrorInfo, ProtocolError
from penstock.core.net import framing
from penstock.core.net.framing import LENGTH_BYTES, FrameReader, UnknownFrame
from penstock.core.net.handshake import Challenge
from penstock.core.types.cards import CardFile, ModelCard
from penstock.core.types.changes import BecomeRole, Sleep, WakeUp
from penstock.core.types.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPosition,
    EventSnapshot,
    Holder,
    Tier,
)
from penstock.core.types.instances import (
    EngineInfo,
    Instance,
    InstancePut,
    InstanceRemoved,
    InstanceState,
    Role,
    WatchSynced,
)
from penstock.core.types.kv.actions import KvEvict, KvFlush, KvHeld, KvList, KvPin, KvReport, KvUnpin
from penstock.core.types.kv.exchange import KvAccess, KvExchange, KvPeer
from penstock.core.types.kv.layout import KvLayout
from penstock.core.types.load import KvRead, KvTierCounts, PeerCount, SessionCounts, TenantCount, WorkerLoad
from penstock.core.types.media import ExpandedPrompt, MediaItem, MediaPrompt
from penstock.core.types.requests import (
    Delta,
    FinishReason,
    KvHandle,
    KvRetention,
    Prefetch,
    PromptLogprobs,
    Request,
    SamplingParams,
    SessionAction,
    SessionControl,
    TokenLogprob,
)
from penstock.core.wire import pack_hashes, pack_tokens
from penstock.runtime import handshake
from penstock.runtime.discovery import messages
from penstock.runtime.requests import frames
from penstock.transfer.link import frames as links
from penstock.transfer.transports.tcp import frames as tcp_frames

GOLDEN = Path(__file__).parent.parent / "data" / "golden_frames.json"

ERROR = ErrorInfo(code="overloaded", message="full", param="n", retry_after_s=1.5, http_status=503)
CARD = ModelCard(
    name="m",
    context_length=4096,
    block_size=16,
    salt=b"salt",
    eos_token_ids=(2, 3),
    files=(CardFile(name="tokenizer.json", sha256="ab", size_bytes=9),),
    created_s=1,
    default_sampling=(("temperature", 0.5),),
)
ENGINE = EngineInfo(
    block_size=16,
    total_blocks=64,
    context_length=4096,
    max_batch_tokens=512,
    max_running_requests=32,
    kv_bytes_per_block=1024,
    kv_layout=KvLayout(
        num_layers=2, num_kv_heads=1, head_dim=8, dtype="float16", element_bytes=2, block_size=16
    ).split(num_blocks=64),
)
INSTANCE = Instance(
    worker_id=7,
    name="worker-0",
    address="tcp://127.0.0.1:5000",
    role=Role.DECODE,
    card=CARD,
    engine=ENGINE,
    state=InstanceState.DRAINING,
    pid=42,
    host="h",
    exchange=KvExchange(transports=("shm", "tcp"), listens=("unix",), host=b"host"),
)
SOURCE = KvAccess(agent=b"PTA", layout=b"L", regions=((1, 2), (3,)))
HANDLE = KvHandle(prefill_worker=7, pin_id=3, ttl_s=2.5, num_tokens=32, block_ids=b"\1\0\0\0", source=SOURCE)
REQUEST = Request(
    request_id="r-0",
    model="m",
    token_ids=pack_tokens([1, -2, 300000]),
    sampling=SamplingParams(
        max_tokens=8,
        temperature=0.0,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=1,
        stop_token_ids=(2,),
        ignore_eos=True,
        min_tokens=1,
        logprobs=2,
    ),
    block_hashes=pack_hashes([1, 2**63]),
    salt=b"salt",
    choice=1,
    num_emitted=2,
    deadline_s=30.5,
    kv=HANDLE,
    expected_cached_tokens=4,
    known_peer_arrivals=7,
    session="agent",
    expected_output_tokens=100,
    speculative_prefill=True,
    retention=KvRetention(priority=-2, ttl_s=60.5),
    follows_tool=True,
    is_background=True,
    embeds=True,
    session_control=SessionControl(action=SessionAction.OPEN, ttl_s=30.5, is_ephemeral=True),
)
DELTA = Delta(
    request_id="r-0",
    token_ids=pack_tokens([5]),
    finish_reason=FinishReason.STOP,
    cached_tokens=16,
    logprobs=(TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5), (6, -1.5))),),
    error=ERROR,
    kv=HANDLE,
    embedding=bytes(8),
)
_COUNTS = WorkerLoad.__struct_fields__[:-16]
_TIER_COUNTS = KvTierCounts.__struct_fields__
LOAD = WorkerLoad(
    **{name: i + 1 for i, name in enumerate(_COUNTS)},
    onboarded_tokens=(14, 15, 16),
    oldest_wait_s=2.5,
    kv_reads=(KvRead(prefill_worker=9, transport="shm", num_bytes=4096, seconds=0.5),),
    kv_failures=17,
    kv_expired=18,
    kv_refused=19,
    failed_steps=20,
    kv_tiers=(
        KvTierCounts(
            **{name: i + 1 for i, name in enumerate(_TIER_COUNTS)}
            | {"tier": Tier.HOST, "is_off": True, "load_s": 0.5, "saved_s": -0.5}
        ),
    ),
    sessions=SessionCounts(**{name: i + 1 for i, name in enumerate(SessionCounts.__struct_fields__)}),
    kv_corrupt=21,
)
STORED = BlockStored(block_hashes=pack_hashes([1, 2]), parent_block_hash=9, block_size=16, tier=Tier.HOST)
BATCH = EventBatch(
    sequence=5,
    events=(STORED, BlockRemoved(block_hashes=pack_hashes([2]), tier=Tier.DISK), AllBlocksCleared()),
)
MEDIA = MediaPrompt(
    token_ids=pack_tokens([1, 9]),
    items=(MediaItem(modality="image", data=b"png", digest=b"d" * 32, position=1),),
)
HELLO = {
    "challenge": Challenge(version=1, nonce=b"n" * 16),
    "hello": handshake.Hello(
        wire_version=1,
        hash_version=1,
        key_fingerprint="f00d",
        nonce=b"m" * 16,
        proof=b"p" * 32,
        process="frontend-0",
        worker_id=7,
        window_tokens=512,
    ),
    "hello_reply": handshake.HelloReply(
        wire_version=1,
        hash_version=1,
        key_fingerprint="f00d",
        proof=b"p" * 32,
        process="worker-0",
        worker_id=7,
        error=ERROR,
    ),
}
LIFE = {"ping": framing.Ping(), "pong": framing.Pong(), "goodbye": framing.Goodbye(reason="done")}
PLANE = {
    **HELLO,
    "submit": frames.Submit(request=REQUEST),
    "prefetch": frames.PrefetchKv(
        prefetch=Prefetch(
            request_id="r-0",
            block_hashes=pack_hashes([1, 2**63]),
            transfer_id=b"transfer",
            prefill_worker=7,
            source=SOURCE,
        )
    ),
    "abort": frames.Abort(request_id="r-0"),
    "grant": frames.Grant(grants=(("r-0", 128), ("r-1", 1))),
    "subscribe": frames.Subscribe(after_sequence=4),
    "subscribe_all": frames.Subscribe(),
    "subscribe_host": frames.Subscribe(after_sequence=4, holder=Holder.HOST),
    "unsubscribe": frames.Unsubscribe(holder=Holder.FLEET),
    "fetch": frames.Fetch(fetch_id=1, sha256="ab"),
    "fetch_chunk": frames.FetchChunk(fetch_id=1, data=b"content", last=True, error=ERROR),
    "host_event": frames.Event(message=msgspec.structs.replace(BATCH, holder=Holder.HOST)),
    "deltas": frames.Deltas(deltas=(DELTA, Delta(request_id="r-1"))),
    "deltas_prompt_logprobs": frames.Deltas(
        deltas=(
            Delta(
                request_id="r-0",
                prompt_logprobs=(
                    PromptLogprobs(
                        start=1,
                        token_ids=pack_tokens([5, 6, 7, 7]),
                        logprobs=bytes(16),
                        ranks=pack_tokens([2, 1]),
                    ),
                ),
            ),
        )
    ),
    "submit_prompt_logprobs": frames.Submit(
        request=Request(
            request_id="r",
            model="m",
            token_ids=pack_tokens([1, 2]),
            sampling=SamplingParams(max_tokens=1, prompt_logprobs=2, prompt_logprobs_from=1),
        )
    ),
    "load": frames.Load(load=LOAD),
    "change_role": frames.Change(call_id=2, change=BecomeRole(role=Role.DECODE)),
    "change_sleep": frames.Change(call_id=2, change=Sleep(level=1)),
    "change_kv_list": frames.Change(call_id=2, change=KvList()),
    "change_kv_pin": frames.Change(
        call_id=2, change=KvPin(name="system", block_hashes=pack_hashes([1, 2**63]), ttl_s=2.5)
    ),
    "change_kv_unpin": frames.Change(call_id=2, change=KvUnpin(name="a", is_session=True, tenant="t")),
    "change_kv_evict": frames.Change(call_id=2, change=KvEvict(block_hashes=pack_hashes([1, 2**63]))),
    "change_kv_flush": frames.Change(call_id=2, change=KvFlush(tier=Tier.DEVICE)),
    "changed_kv": frames.Changed(
        call_id=2,
        report=KvReport(
            blocks=3,
            held=(
                KvHeld(
                    name="a",
                    tenant="t",
                    is_pin=True,
                    is_ephemeral=True,
                    blocks=2,
                    requests=1,
                    expires_s=2.5,
                    is_speculative=True,
                ),
            ),
        ),
    ),
    "change_wake_up": frames.Change(call_id=2, change=WakeUp()),
    "changed": frames.Changed(call_id=2, error=ERROR),
    "submit_media": frames.Submit(request=msgspec.structs.replace(REQUEST, kv=None, media=MEDIA)),
    "submit_peer": frames.Submit(
        request=msgspec.structs.replace(
            REQUEST,
            kv=None,
            peer=KvPeer(worker_id=3, num_blocks=2, source=KvAccess(agent=b"agent"), block_s=0.5),
        )
    ),
    "expand_media": frames.ExpandMedia(call_id=3, prompt=MEDIA),
    "media_expanded": frames.MediaExpanded(
        call_id=3, prompt=ExpandedPrompt(token_ids=pack_tokens([1, 9, 9]), positions=(1,))
    ),
    "media_refused": frames.MediaExpanded(call_id=3, error=ERROR),
    "count_tenants": frames.CountTenants(
        call_id=4, counts=(("t", TenantCount(requests=2, tokens=-7, inflight=3)), ("u", TenantCount()))
    ),
    "tenants_counted": frames.TenantsCounted(
        call_id=4, peers=(("t", PeerCount(requests=2, tokens=-7, inflight=3, frontends=1)),)
    ),
    "hello_broadcast": msgspec.structs.replace(HELLO["hello"], broadcast_key=b"k" * 8),
    "load_number": frames.Load(load=WorkerLoad(number=3)),
    "event_position": frames.Event(message=EventPosition(sequence=5, holder=Holder.HOST)),
    "event_batch": frames.Event(message=BATCH),
    "event_snapshot": frames.Event(message=EventSnapshot(sequence=5, chunk=1, last=True, events=(STORED,))),
    **LIFE,
}
HUB = {
    **HELLO,
    "welcome": messages.Welcome(hub_id="beef", lease_ttl_s=5.0),
    "register": messages.Register(instance=INSTANCE),
    "registered": messages.Registered(worker_id=7, error=ERROR),
    "renew": messages.Renew(worker_ids=(7, 8)),
    "lapsed": messages.Lapsed(worker_ids=(8,)),
    "withdraw": messages.Withdraw(worker_id=7),
    "refusals": messages.Refusals(count=3),
    "watch": messages.Watch(),
    "change_put": messages.Change(change=InstancePut(instance=INSTANCE)),
    "change_removed": messages.Change(change=InstanceRemoved(worker_id=7, reason="gone")),
    "change_synced": messages.Change(change=WatchSynced()),
    **LIFE,
}
LINK_CODEC = links.link_codec()
LINK = {
    "challenge": Challenge(version=1, nonce=b"n" * 16),
    "greeting": links.Greeting(version=1, nonce=b"m" * 16, proof=b"p" * 32, name="worker-0", host=b"h" * 8),
    "welcome": links.Welcome(proof=b"p" * 32, link_id=7),
    "welcome_not": links.Welcome(error=ERROR),
    "transport": links.TransportMessage(transport="tcp", payload=b"says"),
    "notification": links.Notification(payload=b"done"),
    "withdrawn": links.Withdrawn(region_id=3),
    "withdrawn_done": links.WithdrawnDone(region_id=3),
    **LIFE,
}
RANGES = tcp_frames.PackedRanges(
    regions=(3, 5), keys=(b"k" * 8, b"l" * 8), offsets=bytes(range(16)), lengths=bytes(16), of=bytes(8)
)
TCP = {
    "put": tcp_frames.Put(exchange=1, ranges=RANGES, payload=b"bytes", checksums=b"sums"),
    "get": tcp_frames.Get(exchange=2, ranges=RANGES, checksum=True),
    "push": tcp_frames.Push(exchange=3, stream=4, op=TransferOp.WRITE, ranges=RANGES, checksum=True),
    "stop": tcp_frames.Stop(exchange=3, error=ERROR),
    "ready": tcp_frames.StreamReady(stream=4),
    "go": tcp_frames.Go(exchange=3),
    "done": tcp_frames.Done(exchange=2, payload=b"bytes", checksums=b"sums"),
    "ended": tcp_frames.Ended(exchange=3, error=ERROR),
}
CASES = [(frames.CODEC, name, message) for name, message in PLANE.items()] + [
    (messages.CODEC, f"hub_{name}", message) for name, message in HUB.items()
]
CASES += [(LINK_CODEC, f"link_{name}", message) for name, message in LINK.items()]
CASES += [(tcp_frames.TCP_CODEC, f"tcp_{name}", message) for name, message in TCP.items()]
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
    for codec, known in (
        (frames.CODEC, PLANE),
        (messages.CODEC, HUB),
        (LINK_CODEC, LINK),
        (tcp_frames.TCP_CODEC, TCP),
    ):
        assert codec.tags == {message.__struct_config__.tag for message in known.values()}


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
    plain = msgspec.msgpack.decode(payload_of(frames.CODEC, PLANE["deltas"]))
    plain["deltas"] = [[*plain["deltas"][0], "from the future"], ["r-1"]]
    assert frames.CODEC.decode(msgspec.msgpack.encode(plain)) == PLANE["deltas"]


def test_an_unknown_message_is_reported_and_not_an_error():
    payload = msgspec.msgpack.encode({"type": "from_the_future", "value": 1})
    assert frames.CODEC.decode(payload) == UnknownFrame("from_the_future")


def test_an_unknown_event_makes_the_frame_unknown():
    plain = msgspec.msgpack.decode(payload_of(frames.CODEC, PLANE["event_batch"]))
    plain["message"]["events"].append({"type": "moved"})
    assert frames.CODEC.decode(msgspec.msgpack.encode(plain)) == UnknownFrame("event")


def test_a_known_message_with_impossible_content_is_an_error():
    payload = msgspec.msgpack.encode({"type": "abort", "request_id": 5})
    with pytest.raises(ProtocolError, match=r"tag abort: .*request_id"):
        frames.CODEC.decode(payload)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
tagged = st.builds(
    lambda tag, fields: msgspec.msgpack.encode({"type": tag} | fields),
    st.sampled_from(sorted(frames.CODEC.tags)),
    st.dictionaries(
        st.sampled_from(["request", "request_id", "grants", "deltas", "message", "load", "fetch_id", "data"]),
        anything,
    ),
)


@given(st.binary(max_size=200) | anything.map(msgspec.msgpack.encode) | tagged)
def test_no_bytes_crash_the_decoder(payload):
    for codec in (frames.CODEC, messages.CODEC):
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
            frames.CODEC.decode(payload)


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
