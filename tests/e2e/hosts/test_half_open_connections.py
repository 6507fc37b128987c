"""A registry, or an engine that publishes KV events, on another host, whose connections are lost without a word: they are made again."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cable import bad_cable
from tests.support.host import Host
from tests.support.registries import ApiServer, Etcd, Hub, Nats, free_port

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "namespaces", "etcd", "nats-server")]
ROOT = Path(__file__).parents[3]
PROGRAM = (sys.executable, "-m", "tests.support.registry_client")
EVENTS = (sys.executable, "-m", "tests.support.kv_event_peer")
STAYS, DIES, COMES = 1, 2, 3


REGISTRIES = {"kubernetes": ApiServer, "etcd": Etcd, "nats": Nats, "local": Hub}
WATCHES = {"kubernetes": "watch=1", "etcd": "/v3/watch", "nats": "", "local": ""}
"""What the connections of a watch begin with, where others can be told from them."""


@pytest.mark.parametrize("fault", ["forgotten", pytest.param("cut", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "discovery",
    ["etcd", *(pytest.param(name, marks=pytest.mark.nightly) for name in REGISTRIES if name != "etcd")],
)
def test_a_watch_over_a_connection_that_is_lost_without_a_word_misses_nobody(tmp_path, discovery, fault):
    """Keepalive finds it within 8 s; without, it takes 5 to 10 minutes or for ever, longer than a host waits for a line.

    `forgotten`: a NAT loses the entry of the watch alone. `cut`: nothing is carried until a watch on the other side has seen what changed.
    """
    with bad_cable() as laid, ExitStack() as stack:
        server = REGISTRIES[discovery](host=laid.addresses[1], prefix=("ip", "netns", "exec", laid.names[1]))
        server.start()
        stack.callback(server.close)

        def client(place: int, name: str, *words: str):
            host = Host(laid.names[place], tmp_path / name, stack)
            return host, host.start(*PROGRAM, words[0], discovery, server.url, *words[1:], cwd=ROOT)

        def member(number: int):
            host, process = client(1, f"member-{number}", "member", str(number))
            host.wait("^registered")
            return process

        def sees(watcher: Host, *numbers: int) -> None:
            """Wait until a watcher's latest line is this."""
            watcher.wait(f"^{json.dumps(sorted(numbers))}$".replace("[", r"\[").replace("]", r"\]"))

        doomed = [member(number) for number in (STAYS, DIES)][-1]
        far, _ = client(0, "far", "watch")
        near, _ = client(1, "near", "watch")
        for watcher in (far, near):
            sees(watcher, STAYS, DIES)
        if fault == "cut":
            laid.carry(loss=1.0)
        else:
            laid.carry(forget=WATCHES[discovery])
        member(COMES)
        doomed.kill()
        sees(near, STAYS, COMES)
        if fault == "cut":
            laid.carry()
        sees(far, STAYS, COMES)


def test_kv_events_go_on_after_a_connection_that_is_lost_without_a_word(tmp_path):
    pytest.importorskip("zmq")
    with bad_cable() as laid, ExitStack() as stack:
        endpoint = f"tcp://{laid.addresses[1]}:{free_port()}"
        follower, publisher = (
            Host(name, tmp_path / what, stack)
            for name, what in zip(laid.names, ("follow", "publish"), strict=True)
        )
        publisher.start(*EVENTS, "publish", endpoint, cwd=ROOT)
        follower.start(*EVENTS, "follow", endpoint, cwd=ROOT)
        follower.wait("^BlockStored")
        laid.carry(forget="")
        follower.wait("^AllBlocksCleared")  # what was sent meanwhile is lost, and nothing replays it
        follower.wait("^BlockStored")
